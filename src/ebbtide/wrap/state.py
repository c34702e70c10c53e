"""What the Python objects of a block hold: remembered, and put back for a second run of its forward.

[Note: state]
A forward may read whatever its modules can reach: parameters that ``functional_call`` swaps, the adapter that is
switched on, a tuple that is set before each call, a memory of the step before, a counter. So all mutable containers
that can be reached from the modules' attributes are remembered: dictionaries (attributes, parameters, buffers and
sub-modules are entries of such), lists, sets, and the attributes of other objects. Content is compared by identity, and
nothing is copied but references.
"""

from __future__ import annotations

import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
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
    """What is held now by the containers that some modules can reach. See [Note: state].

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
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif _is_generator(value):
                self.generators.append(value)
            elif isinstance(value, tuple):
                pending += _worth_following(value)
            elif isinstance(value, dict) and type(value) in _CONTAINERS:
                self._held.append((value, dict(value)))
                pending += _worth_following(value.values())
            elif type(value) in _CONTAINERS:
                self._held.append((value, value.copy()))
                pending += _worth_following(value)
            else:
                pending.append(vars(value))

    def now(self) -> State:
        """Return what the same containers hold now."""
        state = State(())
        state._held = [(container, container.copy()) for container, _ in self._held]
        return state

    def put_back(self, instead: Mapping[int, Any] = MappingProxyType({}), *, tensors: bool = True) -> None:
        """Make the containers hold what they held.

        Args:
            instead: What is put in the place of a value, by the value's id.
            tensors: Put tensors back too. Those of modules under FSDP come and go by themselves.
        """
        for container, then in self._held:
            if isinstance(container, dict):
                _put_dict(container, {key: instead.get(id(value), value) for key, value in then.items()}, tensors)
            elif isinstance(container, set):
                if container != then:
                    container.clear()
                    container.update(then)
            elif tensors or not any(isinstance(value, torch.Tensor) for value in then):
                values = [instead.get(id(value), value) for value in then]
                if [id(value) for value in container] != [id(value) for value in values]:
                    container.clear()
                    container.extend(values)


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


def _worth_following(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if type(value) not in _PLAIN and _leads_on(value))


def _leads_on(value: Any) -> bool:
    """Whether a value is, or may reach, something that is remembered."""
    if isinstance(value, (tuple, torch.Tensor, nn.Module)) or type(value) in _CONTAINERS or _is_generator(value):
        return True
    foreign = isinstance(value, _LEFT_ALONE) or type(value).__module__.partition(".")[0] in _FOREIGN
    return not foreign and hasattr(value, "__dict__")


_PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, set, deque))


def _is_generator(value: Any) -> bool:
    """Whether a value draws random numbers from a state of its own."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


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
