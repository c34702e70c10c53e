"""The default random generators: of torch, of Python and of numpy. A second forward draws what the first one drew.

[Note: unread states]
Python and numpy make an object of each of the 624 words of a state that is read, three times for each checkpointed
block, though few blocks draw from them. So a state is read only if the memory of the objects that hold it has changed
since it was last read. All bytes of the objects are compared, whatever their fields: in CPython, an instance of a class
of C begins with them. A generator of our own shows first that each draw changes them; where it does not, as in another
interpreter, and for generators that may have memory elsewhere, each state is read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ebbtide.base.errors import RestoreError

_HEADER = object.__basicsize__


class Restorable(NamedTuple):
    """A global state, such as a generator's: what reads it, what writes it, and whether two states are the same."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    same: Callable[[Any, Any], bool]


def generators(devices: Iterable[torch.device]) -> list[Restorable]:
    """Return the default generators, and those of accelerators."""
    found = [Restorable(torch.get_rng_state, torch.set_rng_state, torch.equal), _python()]
    if sys.modules.get("numpy") is not None:  # None: its import is forbidden
        found.append(_numpy())
    for device in devices:
        module = torch.get_device_module(device)
        if getattr(module, "_initialized", False):  # not where tensors are fake
            read = functools.partial(module.get_rng_state, device)
            found.append(Restorable(read, functools.partial(module.set_rng_state, device=device), torch.equal))
    return found


def states(these: Iterable[Restorable]) -> list[Any]:
    """Return the current states."""
    return [one.state() for one in these]


def restore(these: Iterable[Restorable], before: list[Any], now: list[Any]) -> None:
    """Restore states where they are not the current ones: to compare costs less than to write."""
    for one, state, current in zip(these, before, now, strict=True):
        if state is not current and not one.same(state, current):
            one.restore(state)


def state_of(generator: Any) -> bytes:
    """Return the state of any generator, to be compared: of torch, Python or numpy, or a count; empty: unknown."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    if type(generator) is itertools.count:
        return repr(generator).encode()
    state: Any = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    try:  # a generator of the system has no state
        return pickle.dumps(generator.bit_generator.state if state is None else state())
    except (AttributeError, NotImplementedError):
        return b""


class _Remembered:
    """Reads a state if its generator's memory has changed. See [Note: unread states].

    Args:
        read: Reads the state.
        memory: Returns what changes with it; None: it is always read.
    """

    def __init__(self, read: Callable[[], Any], memory: Callable[[], Any]) -> None:
        self._read, self._memory = read, memory
        self._last: tuple[Any, Any] = None, None  # the memory, and the state

    def __call__(self) -> Any:
        memory, (known, state) = self._memory(), self._last
        if memory is not None and memory == known:
            return state
        state = self._read()
        if memory == self._memory():  # else another thread has drawn
            self._last = memory, state
        return state


@functools.cache
def _python() -> Restorable:
    def memory() -> Any:
        held: Any = getattr(random.getstate, "__self__", None)
        return (_bytes_of(held), vars(held).get("gauss_next")) if type(held) is random.Random else None

    def read() -> Any:  # each time by the module's function of now, which somebody may replace
        return random.getstate()

    own = random.Random(0)
    shown = _changes(lambda: _bytes_of(own), own.random, own.random)
    return Restorable(_Remembered(read, memory) if shown else read, lambda state: random.setstate(state), operator.eq)


@functools.cache
def _numpy() -> Restorable:
    numpy: Any = sys.modules["numpy"].random

    def of(held: Any) -> Any:
        words = getattr(held, "_bit_generator", None)
        plain = type(held) is numpy.RandomState and type(words) is numpy.MT19937
        return (_bytes_of(held), _bytes_of(words)) if plain else None

    def read() -> Any:  # without ``legacy``: with it numpy warns of every other kind of generator
        return numpy.get_state(legacy=False)

    def write(state: Any) -> None:
        try:
            numpy.set_state(state)
        except ValueError as error:
            found = f"numpy's default generator is another than in forward, a {state['bit_generator']} ({error})"
            hint = "call np.random.set_bit_generator before training, or after backward"
            raise RestoreError(found, expected="the same kind, to repeat what a block drew", hint=hint) from error

    own: Any = numpy.RandomState(0)
    shown = _changes(lambda: of(own), own.random_sample, own.standard_normal, own.standard_normal)
    remembered = _Remembered(read, lambda: of(getattr(numpy.get_state, "__self__", None)))
    return Restorable(remembered if shown else read, write, _same_of_numpy)


def _bytes_of(value: object) -> bytes:
    """Return the memory of an object after its header."""
    return ctypes.string_at(id(value) + _HEADER, type(value).__basicsize__ - _HEADER)


def _changes(memory: Callable[[], Any], *draws: Callable[[], object]) -> bool:
    """Whether each of these draws changes the memory of a generator, and nothing else does."""
    if sys.implementation.name != "cpython":
        return False
    for draw in draws:
        before = memory()
        if before is None or before != memory():
            return False
        draw()
        if memory() == before:
            return False
    return True


def _same_of_numpy(one: Any, other: Any) -> bool:
    """Whether two states are the same: dictionaries of arrays, numbers and names."""
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(_same_of_numpy(one[key], other[key]) for key in one)
    return one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other
