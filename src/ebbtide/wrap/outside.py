"""What a block's forward can change outside of its modules.

[Note: outside]
A second forward restores what the modules can reach, and no more: a list of losses at the top of a file, or the owner
of a forward hook, would be written twice, and nothing that is compared would show it. So what the functions of a block
name, with their default values and attributes, and its hooks' owners are compared before and after its first forwards.
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
from collections.abc import Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from ebbtide.wrap.arrays import digest
from ebbtide.wrap.names import classes_of, functions_of, names_in, values_named_in
from ebbtide.wrap.roles import VALUES, Role, role

LOOKS = 4
"""First forwards of a kind of block around which changes are searched."""

_KINDS = (Role.TENSOR, Role.DICT, Role.CONTAINER, Role.OBJECT)


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
    values = [value for function in functions for value in values_named_in(function)]
    values += [value for kind in classes for value in vars(kind).values()]
    own, found = set(map(id, modules)), filter(_can_change, (*functions, *values, *owners))
    found = list({id(v): v for v in found if id(v) not in own and not isinstance(v, nn.Parameter)}.values())
    cells = [cell for function in functions for cell in function.__closure__ or ()]
    files = {id(function.__globals__): _Globals(function.__globals__) for function in functions}
    for function in functions:
        files[id(function.__globals__)].names.update(names_in(function.__code__))
    return [*found, *classes, *files.values(), *cells]


def _can_change(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (type, FunctionType)):
        return str(value.__module__).partition(".")[0] not in ("builtins", "torch", "ebbtide")
    return role(kind) in _KINDS or issubclass(kind, threading.local)


class _Globals:
    """What the functions of one file name in it: a number is another object when it is counted up."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held
        self.names: set[str] = set()

    def values(self) -> list[Any]:
        """Return what the names stand for now."""
        return [self._held.get(name) for name in self.names]


def _inside(value: Any) -> list[Any]:
    """Return what is inside a value, one level deep."""
    if isinstance(value, _Globals):
        return value.values()
    if isinstance(value, CellType):  # of an enclosing function: a number is another object when it is counted up
        try:
            return [value.cell_contents]
        except ValueError:  # nothing yet
            return []
    if isinstance(value, dict):  # by the built-in methods: those of a subclass may import a package for each value
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, torch.Tensor):
        return [value]
    base: Any = next((base for base in (list, set, deque) if isinstance(value, base)), None)
    if base is not None:
        return [*base.__iter__(value)]
    try:
        return [*value.__dict__.values()]
    except Exception:  # it has none, or is a proxy of nothing
        return []


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
