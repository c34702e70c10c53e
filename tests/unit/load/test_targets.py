"""Which boxes of a tensor a rank holds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.load.targets import _runs


@given(st.lists(st.integers(0, 30), max_size=20, unique=True).map(sorted))
def test_runs_are_the_longest_stretches_of_indices_that_follow_each_other(indices: list[int]) -> None:
    runs = list(_runs(torch.tensor(indices, dtype=torch.int64)))
    assert [first + i for first, _, length in runs for i in range(length)] == indices
    assert [at for _, at, _ in runs] == [sum(n for _, _, n in runs[:i]) for i in range(len(runs))]
    assert all(a[0] + a[2] < b[0] for a, b in zip(runs, runs[1:], strict=False))
