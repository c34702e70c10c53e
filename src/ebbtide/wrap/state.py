"""The contents of the Python objects of a block: remembered, and restored for a second forward.

[Note: state]
A forward may read whatever its modules can reach: parameters that ``functional_call`` swaps, the adapter that is
switched on, a tuple that is set before each call, a memory of the step before, a counter. So all mutable containers
that can be reached from the modules' attributes are remembered: dictionaries (attributes, parameters, buffers and
sub-modules are entries of such), lists, sets, and the attributes of other objects. Content is compared by identity, and
nothing is copied but references.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

MOST = 4000
"""Containers remembered for one block. One that reaches more (the whole program, by a reference to its trainer) is
followed no further; what a second run computes is compared all the same."""

_LEFT_ALONE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)
_FOREIGN = ("torch", "ebbtide", "logging", "threading", "concurrent", "multiprocessing", "weakref", "functools")
"""Packages whose objects are not a block's own, but those of the machinery around it."""

_Containers = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class State:
    """The present contents of the containers that some modules can reach. See [Note: state].

    Args:
        modules: A block and all modules in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held: list[tuple[_Containers, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        self._collect([vars(m) for m in modules])

    def _collect(self, pending: list[Any]) -> None:
        seen: set[int] = set()
        alive: list[Any] = []  # an id names an object only while it lives
        while pending and len(self._held) < MOST:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            alive.append(value)
            match _role(type(value)):
                case Role.TENSOR:
                    self.tensors.append(value)
                case Role.GENERATOR:
                    self.generators.append(value)
                case Role.TUPLE:
                    pending += [inner for inner in value if _role(type(inner)) is not Role.PLAIN]
                case Role.DICT:
                    self._held.append((value, dict(value)))
                    if value:
                        pending += [inner for inner in value.values() if _role(type(inner)) is not Role.PLAIN]
                case Role.CONTAINER:
                    self._held.append((value, value.copy()))
                    pending += [inner for inner in value if _role(type(inner)) is not Role.PLAIN]
                case Role.OBJECT:
                    pending.append(vars(value))
                case Role.PLAIN:  # a class may answer for its instances' attributes by a dictionary of another type
                    continue

    def now(self) -> State:
        """Return the present contents of the same containers."""
        state = State(())
        state._held = [(container, container.copy()) for container, _ in self._held]
        return state

    def put_back(self, instead: Mapping[int, Any] = MappingProxyType({}), *, tensors: bool = True) -> None:
        """Restore the contents of the containers.

        Args:
            instead: Id of a value → its replacement.
            tensors: Restore tensors too. FSDP replaces those of its modules itself.
        """
        for container, then in self._held:
            if not then and not container:
                continue  # most are: each module has a dozen dictionaries of hooks
            if isinstance(container, dict):
                _put_dict(container, _exchanged(then, instead) if instead else then, tensors)
            elif isinstance(container, set):
                if container != then:
                    container.clear()
                    container.update(then)
            elif tensors or not any(isinstance(value, torch.Tensor) for value in then):
                values = [instead.get(id(value), value) for value in then]
                if [id(value) for value in container] != [id(value) for value in values]:
                    container.clear()
                    container.extend(values)


def _exchanged(then: dict[Any, Any], instead: Mapping[int, Any]) -> dict[Any, Any]:
    return {key: instead.get(id(value), value) for key, value in then.items()}


def _put_dict(container: dict[Any, Any], then: dict[Any, Any], tensors: bool) -> None:
    if not tensors:
        then = {k: container.get(k, v) if isinstance(v, torch.Tensor) else v for k, v in then.items()}
        then |= {k: v for k, v in container.items() if k not in then and isinstance(v, torch.Tensor)}
    if container.keys() != then.keys():
        container.clear()  # the order of keys is that of parameters and sub-modules
        container.update(then)
        return
    for key, value in then.items():
        if container[key] is not value:
            container[key] = value


class Role(Enum):
    """How a reachable value is treated."""

    PLAIN = "plain"  # nothing: it holds nothing that a forward could change
    TENSOR = "tensor"
    GENERATOR = "generator"  # draws random numbers from a state of its own
    TUPLE = "tuple"
    DICT = "dict"
    CONTAINER = "container"
    OBJECT = "object"  # its attributes are followed


_PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))


@functools.lru_cache(4096)
def _role(kind: type) -> Role:
    """Return how values of a class are treated: a module reaches hundreds, of a few dozen classes."""
    if kind in _PLAIN:
        return Role.PLAIN
    if issubclass(kind, torch.Tensor):
        return Role.TENSOR
    if _draws(kind):
        return Role.GENERATOR
    if issubclass(kind, tuple):
        return Role.TUPLE
    if kind in (dict, OrderedDict, defaultdict):
        return Role.DICT
    if kind in (list, set, deque):
        return Role.CONTAINER
    if issubclass(kind, nn.Module):
        return Role.OBJECT
    foreign = issubclass(kind, _LEFT_ALONE) or kind.__module__.partition(".")[0] in _FOREIGN
    return Role.OBJECT if not foreign and any("__dict__" in vars(base) for base in inspect.getmro(kind)) else Role.PLAIN


def _is_generator(value: Any) -> bool:
    """Whether a value draws random numbers from a state of its own."""
    return _draws(type(value))


def _draws(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return issubclass(kind, (torch.Generator, random.Random, *own))


def generators_of(module: nn.Module) -> list[Any]:
    """Return the random generators that the forwards of a block can reach: attributes, closures, globals they name."""
    modules = list(module.modules())
    found = State(modules).generators
    for kind in {type(m) for m in modules if not type(m).__module__.startswith("torch.")}:
        for function in vars(kind).values():
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType):
                found += [v for v in _values_named_in(function) for v in _inside(v) if _is_generator(v)]
    return found


def _values_named_in(function: types.FunctionType) -> Iterator[Any]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that was never bound
            continue


def _inside(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in (list, tuple, set):
        yield from value
    elif type(value) is dict:
        yield from value.values()
