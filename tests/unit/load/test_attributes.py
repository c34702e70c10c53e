"""Tensors in plain attributes of modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ebbtide.load.attributes import on_meta, rename


class Counted(list[Any]):
    """Counts how often it is read."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return super().__iter__()


class Frozen(dict[str, Any]):
    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")

    def values(self) -> Any:
        raise TypeError("lazy")


class Two(tuple[Any, ...]):
    """A tuple whose constructor takes its items one by one."""

    def __new__(cls, one: Any, other: Any) -> Two:
        return super().__new__(cls, (one, other))


def test_a_container_that_modules_share_is_read_once_in_a_walk() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    shared, deep = Counted(["a", "b"]), list[Any]()
    for module in model:
        module.names = shared
    for _ in range(3000):
        deep = [deep]
    model[0].deep = deep
    assert on_meta(model) == {} and shared.reads == 1
    rename(model, {})
    assert shared.reads == 2


def test_containers_of_any_kind_hold_the_new_tensor() -> None:
    model, old, new = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1), torch.ones(2)
    pair, top = (old, 1), torch.ones(1, 1).max(0)
    model[0].held, model[1].held = [pair, Frozen(a=old), Two(old, 1), top, {old}], [pair]
    rename(model, {id(old): new, id(top.values): new})
    found, frozen, two, maximum, together = model[0].held
    assert found[0] is new and model[1].held[0] is found
    assert frozen["a"] is new and two[0] is new and type(two) is Two and maximum.values is new and together == {new}
