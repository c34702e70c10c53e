"""The states of the default random generators: read only after a draw, and always the current ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.base.errors import RestoreError
from ebbtide.wrap import generators
from ebbtide.wrap.generators import _changes, _numpy, _python

PYTHON = {
    "random": random.random,
    "bits": lambda: random.getrandbits(8),
    "first normal number": lambda: random.gauss(0, 1),
    "second normal number": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(7),
    "restored": lambda: random.setstate(random.Random(8).getstate()),
}

NUMPY = {
    "random": np.random.random,
    "integers": lambda: np.random.randint(0, 5, 3),
    "first normal number": np.random.normal,
    "second normal number": np.random.normal,
    "binomial": lambda: np.random.binomial(40, 0.3),
    "seed": lambda: np.random.seed(7),
    "restored": lambda: np.random.set_state(np.random.RandomState(8).get_state()),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.mark.parametrize(
    ("generator", "acts", "read"),
    [(_python(), PYTHON, random.getstate), (_numpy(), NUMPY, lambda: np.random.get_state(legacy=False))],
)
def test_a_state_is_that_of_now(generator: Any, acts: dict[str, Callable[[], Any]], read: Callable[[], Any]) -> None:
    before = generator.state()
    for name, act in acts.items():
        assert generator.state() is before, f"nothing was drawn, yet it was read again before {name!r}"
        act()
        now = generator.state()
        assert now is not before and not generator.same(now, before), name
        assert generator.same(now, read()), name
        before = now


def test_another_kind_of_generator_is_always_read() -> None:
    numpy, own = _numpy(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        one = numpy.state()
        assert numpy.state() is not one, "its memory may be elsewhere: it is read each time"
        np.random.random()
        other = numpy.state()
        assert not numpy.same(one, other)
        numpy.restore(one)
        assert numpy.same(numpy.state(), one)
    finally:
        np.random.set_bit_generator(own)
    assert numpy.same(numpy.state(), np.random.get_state(legacy=False))


@pytest.mark.parametrize(("first", "then"), [("MT19937", "PCG64"), ("PCG64", "MT19937"), ("PCG64", "Philox")])
def test_another_kind_of_generator_in_backward_is_refused(first: str, then: str) -> None:
    numpy, own = _numpy(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, first)(3))
        before = numpy.state()
        np.random.set_bit_generator(getattr(np.random, then)(3))
        now = numpy.state()
        with pytest.raises(RestoreError, match=f"a {first}.*{then}.*; expected [\\s\\S]*hint: "):
            numpy.restore(before)
        assert numpy.same(numpy.state(), now)
    finally:
        np.random.set_bit_generator(own)


def test_a_draw_of_another_thread_during_a_read_is_not_missed() -> None:
    """What is read after it belongs to no earlier memory: a restored generator would be taken to have that state."""
    first, python = random.getstate(), _python()
    read: Any = python.state
    get = read._read
    read()
    random.random()
    random.setstate(first)
    read.__init__(lambda: (random.random(), get())[1], read._memory)
    try:
        read()
        read._read = get
        random.setstate(first)
        assert read() == first
    finally:
        read.__init__(get, read._memory)


def test_functions_that_somebody_replaces_are_read_and_restored_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(random.Random):
        pass

    for generator, module, functions, own in (
        (_python(), random, ("random", "getstate", "setstate"), Own(3)),
        (_numpy(), np.random, ("random", "get_state", "set_state"), np.random.RandomState(3)),
    ):
        held: Any = own
        for name in functions:
            monkeypatch.setattr(module, name, getattr(held, name))
        before = generator.state()
        drawn = module.random()
        generator.restore(before)
        assert module.random() == drawn


def test_numpy_may_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert len(generators.generators([])) == 2


def test_memory_that_shows_no_draw_is_not_trusted() -> None:
    own = random.Random(0)
    assert not _changes(lambda: b"", own.random)
    assert not _changes(lambda: None, own.random)
    assert _changes(own.getstate, own.random)


def test_states_are_restored_where_they_differ() -> None:
    found = generators.generators([])
    before = generators.states(found)
    draws = random.random(), np.random.random(), float(torch.rand(()))
    now = generators.states(found)
    generators.restore(found, before, now)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == draws
    triples = zip(found, generators.states(found), now, strict=True)
    assert all(generator.same(one, other) for generator, one, other in triples)
