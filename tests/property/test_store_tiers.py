"""Random lives of random slots: the bytes that come back are those that went out, and nothing is left behind.

The model is a dictionary of slot → bytes. On the fake device a mistake in order is poison for any rates; on disk the
threads' own timing is the interleaving.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from ebbtide.store.location import filesystem_of
from ebbtide.store.protocol import Slot, Tier
from ebbtide.store.spill import SpillTier
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.slots import copy_out

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["copy_out", "wait", "drop", "prefetch", "take", "free", "cancel", "trim"]), st.integers(0, 99)
    ),
    max_size=60,
)
RATES = st.floats(1, 1e6)


class Lives:
    """Applies steps to a tier and checks the restored bytes."""

    def __init__(self, tier: Tier, produce: Callable[[int], torch.Tensor], sizes: list[int]) -> None:
        self.tier, self.produce, self.sizes = tier, produce, sizes
        self.slots: list[tuple[Slot, torch.Tensor]] = []
        self.sources: dict[Slot, torch.Tensor] = {}

    def step(self, action: str, number: int) -> None:
        if action == "copy_out":
            source = self.produce(self.sizes[number % len(self.sizes)])
            slot = copy_out(self.tier, source)
            self.slots.append((slot, source.clone()))
            self.sources[slot] = source
            return
        if action == "trim":
            self.tier.trim()
            return
        if not self.slots:
            return
        slot, expected = self.slots[number % len(self.slots)]
        if action == "wait":
            self.tier.wait_copied_out([slot])
            assert self.tier.are_copied_out([slot])
            self.sources.pop(slot, None)
        elif action == "drop" and self.tier.are_copied_out([slot]):
            self.sources.pop(slot, None)
        elif action == "prefetch":
            self.tier.prefetch([slot])
        elif action == "take":
            taken = slot.take()
            assert torch.equal(taken, expected)
            assert taken.untyped_storage().nbytes() == expected.numel()
        elif action == "free":
            slot.free()
            self.forget(slot)
        elif action == "cancel" and slot.cancel():
            self.forget(slot)

    def forget(self, slot: Slot) -> None:
        self.slots = [(s, e) for s, e in self.slots if s is not slot]
        # On a device, reading freed memory is only wrong if the bytes are needed; the fake device counts it, so
        # the source stays until the end.

    def end(self) -> None:
        for slot, expected in self.slots:
            assert torch.equal(slot.take(), expected)
            slot.free()
        self.slots.clear()


@given(STEPS, RATES, RATES, st.lists(st.floats(0, 50), min_size=1, max_size=10), st.booleans())
def test_host(steps: list[tuple[str, int]], out: float, into: float, pauses: list[float], asynchronous: bool) -> None:
    device = FakeDevice(out, into, asynchronous_copies=asynchronous)
    check_host(steps, pauses, device, HostTier(device, budget_bytes=1 << 20))


@settings(max_examples=40)
@given(STEPS, RATES, RATES, st.lists(st.floats(0, 50), min_size=1, max_size=10), st.booleans(), st.booleans())
def test_host_with_most_on_disk(
    steps: list[tuple[str, int]], out: float, into: float, pauses: list[float], asynchronous: bool, split: bool
) -> None:
    """Split: a storage of 333 bytes is larger than the stage, an eighth of the budget."""
    device = FakeDevice(out, into, asynchronous_copies=asynchronous)
    with tempfile.TemporaryDirectory() as directory:
        if filesystem_of(directory) == "tmpfs":
            pytest.skip("the temporary directory lies in RAM")
        host = HostTier(device, budget_bytes=1024)
        check_host(
            steps, pauses, device, SpillTier(host, lambda: DiskTier(directory), budget_bytes=1024 if split else 4096)
        )


def check_host(
    steps: list[tuple[str, int]], pauses: list[float], device: FakeDevice, tier: HostTier | SpillTier
) -> None:
    def produce(nbytes: int) -> torch.Tensor:
        source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        device.compute(0.1, writes=source)
        return source

    lives = Lives(tier, produce, [1, 100, 100, 333])
    for index, (action, number) in enumerate(steps):
        lives.step(action, number)
        device.compute(pauses[index % len(pauses)])
    lives.end()
    assert device.violations == []
    assert tier.used_bytes == 0
    assert device.live_bytes == 0  # the copy-in of a freed slot is dropped at the tier's next call
    assert tier.counters.out_bytes == device.out_bytes and tier.counters.in_bytes == device.in_bytes
    tier.close()
    assert device.host_bytes == 0


@pytest.fixture(scope="module")
def disk_tier() -> Iterator[DiskTier]:
    with tempfile.TemporaryDirectory() as directory:
        if filesystem_of(directory) == "tmpfs":
            pytest.skip("the temporary directory lies in RAM")
        with mock.patch("ebbtide.store.diskwork._WINDOW_BYTES", 200_000):
            tier = DiskTier(directory)
            yield tier
            tier.close()


@settings(max_examples=60)
@given(STEPS, st.integers(0, 5000))
def test_disk(disk_tier: DiskTier, steps: list[tuple[str, int]], offset: int) -> None:
    def produce(nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (nbytes + offset,), dtype=torch.uint8)[offset:]

    lives = Lives(disk_tier, produce, [1, 600, 4097, 70_001, 150_000])
    for action, number in steps:
        lives.step(action, number)
    lives.end()
    assert disk_tier.used_bytes == 0
    work, last = disk_tier._work, copy_out(disk_tier, produce(70_001))
    with work._lock:
        work._wait_until(lambda: disk_tier.are_copied_out([last]))  # in order: all before it is written, too
    last.free()
    gauges = disk_tier.gauges()
    assert gauges["disk_used_bytes"] == work._out_bytes == work._ahead_bytes == 0
    assert not work._writes and not work._reads
