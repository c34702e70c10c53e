"""The state of a block's objects: when it is reused, and that it then matches the objects."""

from __future__ import annotations

import array
import gc
import io
import sys
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ebbtide.wrap.arrays import MOST_ARRAY_BYTES, MOST_DIGESTED_BYTES
from ebbtide.wrap.state import MOST_ELEMENTS, State, States


class _Noted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _Free:
    def __init__(self) -> None:
        self.value = 1


class _Weight(nn.Parameter):
    """Of a class that is not torch's: it has attributes of its own, as 8-bit weights have their scales."""


def _block() -> Any:
    block: Any = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    block[0].weight = _Weight(block[0].weight.data)
    block[0].weight.scale = block[0].weight.data
    block.list, block.set, block.queue = [1, 2], {1}, deque([1])
    block.dict, block.order, block.counter = {"a": 1, "b": 2}, OrderedDict(a=1, b=2), Counter("aab")
    block.first, block.second = {"a": None, "b": None}, {"c": None, "d": None}
    block.noted, block.free, block.inside, block.empty = _Noted(1), _Free(), ([1], "x"), _Noted(None)
    del block.empty.value
    return block


def _reverse(block: Any) -> None:
    block.order.move_to_end("a")


def _move(source: dict[str, None], target: dict[str, None]) -> None:
    """Move the last entry of a dictionary to the front of another: together they hold the same in the same order."""
    (key, value), rest = source.popitem(), dict(target)
    target.clear()
    target.update({key: value}, **rest)


def _replace_attributes(block: Any) -> None:
    block.free.__dict__ = {"value": 1}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda block: setattr(block, "scale", 2.0),
    "an attribute that is equal": lambda block: setattr(block, "list", [1, 2]),
    "a parameter": lambda block: setattr(block[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "an attribute of a parameter": lambda block: setattr(block[0].weight, "scale", None),
    "a submodule": lambda block: block.append(nn.Identity()),
    "the mode": lambda block: block[1].eval(),
    "a list": lambda block: block.list.append(3),
    "a list that stays as long": lambda block: block.list.reverse(),
    "a set": lambda block: block.set.add(2),
    "a queue": lambda block: block.queue.rotate() or block.queue.append(0),
    "a dictionary's value": lambda block: block.dict.update(a=5),
    "a dictionary's key": lambda block: block.dict.update(c=block.dict.pop("b")),
    "a dictionary's order": _reverse,
    "a dictionary's entry that moves on": lambda block: _move(block.first, block.second),
    "a dictionary's entry that moves back": lambda block: _move(block.second, block.first),
    "a counter": lambda block: block.counter.update("b"),
    "a slot": lambda block: setattr(block.noted, "value", 2),
    "a slot that was empty": lambda block: setattr(block.empty, "value", 2),
    "an object": lambda block: setattr(block.free, "value", 2),
    "an object's dictionary": _replace_attributes,
    "a list in a tuple": lambda block: block.inside[0].append(1),
    "an attribute of an ordered dictionary": lambda block: setattr(block[1]._forward_hooks, "note", 1),
    "an empty dictionary": lambda block: block[1]._buffers.update(one=torch.ones(1)),
}


def test_a_state_is_used_again_while_nothing_changes() -> None:
    states, block = States(), _block()
    first = states.before(block)
    states.after(block, first)
    assert states.before(block) is first


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_is_not_used_again_after_a_change(change: str) -> None:
    states, block = States(), _block()
    first = states.before(block)
    states.after(block, first)
    CHANGES[change](block)
    assert not first.same()
    later = states.before(block)
    assert later is not first
    assert later.same()


def test_keys_of_other_classes_are_compared_by_identity() -> None:
    block, (one, other) = _block(), torch.ones(2, 2)
    block.dict = {one: 1}
    state = State(block.modules())
    assert state.same()
    block.dict[other] = block.dict.pop(one)  # to compare two such keys would raise
    assert not state.same()


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "an object's dictionary"])
def test_changes_since_are_restored_and_recorded_again(change: str) -> None:
    block = _block()
    before = State(block.modules())
    assert before.now() is before
    CHANGES[change](block)
    after = before.now()
    assert after is not before
    before.restore()
    assert before.same()
    assert not after.same()
    after.restore()
    assert after.same()


def test_a_block_with_an_array_is_searched_each_time() -> None:
    states, block = States(), _block()
    block.array = np.zeros(2)
    first = states.before(block)
    assert not first.complete
    states.after(block, first)
    block.array[0] = 1
    later = states.before(block)
    assert later is not first
    block.array[0] = 2
    later.restore()
    assert block.array[0] == 1


@pytest.mark.parametrize("kind", [bytearray, lambda values: array.array("B", values)])
def test_arrays_of_the_standard_library_are_restored(kind: Callable[[list[int]], Any]) -> None:
    block = _block()
    block.array = kind([1, 2])
    before = State(block.modules())
    block.array[0] = 7
    block.array.append(3)
    before.restore()
    assert block.array == kind([1, 2])


def test_a_large_array_is_not_copied_and_very_large_ones_are_too_much() -> None:
    block = _block()
    block.arrays = [np.zeros(MOST_ARRAY_BYTES + 1, "u1")]
    state = State(block.modules())
    assert state.large_arrays == block.arrays and state.complete
    block.arrays = [np.zeros(MOST_DIGESTED_BYTES + 1, "u1")]
    assert State(block.modules()).too_much
    block.arrays[0].flags.writeable = False
    assert not State(block.modules()).too_much


@pytest.mark.parametrize("kind", [list, tuple, dict.fromkeys])
def test_a_long_list_is_too_much_and_not_copied(kind: Callable[[range], Any]) -> None:
    block = _block()
    block.numbers = kind(range(10 * MOST_ELEMENTS))
    state = State(block.modules())
    assert state.too_much and not any(held is block.numbers for held, _ in state._held)


class Lazy(dict):
    """Computes its length when it is read."""

    def __len__(self) -> int:
        raise TypeError("not read yet")


def test_the_length_of_a_container_is_not_asked_of_a_class_of_the_program() -> None:
    block = _block()
    block.table = Lazy(a=1)
    assert not State(block.modules()).too_much


def test_a_file_counts_only_as_an_attribute_of_a_module() -> None:
    block = _block()
    block.out = sys.stdout
    block.noted.value = io.BytesIO()
    assert State(block.modules()).generators == []
    block[1].file = io.BytesIO()
    assert State(block.modules()).generators == [block[1].file]


def test_a_state_is_dropped_where_the_forward_changes_something() -> None:
    states, block = States(), _block()
    block.last = torch.ones(2)
    first, last = states.before(block), weakref.ref(block.last)
    block.last = torch.zeros(2)
    states.after(block, first)
    del first
    gc.collect()
    assert last() is None


def test_a_state_that_would_keep_a_graph_is_dropped() -> None:
    states, block = States(), _block()
    block.last = torch.ones(2, requires_grad=True) * 2
    first, graph = states.before(block), weakref.ref(block.last)
    states.after(block, first)
    del first, block.last
    gc.collect()
    assert graph() is None


def test_a_view_that_autograd_refuses_to_describe_is_not_asked() -> None:
    states, block = States(), _block()
    flat = torch.ones(4, requires_grad=True).clone()
    block.first, _ = flat.split(2)
    first = states.before(block)
    flat.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = block.first.is_leaf
    states.after(block, first)
    assert states.before(block) is not first
