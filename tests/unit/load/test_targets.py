"""Which boxes of a tensor a rank holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.load.targets import _placed, _runs, empty_module


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


class Mesh:
    """The coordinate of a rank in a mesh, as far as placements need it."""

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.shape, self._coordinate = shape, coordinate

    def get_coordinate(self) -> tuple[int, ...]:
        return self._coordinate


class Largest(TorchDispatchMode):
    """Notes the most bytes of a tensor that is made with memory."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


@given(st.integers(0, 40), st.tuples(st.integers(1, 4), st.integers(1, 4)), st.booleans(), st.data())
def test_placed_boxes_are_the_elements_that_the_placements_deal(
    rows: int, counts: tuple[int, int], strided: bool, data: st.DataObject
) -> None:
    coordinate = tuple(data.draw(st.integers(0, count - 1)) for count in counts)
    placements = [_StridedShard(0, split_factor=counts[1]) if strided else Shard(0), Shard(0)]
    dealt = torch.arange(rows)
    for placement, count, position in zip(placements, counts, coordinate, strict=True):
        dealt = placement._split_tensor(dealt, count, with_padding=False)[0][position]
    placed = _placed("weight", (rows, 1), Mesh(counts, coordinate), placements)
    assert [box.start[0] + i for box, _ in placed for i in range(box.size[0])] == dealt.tolist()
    assert [at[0] for _, at in placed] == [sum(box.size[0] for box, _ in placed[:i]) for i in range(len(placed))]


def test_placing_a_long_column_makes_no_tensor_of_its_length() -> None:
    with Largest() as largest:
        ((box, at),) = _placed("weight", (1 << 20, 1), Mesh((8, 2), (3, 1)), [Shard(0), Shard(0)])
    assert (box.start, box.size, at) == ((7 << 16, 0), (1 << 16, 1), (0, 0))
    assert largest.nbytes == 0
