"""Which boxes of a tensor a rank holds."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ebbtide.load.targets import _runs, empty_module


@given(st.lists(st.integers(0, 30), max_size=20, unique=True).map(sorted))
def test_runs_are_the_longest_stretches_of_indices_that_follow_each_other(indices: list[int]) -> None:
    runs = list(_runs(torch.tensor(indices, dtype=torch.int64)))
    assert [first + i for first, _, length in runs for i in range(length)] == indices
    assert [at for _, at, _ in runs] == [sum(n for _, _, n in runs[:i]) for i in range(len(runs))]
    assert all(a[0] + a[2] < b[0] for a, b in zip(runs, runs[1:], strict=False))


def test_memory_of_parameters_that_a_wrapper_replaces_is_freed() -> None:
    with torch.device("meta"):
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    empty = empty_module("cpu")
    empty(one), empty(other)
    assert other.weight is one.weight and not one.weight.is_meta
    made = weakref.ref(one.weight)
    one.weight = other.weight = None  # type: ignore[assignment]
    assert made() is None
