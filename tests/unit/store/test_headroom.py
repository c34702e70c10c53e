"""Limits of prefetching: never more than is free, queried rarely, less after the allocator released its cache."""

from __future__ import annotations

import pytest
import torch

from ebbtide.store.device import FreeMemory
from ebbtide.store.headroom import Headroom
from ebbtide.store.host import HostTier
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.slots import copy_out
from tests.unit.store.test_host import produce

CPU = torch.device("cpu")
MIB = 1 << 20


class Asked(FakeDevice):
    """Counts the queries of its room."""

    asked = 0

    def free_memory(self, device: torch.device) -> FreeMemory | None:
        self.asked += 1
        return super().free_memory(device)


def test_one_answer_serves_for_half_of_what_is_free_and_for_no_more_than_some_copies() -> None:
    device = Asked(1e9, 1e9, device_limit_bytes=8 * MIB)
    headroom = Headroom(device)
    for _ in range(4):
        headroom.take([MIB], CPU)
    assert device.asked == 1
    headroom.take([MIB], CPU)
    assert device.asked == 2
    headroom.forget()
    headroom.take([MIB], CPU)
    assert device.asked == 3
    large = Asked(1e9, 1e9, device_limit_bytes=1 << 40)
    headroom = Headroom(large)
    for _ in range(1024):
        headroom.take([MIB], CPU)
    assert large.asked == 4


def test_bytes_that_nobody_needs_yet_stay_where_they_are_while_there_is_no_room() -> None:
    device = FakeDevice(1e9, 1e9, device_limit_bytes=10_000)
    tier = HostTier(device)
    slots = [copy_out(tier, produce(device, 4000, 0.001)) for _ in range(3)]
    for slot in slots:
        tier.wait_copied_out([slot])
    room, allocate, calls = device.free_memory(CPU), device.allocate, list[int]()
    device.allocate = lambda nbytes, where: (calls.append(nbytes), allocate(nbytes, where))[1]
    assert room is not None and room.free_bytes == 10_000
    for slot in slots[:2]:
        tier.prefetch([slot])
    with pytest.raises(torch.OutOfMemoryError, match="3.9 KiB are to be prefetched, 2.0 KiB of device memory"):
        tier.prefetch([slots[2]])
    assert calls == [4000, 4000]  # the allocator was not queried
    taken = slots[0].take()
    del taken
    tier.prefetch([slots[2]])
    assert len(calls) == 3 and device.violations == []


def test_each_backward_queries_again() -> None:
    device = Asked(1e9, 1e9, device_limit_bytes=MIB)
    tier = HostTier(device)
    for asked in (1, 2):
        slot = copy_out(tier, produce(device, 4096, 0.001))
        tier.wait_copied_out([slot])
        tier.prefetch([slot])
        tier.trim()
        slot.free()
        assert device.asked == asked


@pytest.mark.parametrize("ends", [False, True], ids=["prefetch", "end"])
def test_a_released_cache_refuses_one_prefetch(ends: bool) -> None:
    device = FakeDevice(1e9, 1e9, device_limit_bytes=8 * MIB)
    device.flushes = 3  # before anything was copied in
    headroom = Headroom(device)
    headroom.take([MIB], CPU)
    device.flushes = 4
    if ends:
        headroom.forget()
    with pytest.raises(torch.OutOfMemoryError, match="after the allocator gave back what it kept"):
        headroom.take([4 * MIB], CPU)
    headroom.take([4 * MIB], CPU)


def test_a_cache_that_each_forward_releases_refuses_one_prefetch_at_most() -> None:
    device = FakeDevice(1e9, 1e9, device_limit_bytes=8 * MIB)
    headroom, refused = Headroom(device), 0
    for _ in range(6):
        try:
            headroom.take([MIB], CPU)
        except torch.OutOfMemoryError:
            refused += 1
        headroom.forget()  # the backward ends
        device.flushes += 1
    assert refused == 1


def test_a_device_with_unknown_memory_refuses_nothing() -> None:
    headroom = Headroom(FakeDevice(1e9, 1e9))
    headroom.take([1 << 50], CPU)
