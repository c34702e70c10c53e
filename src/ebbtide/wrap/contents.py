"""Whether containers still hold what they held: compared in as few calls as can be."""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict, deque
from collections.abc import Mapping
from itertools import chain
from types import MemberDescriptorType
from typing import Any

from ebbtide.wrap.roles import Role, role

_SIZED = (dict, OrderedDict, set, list, deque)
"""Classes whose instances' length is certainly the number of what they hold."""

_MAPPINGS = (dict, OrderedDict)

_NAMES = {str, int}
"""Classes of keys that are compared by value: equal ones are one key. Others may run code of their own."""

_VALUES = operator.methodcaller("values")
_ATTRIBUTES = operator.attrgetter("__dict__")


class Contents:
    """What containers hold, by identity. It is compared some hundred times per step.

    Args:
        held: Containers and their contents, which keep what they hold alive: an id says nothing of a dead object.
        objects: Objects that have attributes.
        attributes: Their dictionaries, which are among the containers.
    """

    def __init__(self, held: list[tuple[Any, Any]], objects: list[Any], attributes: list[Any]) -> None:
        # Most objects have none: each module has a dozen ordered dictionaries of hooks, which may get attributes.
        bare = {id(own) for own in attributes if type(own) is dict and not own}
        self._bare = [value for value, own in zip(objects, attributes, strict=True) if id(own) in bare]
        self._objects = [value for value, own in zip(objects, attributes, strict=True) if id(own) not in bare]
        self._attributes = [own for own in attributes if id(own) not in bare]
        held = [(container, then) for container, then in held if id(container) not in bare]
        sized = [(container, then) for container, then in held if type(container) in _SIZED]
        self._rest = [(container, _ids(then)) for container, then in held if type(container) not in _SIZED]
        self._empty = [container for container, then in sized if not then]
        mappings = [(container, then) for container, then in sized if then and type(container) in _MAPPINGS]
        others = [(container, then) for container, then in sized if then and type(container) not in _MAPPINGS]
        self._mappings, self._others = [container for container, _ in mappings], [container for container, _ in others]
        self._lengths = [len(then) for _, then in (*mappings, *others)]
        self._keys = [key for _, then in mappings for key in then]
        self._values = [x for _, then in mappings for x in then.values()] + [x for _, then in others for x in then]
        self._named = {*map(type, self._keys)} <= _NAMES

    def same(self) -> bool:
        """Whether they hold the same objects in the same order, and the objects have the same dictionaries."""
        inside = chain.from_iterable
        keys, values = inside(self._mappings), inside(map(_VALUES, self._mappings))
        return (
            not any(self._empty)
            and not any(map(_ATTRIBUTES, self._bare))
            and list(map(len, chain(self._mappings, self._others))) == self._lengths
            and (list(keys) == self._keys if self._named else all(map(operator.is_, keys, self._keys)))
            and all(map(operator.is_, chain(values, inside(self._others)), self._values))
            and all(map(operator.is_, map(vars, self._objects), self._attributes))
            and all(_ids(container) == ids for container, ids in self._rest)
        )


class Slots:
    """The slots of an object, as a container."""

    def __init__(self, value: Any, slots: tuple[MemberDescriptorType, ...]) -> None:
        self._value, self._slots = value, slots

    def copy(self) -> dict[MemberDescriptorType, Any]:
        held: dict[MemberDescriptorType, Any] = {}
        for slot in self._slots:
            with contextlib.suppress(AttributeError):  # an empty one
                held[slot] = slot.__get__(self._value)
        return held

    def restore(self, then: Mapping[MemberDescriptorType, Any], tensors: bool) -> None:
        for slot, now in self.copy().items():
            if slot not in then:
                slot.__delete__(self._value)
            elif tensors or role(type(now)) is not Role.TENSOR:
                slot.__set__(self._value, then[slot])
        for slot in then.keys() - self.copy().keys():
            slot.__set__(self._value, then[slot])


def _ids(container: Any) -> list[int]:
    """Return the ids of what a container holds, by the built-in methods and not those of a subclass."""
    if isinstance(container, Slots):
        container = container.copy()
    if isinstance(container, dict):
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        return [*map(id, base.keys(container)), *map(id, base.values(container))]
    base = next(base for base in (list, set, deque) if isinstance(container, base))
    return list(map(id, base.__iter__(container)))
