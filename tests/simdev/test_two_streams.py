"""Models that compute on two streams: a tensor saved on one and read on both, memory of one saved on the other.

Each case is first shown to be ordered in ordinary training, so that a race is the library's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.host import HostTier
from tests.helpers.slots import copy_out
from tests.simdev.device import configured, violations
from tests.unit.wrap.test_checkpointable import Changes

DEVICE = torch.device("privateuseone", 0)  # its name even where it cannot be built
WIDTH, STEPS = 64, 4


class TwoStreams(nn.Module):
    """A block that does part of its work on a side stream, as shared experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(WIDTH, WIDTH), torch.Stream(device=DEVICE)

    def beside(self, work: Callable[[], Tensor]) -> Tensor:
        """Run ``work`` on the side stream; the caller waits for it with ``join``."""
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            return work()

    def join(self, y: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        current.wait_stream(self.side)
        y.record_stream(current)
        return y


class ReadOnBoth(TwoStreams):
    """Saves one tensor on both streams: two backward nodes read it, each on its own stream."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.record_stream(self.side)
        one = self.beside(lambda: h.sin())
        other = h.cos()
        return x + other * self.join(one)


class SavedElsewhere(TwoStreams):
    """Saves a tensor on another stream than that of its memory, and lets autograd alone keep it until the step ends.

    That is legal without ``record_stream`` only as long as the graph lives: ``train`` retains it and synchronizes.
    """

    def forward(self, x: Tensor) -> Tensor:
        one = self.beside(self.linear(x).sin)
        filled = x.new_full(x.shape, 1e9)  # would reuse the freed memory
        return x + self.join(one) + filled - filled


class SavedInTurn(TwoStreams):
    """Saves on the side stream, and then on the main one before waiting for the side stream."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.record_stream(self.side)
        one = self.beside(lambda: h.sin().exp())
        other = (3 * h).cos()
        return x + other * self.join(one)


class SideLast(TwoStreams):
    """Joins branches of both streams. The side stream's is the younger one, so its nodes read first in backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.record_stream(self.side)
        other = (3 * h).cos()
        one = self.beside(lambda: h.sin().exp())
        return x + (other + self.join(one))


def train(block: type[TwoStreams], scope: Callable[[nn.Module], AbstractContextManager[object]]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(3))).to(DEVICE)
    found = []
    with scope(model), configured(copy_delay_us=2000, kernel_delay_us=200):
        for _ in range(STEPS):
            x = torch.ones(256, WIDTH, device=DEVICE, requires_grad=True)
            y = model(x)
            y.square().mean().backward(retain_graph=True)
            torch.accelerator.synchronize()
            assert x.grad is not None
            found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
    torch.accelerator.synchronize()
    return found


def offloaded(model: nn.Module, **given: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(
        model, min_bytes=0, blocks=["0", "1", "2"], **({"policy": "offload"} | (given or {"window": "1B"}))
    )


@pytest.mark.parametrize("given", [{}, {"synchronous": True}], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("block", [ReadOnBoth, SavedElsewhere, SavedInTurn])
def test_gradients_are_those_of_plain_training(block: type[TwoStreams], given: dict[str, Any]) -> None:
    plain = train(block, lambda model: nullcontext())
    assert violations() == []
    got = train(block, functools.partial(offloaded, **given))
    assert violations() == []
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("block", [ReadOnBoth, SavedInTurn, SideLast])
def test_what_a_second_forward_saves_is_read_on_both_streams(block: type[TwoStreams], verify: bool) -> None:
    """It runs on the stream of its first reader, which may be the side stream, and so does all that it computes."""
    handles: list[ebbtide.Handle] = []

    def checkpointed(model: nn.Module) -> ebbtide.Handle:
        handles.append(offloaded(model, policy=Changes(), verify=verify))
        return handles[0]

    plain = train(block, lambda model: nullcontext())
    assert violations() == []
    got = train(block, checkpointed)
    assert violations() == []
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    assert handles[0].stats().checkpointed_blocks == 3


def test_a_prefetch_for_one_stream_serves_another() -> None:
    tier, side = HostTier(AcceleratorDevice()), torch.Stream(device=DEVICE)
    source = torch.arange(1 << 20, device=DEVICE).to(torch.uint8)
    expected, slot = source.clone(), copy_out(tier, source)
    tier.wait_copied_out([slot])
    del source
    with configured(copy_delay_us=2000):
        tier.prefetch([slot])
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            taken = slot.take()
            same = taken == expected
            del taken
        other = torch.full_like(expected, 255)  # reuses the memory if it may
        torch.accelerator.synchronize()
    assert bool(same.all()) and tier.counters.in_bytes == expected.nbytes
    del other
    slot.free()
    tier.close()


def test_memory_waits_for_the_stream_that_saved_it() -> None:
    tier, side = HostTier(AcceleratorDevice()), torch.Stream(device=DEVICE)
    values = torch.arange(2, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):  # the first call of a shape waits
        source = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE).copy_(values[1])
        copy_out(tier, source).free()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            slot = copy_out(tier, source)
            late = source + source
        tier.wait_copied(slot)
        assert tier.are_copied_out([slot])
        del source
        torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE).copy_(values[0])
        torch.accelerator.synchronize()
        assert bool((late == 2).all())
        slot.free()
    tier.close()
    assert violations() == []


def test_memory_waits_for_a_side_stream_that_saves_first() -> None:
    tier, side = HostTier(AcceleratorDevice()), torch.Stream(device=DEVICE)
    values = torch.arange(2, dtype=torch.uint8, device=DEVICE)
    source = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE).copy_(values[1])
    side.wait_stream(torch.accelerator.current_stream())
    with configured(copy_delay_us=2000):
        with side:
            slot = copy_out(tier, source)
            tier.wait_copied_out([slot])
        del source
        torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE).copy_(values[0])
        torch.accelerator.synchronize()
    assert bool((slot.take() == 1).all())
    slot.free()
    tier.close()
    assert violations() == []
