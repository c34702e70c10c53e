"""A handle of the public API over a tier of the test's own, and the checks after any failure under it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.engine.timing import StepTimer
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from ebbtide.wrap.checkpointable import Checkpointable
from tests.helpers.engines import assert_nothing_left, drain, hooks_are_closed
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.models import build
from tests.helpers.oracle import same_bits
from tests.helpers.slots import small_disk


class Unlimited(ebbtide.Auto):
    """``Auto`` that accepts any ``max_slowdown``: a plan on a slow machine keeps its promise, too."""

    def __post_init__(self) -> None:
        """Accept every value."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A tiny model under a handle, and the gradients of ordinary training.

    Attributes:
        handle: The handle.
        step: One forward and backward; returns the gradients.
        expected: The gradients without ebbtide.
        packs: Saved tensors of a step under the handle.
    """

    handle: ebbtide.Handle
    step: Callable[[], list[Tensor]]
    expected: list[Tensor]
    packs: int

    def assert_recovers(self) -> None:
        """Assert invariant 7: nothing is open, nothing is left, the next step is right and complete."""
        engine = self.handle._engine
        assert hooks_are_closed() and torch.is_grad_enabled()
        drain()
        assert_nothing_left(engine)
        assert all(map(same_bits, self.step(), self.expected))
        assert hooks_are_closed() and not engine.restorer.backwards
        assert self.handle.stats().packs == self.packs
        assert self.handle.explain()
        engine._copy_out.retire()
        assert engine._copy_out.in_flight_bytes == 0
        assert_nothing_left(engine)


@contextlib.contextmanager
def training(
    policy: str, tier: str, *, name: str = "mlp", room_bytes: int | None = None, **given: Any
) -> Iterator[Trainee]:
    """A tiny model under ``enable_activation_offloading``, warm after two steps.

    Every block has its hooks in every step, whatever was measured: the tests are about these hooks.

    Args:
        policy: Name of the policy.
        tier: ``"disk"``, or ``"host"`` on the fake device.
        name: Name of the tiny model.
        room_bytes: Budget of the tier.
        given: Further arguments of ``enable_activation_offloading``.
    """
    tiny = build(name)
    weights = list(tiny.model.parameters())

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(tiny.loss()[0], weights))

    expected = step()
    with contextlib.ExitStack() as stack:
        for chooser in ("auto.sample", "closed_loop.sample", "trials.every_other"):
            nobody = mock.patch(f"ebbtide.profiling.{chooser}", lambda *args, **kwargs: frozenset[str]())
            stack.enter_context(nobody)
        stack.enter_context(mock.patch.object(StepTimer, "runs_plain", lambda self, name: False))
        if policy == "auto":  # on a busy machine a plan may miss its promise, and the next one checkpoint other blocks
            stack.enter_context(mock.patch.object(Checkpointable, "able", lambda *args: False))
        if tier == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            place: Any = DiskTier(folder) if room_bytes is None else small_disk(folder, room_bytes)
        else:
            place = HostTier(FakeDevice(1e6, 1e6), budget_bytes=room_bytes)
        stack.callback(place.close)
        handle = enable_over(place, tiny.model, policy=policy, **({"min_bytes": 0, "window": "30KiB"} | given))
        stack.enter_context(handle)
        trainee = Trainee(handle=handle, step=step, expected=expected, packs=0)
        if room_bytes is None:
            for _ in range(2):
                assert all(map(same_bits, step(), expected))
            trainee = Trainee(handle=handle, step=step, expected=expected, packs=handle.stats().packs)
        yield trainee


def enable_over(place: Any, model: nn.Module, **given: Any) -> ebbtide.Handle:
    """Call ``enable_activation_offloading`` over a tier."""
    with mock.patch("ebbtide.api.open_tier", lambda *args, **options: place):
        return ebbtide.enable_activation_offloading(model, **given)
