"""What a block's forward can change outside of its modules.

[Note: outside]
A second forward restores what the modules can reach, and no more: a list of losses at the top of a file, or the owner
of a forward hook, would be written twice, and nothing that is compared would show it. So what the functions of a block
name, with their default values and attributes, and its hooks' owners are compared before and after its first forwards.
Forwards call helpers in other files, which keep lists, counters and random states there. So the functions that a
forward names are followed, and what all name is looked into some levels deep. Not so with hooks, nor with what owns
them: that is often machinery, which counts its calls.
A kind of block that has changed one is in doubt, and not checkpointed, until a forward changes none: it may have filled
a cache. One that changes something twice is never checkpointed.

[Note: cut off]
An exception ends a second forward after its last saved tensor. What it has changed by then, and would have changed back
at its end, stays changed, unless ``finally`` or ``with`` does that: an entry that it pushed onto a stack, a flag. So
the same objects are compared in the first second forward of each block. If one differs at the last saved tensor, the
forward runs to its end, and so do the next ones, until none differs. Where other ranks are needed it cannot. What
differs after it was cut off is an error there, if it did in the one before, too: one may have filled a cache.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from ebbtide.wrap.arrays import digest
from ebbtide.wrap.contents import Slots
from ebbtide.wrap.generators import state_of
from ebbtide.wrap.names import (
    classes_of,
    functions_of,
    is_library,
    names_in,
    reached_from,
    restored_generators,
    values_named_in,
)
from ebbtide.wrap.roles import VALUES, Role, role, slots_of

LOOKS = 4
"""First forwards of a kind of block around which changes are searched."""

LEVELS = 3
MOST_INSIDE = 10_000
"""How deep it is looked into what forwards name, and into how many elements of each level."""

_KINDS = (Role.TENSOR, Role.DICT, Role.CONTAINER, Role.OBJECT, Role.GENERATOR)


class Outside:
    """The contents, now, of what the functions of a block's modules name outside of them.

    Args:
        arrays: Those that it reaches and that are too large to be recorded.
    """

    def __init__(self, module: nn.Module, arrays: Sequence[Any] = ()) -> None:
        self._before = [(value, Snapshot(_inside(value))) for value in _named(module)]
        self._arrays = [(value, digest(value)) for value in arrays]

    @property
    def changed(self) -> bool:
        """Whether something has changed since."""
        return not (
            all(before.same(_inside(value)) for value, before in self._before)
            and all(digest(value) == before for value, before in self._arrays)
        )


def _named(module: nn.Module) -> list[Any]:
    """Return what can change among what functions and hooks of a block name; each once."""
    modules = list(module.modules())
    functions, owners = functions_of(modules)
    classes = classes_of(modules)
    reached, left_alone = reached_from(modules), {*map(id, modules), *restored_generators()}
    deep = (*reached.values, *(value for kind in classes for value in vars(kind).values()))
    inner = deep = [value for value in _once(deep) if id(value) not in left_alone and _can_change(value)]
    for _ in range(LEVELS - 1):
        inner = list(islice(chain.from_iterable(map(_inside, inner)), MOST_INSIDE))
        inner = [value for value in inner if id(value) not in left_alone and _can_change(value)]
        deep = [*deep, *inner]
    values = [value for function in functions for value in values_named_in(function)]
    found = _once((*functions, *reached.functions, *values, *deep, *owners))
    found = [v for v in found if _can_change(v) and id(v) not in left_alone and not _is_parameter(v)]
    cells = [cell for function in (*functions, *reached.functions) for cell in function.__closure__ or ()]
    files = reached.files
    for function in functions:
        files.setdefault(id(function.__globals__), (function.__globals__, set()))[1].update(names_in(function.__code__))
    return [*found, *classes, *(_Globals(*file) for file in files.values()), *_once(cells)]


def _once(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _can_change(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (type, FunctionType)):
        return not is_library(value.__module__)
    return role(kind) in _KINDS or issubclass(kind, threading.local)


def _is_parameter(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and isinstance(value, nn.Parameter)


class _Globals:
    """What functions name in one file: a number is another object when it is counted up."""

    def __init__(self, held: dict[str, Any], names: set[str]) -> None:
        self._held, self._names = held, list(names)

    def values(self) -> list[Any]:
        """Return what the names stand for now."""
        return [self._held.get(name) for name in self._names]


def _inside(value: Any) -> list[Any]:
    """Return what is inside a value, one level deep."""
    kind = type(value)  # ``isinstance`` asks the value, which raises if it is a proxy of nothing
    if kind is _Globals:
        return value.values()
    if kind is CellType:  # of an enclosing function: a number is another object when it is counted up
        try:
            return [value.cell_contents]
        except ValueError:  # nothing yet
            return []
    if issubclass(kind, dict):  # by the built-in methods: those of a subclass may import a package for each value
        return [*dict.keys(value), *dict.values(value)]
    if issubclass(kind, torch.Tensor):
        return [value]
    base: Any = next((base for base in (list, set, deque) if issubclass(kind, base)), None)
    if base is not None:
        return [*base.__iter__(value)]
    if role(kind) is Role.GENERATOR:
        return [state_of(value)]
    try:
        attributes = [*value.__dict__.values()]
    except Exception:  # it has none, or is a proxy of nothing
        attributes = []
    return [*attributes, *Slots(value, slots).copy().values()] if (slots := slots_of(kind)) else attributes


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal and of a class that nothing can change, such as numbers."""
    if one is other:
        return True
    kind = type(one)
    return kind is type(other) and kind in VALUES and bool(one == other)


class Snapshot:
    """Objects, and the versions of the tensors among them.

    It holds the objects, so that no other one can get the address of one.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._versions = [x._version if role(type(x)) is Role.TENSOR and not x.is_inference() else 0 for x in objects]

    def same(self, objects: Sequence[Any]) -> bool:
        """Whether these are the same objects, at the same versions."""
        return (
            len(objects) == len(self._objects)
            and (all(map(operator.is_, objects, self._objects)) or all(map(_same, objects, self._objects)))
            and Snapshot(objects)._versions == self._versions
        )
