"""The host tier under random sequences of an engine's calls, with late kernels and copies: bytes and races.

``mutants.py`` removes each wait, record and hold of the store in turn: a test of this folder must fail then.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.base.errors import CapError
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.host import HostTier
from ebbtide.store.hostslot import HostSlot
from tests.helpers.slots import copy_out
from tests.simdev.device import configured, counters, held, violations

DEVICE = torch.device("privateuseone", 0)  # its name even where it cannot be built
MIB = 1 << 20
SIZES = [MIB + 64, 100_001, 65_536, 3 * MIB, 70_000]
ROUNDS = 8
DELAYS = {"copy_delay_us": 1500, "kernel_delay_us": 100, "jitter_us": 500}


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = HostTier(AcceleratorDevice())
    values()  # waits for the device: not while a test holds one of its streams
    yield tier
    tier.close()


@functools.cache
def values() -> Tensor:
    """Every byte: the device takes a number among a kernel's arguments for a new shape, whose first call waits."""
    made = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.synchronize()
    return made


def pattern(nbytes: int, value: int) -> Tensor:
    """Bytes that a kernel writes late."""
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE).copy_(values()[value % 251])


def is_pattern(found: Tensor, value: int) -> Tensor:
    return (found == values()[value % 251]).all()


class Trial:
    """A pass over a tier: everything taken is checked on the device, and the results are read at the end."""

    def __init__(self, tier: HostTier, random: random.Random, streams: list[torch.Stream]) -> None:
        self.tier, self.random, self.streams = tier, random, streams
        self.slots: list[tuple[HostSlot, int]] = []
        self.checks: list[Tensor] = []
        self.count = 0

    def copy_out(self) -> None:
        self.count += 1
        source = pattern(self.random.choice(SIZES), self.count)
        try:
            slot = copy_out(self.tier, source)
        except CapError:
            return
        del source
        if self.random.random() < 0.6:
            self.tier.wait_copied_out([slot])
        self.slots.append((slot, self.count))

    def prefetch(self) -> None:
        self.tier.prefetch([self.random.choice(self.slots)[0]])

    def discard(self) -> None:
        self.random.choice(self.slots)[0].discard()

    def ask(self) -> None:
        assert self.tier.are_copied_out([self.random.choice(self.slots)[0]]) in (True, False)

    def take(self) -> None:
        slot, value = self.random.choice(self.slots)
        self.checks.append(is_pattern(slot.take(), value))

    def use_up(self) -> None:
        slot, value = self.slots.pop(self.random.randrange(len(self.slots)))
        self.checks.append(is_pattern(slot.take(), value))
        slot.free()

    def free(self) -> None:
        self.slots.pop(self.random.randrange(len(self.slots)))[0].free()

    def trim(self) -> None:
        self.tier.trim()

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.tier.stalls.timed = bool(step % 2)
            with self.random.choice(self.streams):  # no order between them except the tier's
                others = [self.prefetch, self.discard, self.ask, self.take, self.free, self.trim] + [self.use_up] * 3
                self.random.choice([self.copy_out] * 5 + (others if self.slots else []))()
                if self.random.random() < 0.3:
                    pattern(self.random.choice(SIZES), 255)  # reuses freed memory
        for slot, _ in self.slots:
            slot.free()
        torch.accelerator.synchronize()


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("number", range(ROUNDS))
def test_any_sequence_gives_the_bytes_that_went_in(number: int, streams: int, seed: int) -> None:
    rng = random.Random(f"{seed} {number} {streams}")
    budget = rng.choice([None, 12 * MIB])
    tier = HostTier(AcceleratorDevice(), budget_bytes=budget)
    current = torch.accelerator.current_stream()
    trial = Trial(tier, rng, [current, *(torch.Stream(device=DEVICE) for _ in range(streams - 1))])
    with configured(**DELAYS):
        trial.run(60)
        assert all(map(bool, trial.checks)) and trial.checks and violations() == []
        assert tier.used_bytes == 0
        tier.close()


def test_a_copy_out_runs_on_its_own_stream_during_compute(tier: HostTier) -> None:
    copy_out(tier, pattern(MIB, 1)).free()  # makes streams and host memory
    out, _ = tier.copies._side_streams(DEVICE)
    source, before = pattern(MIB, 7), counters()["copies_async"]
    with held(out):
        slot = copy_out(tier, source)
        torch.accelerator.current_stream().synchronize()  # compute is not delayed
        assert not tier.are_copied_out([slot]) and not bool((slot.content() == 7).all())
    with configured(copy_delay_us=50_000):
        slot = copy_out(tier, source)
        tier.wait_copied(slot)
    assert (
        tier.are_copied_out([slot]) and bool((slot.content() == 7).all()) and counters()["copies_async"] == before + 2
    )


def test_a_source_is_dropped_once_it_is_copied_out_or_compute_waits(tier: HostTier) -> None:
    with held(tier.copies._side_streams(DEVICE)[0]):
        slots = [copy_out(tier, pattern(MIB, i)) for i in range(2)]
        copied_out, held_before = tier.are_copied_out([slots[0]]), slots[0].source is not None
        tier.wait_copied_out([slots[0]])
        held_after = slots[0].source is not None
    torch.accelerator.synchronize()  # before any assertion: its message would wait for the held stream
    assert (copied_out, held_before, held_after) == (False, True, False)
    done, held_after = tier.are_copied_out([slots[1]]), slots[1].source is not None
    assert (done, held_after) == (True, False)


def test_memory_stays_pinned_until_its_copies_are_done() -> None:
    device = AcceleratorDevice()
    stream, memory, source = device.side_stream(DEVICE, "out"), device.allocate_host(MIB, pinned=True), pattern(MIB, 1)
    torch.accelerator.synchronize()
    with configured(copy_delay_us=50_000):
        device.copy_all([(memory, source)], stream)
        del memory
        gc.collect()
    assert violations() == []


def test_bytes_filled_in_by_the_host_wait_for_copies_out_of_the_same_place() -> None:
    tier = HostTier(AcceleratorDevice(), budget_bytes=2 * MIB)
    with configured(copy_delay_us=50_000):
        slot = copy_out(tier, pattern(2 * MIB, 1))
        slot.free()
        del slot
        filled = tier.fill(torch.full((2 * MIB,), 9, dtype=torch.uint8, device="cpu"), DEVICE)
        torch.accelerator.synchronize()
        assert is_pattern(filled.take(), 9)
    filled.free()
    tier.close()


def test_released_host_memory_waits_for_its_copies(tier: HostTier) -> None:
    """Chunks are released only when no copy uses them: the arena waits for copies when it is closed."""
    copy_out(tier, pattern(MIB, 1)).free()
    with held(tier.copies._side_streams(DEVICE)[0]):
        slot: Any = copy_out(tier, pattern(64 * MIB, 2))
        kept = [chunk.memory for chunk in tier._arena._chunks]  # unpinning would wait for the held stream
        slot.free()
        del slot
        for _ in range(40):  # as many backwards as the arena remembers
            tier.trim()
        reserved_bytes = tier.gauges()["host_held_bytes"]
    assert reserved_bytes >= 64 * MIB and len(kept) > 1
    for _ in range(2):
        torch.accelerator.synchronize()
        tier.trim()
    assert tier.gauges()["host_held_bytes"] < 64 * MIB


def test_an_interrupted_copy_in_is_waited_for(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = tier.device
    slot, copy = copy_out(tier, pattern(MIB, 3)), device.copy_all

    def interrupted(*given: Any) -> None:
        copy(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "copy_all", interrupted)
    with configured(copy_delay_us=20_000):
        with pytest.raises(KeyboardInterrupt):
            tier.prefetch([slot])
        monkeypatch.undo()
        tier.prefetch([slot])  # another target: the first one's memory may be reused once its copy is done
        other = pattern(MIB, 255)
        assert is_pattern(slot.take(), 3) and is_pattern(other, 255)
    slot.free()
