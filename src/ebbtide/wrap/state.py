"""The state of a block's Python objects: recorded, and restored for a second forward.

[Note: state] A forward may read anything its modules can reach: parameters swapped by ``functional_call``, the active
adapter, a tuple set before each call, values of the previous step, a counter. So all mutable containers reachable from
the modules' attributes are recorded: dictionaries (which hold attributes, parameters, buffers and submodules), lists,
sets, subclasses of these (``Counter``), arrays, and the attributes and slots of other objects. Contents are
compared by identity; only references and arrays are copied.

A block reaches some hundred containers, and searching for them costs a millisecond, but usually none has changed since
the block's last forward. So a state is used again where all its containers still hold the same: see ``States``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import torch
from torch import nn

from ebbtide.wrap.arrays import MOST_ARRAY_BYTES, MOST_DIGESTED_BYTES, HeldArray, is_array, is_writeable, size_of

MOST = 4000
"""Most containers recorded for one block, besides those of each of its modules; a reference to its trainer may reach
the whole program."""
OF_A_MODULE = 32
"""Containers of a module itself: its attributes, parameters, buffers, and dictionaries of hooks."""

MOST_ELEMENTS = 100_000
"""Most elements of these containers, besides ``ELEMENTS_OF_A_MODULE`` of each module: each forward compares them."""
ELEMENTS_OF_A_MODULE = 256

PROVEN = 2
"""Forwards that found the state of the one before: what a later one changes is found by the next."""

_SIZED = (dict, OrderedDict, set, list)
"""Classes whose instances' length is certainly the number of what they hold."""

_MAPPINGS = (dict, OrderedDict)
_VALUES = operator.methodcaller("values")

_LEFT_ALONE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)
_FOREIGN = ("torch", "ebbtide", "logging", "threading", "concurrent", "multiprocessing", "weakref", "functools")
"""Packages whose objects belong to the machinery around a block."""


class State:
    """The current contents of the containers that some modules can reach. See [Note: state].

    Attributes:
        tensors: All that were found.
        generators: Likewise; and files that are attributes of the modules, which have a position.
        large_arrays: Arrays that are too large to be recorded.
        too_much: The modules can reach more than is recorded: what they change may not be found.
        complete: It has everything that the modules can reach, and no arrays: ``same`` tells whether anything changed.
        found: Forwards that began with it, after the first.

    Args:
        modules: A block and all modules in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        attributes = [vars(module) for module in modules]
        self._held: list[tuple[Any, Any]] = []  # each container and its contents
        self._objects: list[Any] = []
        self._attributes: list[Any] = []  # the dictionary of each object's attributes
        self._known: _Known | None = None
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = [value for own in attributes for value in own.values() if _is_file(value)]
        self.large_arrays: list[Any] = []
        self.too_much = self._collect(deque(attributes)) or sum(map(size_of, self.large_arrays)) > MOST_DIGESTED_BYTES
        arrays = any(isinstance(container, HeldArray) for container, _ in self._held)
        self.complete = not self.too_much and not arrays
        self.found = 0

    def _collect(self, pending: deque[Any]) -> bool:
        """Record what can be reached, the nearest first; return whether that is too much."""
        seen: set[int] = set()
        alive: list[Any] = []  # an id is valid only while its object is alive
        most, left = MOST + OF_A_MODULE * len(pending), MOST_ELEMENTS + ELEMENTS_OF_A_MODULE * len(pending)
        while pending and len(self._held) < most:
            value = pending.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            alive.append(value)
            kind = type(value)
            what = role(kind)
            if what in (Role.DICT, Role.CONTAINER, Role.TUPLE):
                left -= _length(value)
                if left < 0:
                    return True
            match what:
                case Role.TENSOR:
                    self.tensors.append(value)
                case Role.GENERATOR:
                    self.generators.append(value)
                case Role.TUPLE:
                    pending += _followed(value)
                case Role.DICT:
                    pending += _followed(self._hold(value).values())
                    if kind is not dict and _has_attributes(kind):
                        pending.append(self._attributes_of(value))
                case Role.CONTAINER:
                    pending += _followed(self._hold(value))
                    if _has_attributes(kind):
                        pending.append(self._attributes_of(value))
                case Role.ARRAY:
                    if is_writeable(value) and size_of(value) <= MOST_ARRAY_BYTES:
                        self._hold(HeldArray(value))
                    elif is_writeable(value):
                        self.large_arrays.append(value)
                case Role.OBJECT:
                    if _has_attributes(kind):
                        pending.append(self._attributes_of(value))
                    if slots := _slots_of(kind):
                        pending += _followed(self._hold(_Slots(value, slots)).values())
                case Role.PLAIN | Role.FILE:  # a class may return a dictionary of another type
                    continue
        return bool(pending)

    def _hold(self, container: Any) -> Any:
        """Record the contents of a container, and return them."""
        held = _copied(container)
        self._held.append((container, held))
        return held

    def _attributes_of(self, value: Any) -> Any:
        held = vars(value)
        self._objects.append(value)
        self._attributes.append(held)
        return held

    def same(self) -> bool:
        """Whether all containers hold the same objects in the same order. Arrays are left out: see ``complete``."""
        if self._known is None:
            self._known = _Known(self._held)
        return self._known.same() and all(map(operator.is_, map(vars, self._objects), self._attributes))

    def now(self) -> State:
        """Return the current contents of the same containers."""
        if self.complete and self.same():
            return self
        state = State(())
        state._held, state.complete = [(container, _copied(container)) for container, _ in self._held], self.complete
        return state

    def put_back(self, instead: Mapping[int, Any] = MappingProxyType({}), *, tensors: bool = True) -> None:
        """Restore the contents of the containers.

        Args:
            instead: Id of a value → its replacement.
            tensors: Restore tensors too. FSDP replaces those of its modules itself.
        """
        if not instead and self.complete and self.same():
            return
        for container, then in self._held:
            if isinstance(container, HeldArray):
                container.restore(then)
            elif isinstance(container, _Slots):
                container.put_back(_exchanged(then, instead), tensors)
            elif not then and not len(container):
                continue  # most are: each module has a dozen dictionaries of hooks
            elif isinstance(container, dict):
                _put_dict(container, _exchanged(then, instead) if instead else then, tensors)
            elif isinstance(container, set):
                if container != then:
                    set.clear(container)
                    set.update(container, then)
            elif tensors or not any(map(_is_tensor, then)):
                values = [instead.get(id(value), value) for value in then]
                if [id(value) for value in container] != [id(value) for value in values]:
                    base: Any = deque if isinstance(container, deque) else list
                    base.clear(container)
                    base.extend(container, values)


class States:
    """The last state of each block, used again where nothing changed.

    A kept state holds references: it is dropped where the forward changed something, or if it would keep a graph alive.
    """

    def __init__(self) -> None:
        self._last: dict[nn.Module, State] = {}

    def before(self, module: nn.Module) -> State:
        """Return the state before a forward of the block ``module``."""
        last = self._last.pop(module, None)
        if last is None or not last.same():
            return State(module.modules())
        last.found += 1
        return last

    def after(self, module: nn.Module, state: State) -> None:
        """Keep the state after a forward, if the next forward probably begins with it."""
        if state.found < PROVEN:
            # Not ``is_leaf``: autograd refuses that question of FSDP1's views, which are written in place.
            graph = any(t.requires_grad and not isinstance(t, nn.Parameter) for t in state.tensors)
            if not state.complete or graph or not state.same():
                return
        self._last[module] = state


class _Known:
    """What containers hold, by identity, in as few calls as can be: it is asked some hundred times a step.

    Args:
        held: Containers and their contents, which keep what they hold alive: an id says nothing of a dead object.
    """

    def __init__(self, held: list[tuple[Any, Any]]) -> None:
        self._empty = [container for container, then in held if not then and type(container) in _SIZED]
        empty = set(map(id, self._empty))
        filled = [(container, then) for container, then in held if id(container) not in empty]
        plain = [(container, then) for container, then in filled if type(container) in _MAPPINGS]
        self._mappings = [container for container, _ in plain]
        self._lengths = [len(then) for _, then in plain]
        self._keys = [key for _, then in plain for key in then]
        self._values = [value for _, then in plain for value in then.values()]
        self._rest = [(container, _ids(then)) for container, then in filled if type(container) not in _MAPPINGS]

    def same(self) -> bool:
        """Whether they hold the same objects in the same order."""
        keys, values = itertools.chain.from_iterable(self._mappings), map(_VALUES, self._mappings)
        return (
            not any(map(len, self._empty))
            and list(map(len, self._mappings)) == self._lengths
            and all(map(operator.is_, keys, self._keys))
            and all(map(operator.is_, itertools.chain.from_iterable(values), self._values))
            and all(_ids(container) == ids for container, ids in self._rest)
        )


class _Slots:
    """The slots of an object, as a container."""

    def __init__(self, value: Any, slots: tuple[MemberDescriptorType, ...]) -> None:
        self._value, self._slots = value, slots

    def copy(self) -> dict[MemberDescriptorType, Any]:
        held: dict[MemberDescriptorType, Any] = {}
        for slot in self._slots:
            with contextlib.suppress(AttributeError):  # an empty one
                held[slot] = slot.__get__(self._value)
        return held

    def put_back(self, then: Mapping[MemberDescriptorType, Any], tensors: bool) -> None:
        for slot, now in self.copy().items():
            if slot not in then:
                slot.__delete__(self._value)
            elif tensors or not _is_tensor(now):
                slot.__set__(self._value, then[slot])
        for slot in then.keys() - self.copy().keys():
            slot.__set__(self._value, then[slot])


def _copied(container: Any) -> Any:
    """Return the contents of a container, by the built-in methods and not those of a subclass."""
    if type(container) is dict:
        return container.copy()
    if isinstance(container, OrderedDict):
        return dict(container)  # in its own order
    base: Any = next((base for base in (dict, list, set) if isinstance(container, base)), None)
    if base is not None:
        return base.copy(container)
    return list(container) if isinstance(container, deque) else container.copy()


def _length(container: Any) -> int:
    """Return the number of elements of a container, by the built-in methods and not those of a subclass."""
    base: Any = next(base for base in (dict, list, set, deque, tuple) if isinstance(container, base))
    return base.__len__(container)


def _ids(container: Any) -> list[int]:
    """Return the ids of what a container holds, by the built-in methods and not those of a subclass."""
    if isinstance(container, _Slots):
        container = container.copy()
    if isinstance(container, dict):
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        return [*map(id, base.keys(container)), *map(id, base.values(container))]
    base = next(base for base in (list, set, deque) if isinstance(container, base))
    return list(map(id, base.__iter__(container)))


def _is_file(value: Any) -> bool:
    """Whether a value is an open file. Standard streams are not: what is written to them is for people."""
    standard = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return role(type(value)) is Role.FILE and not any(value is stream for stream in standard)


def _is_tensor(value: Any) -> bool:
    return role(type(value)) is Role.TENSOR  # ``isinstance`` raises for a proxy of a dead object


def _followed(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if role(type(value)) is not Role.PLAIN]


def _exchanged(then: dict[Any, Any], instead: Mapping[int, Any]) -> dict[Any, Any]:
    return {key: instead.get(id(value), value) for key, value in then.items()}


def _put_dict(container: dict[Any, Any], then: dict[Any, Any], tensors: bool) -> None:
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    if not tensors:
        then = {k: base.get(container, k, v) if _is_tensor(v) else v for k, v in then.items()}
        then |= {k: v for k, v in base.items(container) if k not in then and _is_tensor(v)}
    keys = base.keys(container)
    if keys != then.keys() or (tensors and [*map(id, keys)] != [*map(id, then)]):
        base.clear(container)  # the order of keys is that of parameters and submodules
        base.update(container, then)
        return
    for key, value in then.items():
        if base.__getitem__(container, key) is not value:
            base.__setitem__(container, key, value)


class Role(Enum):
    """How a reachable value is treated."""

    PLAIN = "plain"  # skipped: it holds nothing that a forward could change
    TENSOR = "tensor"
    FILE = "file"  # a block that holds one reads or writes it; those of other objects are theirs
    GENERATOR = "generator"  # draws random numbers, or others, from its own state
    TUPLE = "tuple"
    DICT = "dict"
    CONTAINER = "container"
    ARRAY = "array"
    OBJECT = "object"  # its attributes and slots are followed


_PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))


@functools.lru_cache(4096)
def role(kind: type) -> Role:
    """Return the role of a class; cached, since a module reaches hundreds of values of a few dozen classes."""
    if kind in _PLAIN:
        return Role.PLAIN
    if issubclass(kind, torch.Tensor):
        return Role.TENSOR
    if issubclass(kind, io.IOBase):
        return Role.FILE
    if draws(kind):
        return Role.GENERATOR
    if issubclass(kind, tuple):
        return Role.TUPLE
    if issubclass(kind, nn.Module):
        return Role.OBJECT
    if issubclass(kind, _LEFT_ALONE) or kind.__module__.partition(".")[0] in _FOREIGN:
        return Role.PLAIN
    if issubclass(kind, dict):
        return Role.DICT
    if issubclass(kind, (list, set, deque)):
        return Role.CONTAINER
    if is_array(kind):
        return Role.ARRAY
    return Role.OBJECT if _has_attributes(kind) or _slots_of(kind) else Role.PLAIN


@functools.lru_cache(4096)
def _has_attributes(kind: type) -> bool:
    return any("__dict__" in vars(base) for base in inspect.getmro(kind))


@functools.lru_cache(4096)
def _slots_of(kind: type) -> tuple[MemberDescriptorType, ...]:
    """Return the slots defined by Python classes; members of C classes cannot be written."""
    own = (vars(base).values() for base in inspect.getmro(kind) if "__slots__" in vars(base))
    return tuple(member for members in own for member in members if isinstance(member, MemberDescriptorType))


def draws(kind: type) -> bool:
    """Whether instances of a class draw random numbers, or other values, from their own state."""
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    other = (io.IOBase, *weakref.ProxyTypes)  # a proxy has the methods of whatever it may stand for
    return issubclass(kind, (torch.Generator, random.Random, Iterator, *own)) and not issubclass(kind, other)
