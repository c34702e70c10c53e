"""Exceptions and signals at every point of a real step, through the public API. Invariant 7."""

from __future__ import annotations

import contextlib
import contextlib as contextlib_module
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.graph
from torch import nn

import ebbtide
from ebbtide.engine import Engine
from ebbtide.engine.run import BlockRun
from tests.helpers.engines import TIERS
from tests.helpers.handles import Trainee, training
from tests.helpers.interrupts import Fuse
from tests.helpers.pairs import all_pairs

POLICIES = ["offload", "minimal", "auto"]
TORCH_AND_CONTEXTS = (torch.autograd.graph.__file__, contextlib_module.__file__)

everywhere = pytest.mark.parametrize(("policy", "tier"), [(p, t) for p in POLICIES for t in TIERS])


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop exceptions in destructors, where a signal may strike: a report would keep frames alive."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


@contextlib.contextmanager
def calls_counted(before: Callable[[], None]) -> Iterator[None]:
    """Run ``before`` at the start of every call of a hook."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((BlockRun, "pack"), (Engine, "unpack")):
            patch.setattr(owner, name, _after(before, getattr(owner, name)))
        yield


def _after(before: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def first(self: Any, value: Any) -> Any:
        before()
        return call(self, value)

    return first


class Countdown:
    """Raises at the n-th call, once; 0 only counts."""

    def __init__(self, error: type[BaseException], when: int = 0) -> None:
        self.error, self.when, self.calls = error, when, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.when:
            raise self.error("planted")


@pytest.mark.parametrize(
    ("policy", "tier", "error"), all_pairs(POLICIES, TIERS, [KeyboardInterrupt, RuntimeError, MemoryError])
)
def test_an_exception_at_every_call_of_a_hook(policy: str, tier: str, error: type[BaseException]) -> None:
    before = set(threading.enumerate())
    with training(policy, tier) as trainee:
        count = Countdown(error)
        with calls_counted(count):
            trainee.step()
        assert count.calls >= 2 * trainee.packs > 40  # each saved tensor is packed, and most are read
        for when in range(1, count.calls + 1):
            with calls_counted(Countdown(error, when)), pytest.raises(error, match="planted") as raised:
                trainee.step()
            del raised  # its traceback holds the graph
            trainee.assert_recovers()
        assert trainee.handle.stats().demoted_sites == ()
    assert not any(t.name.startswith("ebbtide-disk") for t in set(threading.enumerate()) - before)


def sweep(trainee: Trainee, error: type[BaseException], chosen: Callable[[int], list[int]]) -> None:
    counting = Fuse(error, also=TORCH_AND_CONTEXTS)
    counting.burn(trainee.step)
    assert counting.count > 1000
    struck: set[str] = set()
    for when in chosen(counting.count):
        fuse = Fuse(error, when, also=TORCH_AND_CONTEXTS)
        with contextlib.suppress(error):  # not always raised: a destructor swallows it, or a rule is skipped
            fuse.burn(trainee.step)
        try:
            trainee.assert_recovers()
        except BaseException as failed:
            failed.add_note(f"after {error.__name__} at point {when}: {fuse.where}")
            raise
        struck.add(fuse.where)
    assert len(struck) > 5


@everywhere
@pytest.mark.usefixtures("dropped")
def test_a_signal_at_points_drawn_by_chance(policy: str, tier: str, seed: int) -> None:
    with training(policy, tier) as trainee:
        sweep(trainee, KeyboardInterrupt, lambda count: random.sample(range(1, count + 1), 40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@everywhere
@pytest.mark.usefixtures("dropped")
def test_a_signal_at_every_point(policy: str, tier: str) -> None:
    with training(policy, tier) as trainee:
        sweep(trainee, KeyboardInterrupt, lambda count: list(range(1, count + 1)))


@everywhere
@pytest.mark.usefixtures("dropped")
def test_a_real_signal_at_some_moment_of_a_step(policy: str, tier: str) -> None:
    """Another thread sends SIGINT at the k-th call of a hook; it arrives wherever the step is then."""
    main = threading.main_thread().ident or 0
    with training(policy, tier) as trainee:
        count = Countdown(KeyboardInterrupt)
        with calls_counted(count):
            trainee.step()
        for when in range(1, count.calls + 1, 5):
            reached = threading.Event()
            marks = iter(range(1, when))

            def mark(marks: Iterator[int] = marks, reached: threading.Event = reached) -> None:
                if next(marks, None) is None:
                    reached.set()

            def send(reached: threading.Event = reached) -> None:
                assert reached.wait(60)
                signal.pthread_kill(main, signal.SIGINT)

            thread = threading.Thread(target=send)
            thread.start()
            try:
                with calls_counted(mark):
                    trainee.step()
                thread.join()  # sent late: it arrives here
            except KeyboardInterrupt:
                pass
            thread.join()
            trainee.assert_recovers()


def test_no_signal_during_a_backward_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while torch computes is noticed in the first function in Python, even if that is a destructor."""
    swallowed, main = list[str](), threading.main_thread().ident or 0
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: swallowed.append(repr(unraisable.object)))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(8)])
    rows = torch.randn(512, 256)
    with ebbtide.enable_activation_offloading(model, policy="offload", target="disk", blocks="*") as handle:
        for _ in range(3):
            model(rows).sum().backward()
        for _ in range(20):
            begun, loss = time.perf_counter(), model(rows).sum()
            delay = random.random() * (time.perf_counter() - begun)  # a backward takes longer than its forward
            timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                loss.backward()
                timer.join(60)
            timer.join(60)
            del loss
        assert handle.stats().offloaded_bytes > 0
    assert swallowed == []
