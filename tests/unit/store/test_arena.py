"""The arena: chunks, places in pieces, released memory, refused pinning."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import pytest
import torch

from ebbtide.base.errors import CapError
from ebbtide.store.arena import Arena
from ebbtide.store.guards import Cooling, Guard
from ebbtide.store.host import HostTier
from tests.helpers.fakedevice import FakeDevice, FakeEvent
from tests.helpers.slots import copy_out
from tests.unit.store.test_host import produce

MIB = 1 << 20
TRACE = [3 * MIB + 7, 100_001, 65_536, 9 * MIB, 65_537, 70_000, 5 * MIB + 1]


class PowersOfTwo(FakeDevice):
    """Returns the largest power of two within the request, like torch's allocator of pinned memory."""

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return super().allocate_host(1 << (nbytes.bit_length() - 1), pinned=pinned)


def copy_out_all(device: FakeDevice, tier: HostTier, sizes: list[int]) -> None:
    """Run one step: copy everything out, take it in reverse order, and compare."""
    offloaded = [(copy_out(tier, source := produce(device, n, 0.001)), source) for n in sizes]
    for slot, _ in offloaded:
        tier.wait_copied_out([slot])
    for slot, source in reversed(offloaded):
        assert torch.equal(slot.take(), source)
        slot.free()
    tier.trim()


@pytest.mark.parametrize("kind", [FakeDevice, pytest.param(PowersOfTwo, marks=pytest.mark.slow)])
def test_a_repeating_trace_asks_for_memory_in_its_first_step_only(kind: type[FakeDevice]) -> None:
    device = kind(1e9, 1e9)
    tier = HostTier(device)
    sizes = TRACE * 8
    copy_out_all(device, tier, sizes)
    after_first = tier.gauges()
    for _ in range(5):
        copy_out_all(device, tier, sizes)
    assert tier.gauges() == after_first and device.host_calls == after_first["host_chunks"]
    most = after_first["host_most_used_bytes"]
    assert most == sum(sizes) and most <= after_first["host_held_bytes"] <= 1.03 * most
    assert device.host_bytes == after_first["host_held_bytes"] and device.violations == []


def test_a_place_in_pieces_serves_where_no_hole_is_large_enough() -> None:
    device = FakeDevice(1e9, 1e9)
    tier = HostTier(device, budget_bytes=1024)
    slots = [(copy_out(tier, source := produce(device, 128)), source) for _ in range(8)]
    for slot, _ in slots[::2]:
        slot.free()
    large = produce(device, 400)
    slot = copy_out(tier, large)
    assert slot.place is not None and len(slot.place.parts) == 4
    assert [part.numel() for part in slot.place.parts] == [128, 128, 128, 16]
    for offloaded, source in [*slots[1::2], (slot, large)]:
        tier.wait_copied_out([offloaded])
        assert torch.equal(offloaded.take(), source)
    assert torch.equal(slot.content(), large)
    assert device.violations == [] and device.host_bytes == 1024


def test_what_the_last_backwards_did_not_need_goes_back() -> None:
    device = FakeDevice(1e9, 1e9)
    tier = HostTier(device)
    copy_out_all(device, tier, [4 * MIB, 40 * MIB])
    most = device.host_bytes
    for _ in range(32):
        assert device.host_bytes == most
        copy_out_all(device, tier, [4 * MIB])
    assert 4 * MIB <= device.host_bytes < most and device.violations == []
    calls = device.host_calls
    copy_out_all(device, tier, [4 * MIB])
    assert device.host_calls == calls


def test_what_is_needed_again_and_again_is_pinned_once_more_and_stays() -> None:
    """For example if one batch in forty is long."""
    device, calls = FakeDevice(1e9, 1e9), list[int]()
    tier = HostTier(device)
    for _ in range(3):
        copy_out_all(device, tier, [1024, 8 * MIB])
        for _ in range(40):
            copy_out_all(device, tier, [1024])
        calls.append(device.host_calls)
    assert calls[0] < calls[1] == calls[2], calls
    for _ in range(24):
        copy_out_all(device, tier, [1024])
    assert device.host_bytes < 8 * MIB and device.violations == []  # not for ever


def test_memory_that_a_copy_uses_stays_until_it_is_done() -> None:
    device = FakeDevice(1e3, 1e3)
    tier = HostTier(device)
    source = produce(device, 4000)
    copy_out(tier, source).free()
    for _ in range(40):
        tier.trim()
    assert device.host_bytes > 0  # it is not needed, but the copy-out still runs
    device.compute(5.0)
    tier.trim()
    assert device.host_bytes == 0 and device.violations == []


def test_closing_waits_for_copies() -> None:
    device = FakeDevice(1e3, 1e3)
    tier = HostTier(device)
    source = produce(device, 4000)
    copy_out(tier, source).free()
    tier.close()
    assert device.host_bytes == 0 and device.violations == [] and source.numel() == 4000


def test_pageable_memory_where_no_more_is_pinned_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(1e9, 1e9, pinned_limit_bytes=3 * MIB)
    tier = HostTier(device)
    with caplog.at_level(logging.WARNING, "ebbtide.store"):
        for _ in range(2):
            copy_out_all(device, tier, [MIB] * 30)
    assert [record.message for record in caplog.records] == [
        "cannot pin host memory (fake host: no more can be pinned): using pageable memory, whose copies stall compute"
    ]
    found = tier.gauges()
    assert found["host_pinned_bytes"] == 3 * MIB < found["host_held_bytes"] == device.host_bytes
    assert device.violations == []


def test_less_is_asked_for_where_more_is_refused() -> None:
    device = FakeDevice(1e9, 1e9, host_limit_bytes=8192)
    tier = HostTier(device)
    source = produce(device, 8000)
    slot = copy_out(tier, source)
    tier.wait_copied_out([slot])
    assert torch.equal(slot.take(), source) and device.host_bytes == 8192
    with pytest.raises(CapError, match="cannot allocate another 201 B .*7.8 KiB in use.*out of memory"):
        copy_out(tier, produce(device, 201))


@pytest.mark.parametrize("budget", [64, 1000, 4096, MIB + 1])
def test_a_budget_is_never_exceeded(budget: int) -> None:
    device = FakeDevice(1e9, 1e9)
    arena = Arena(device, budget)
    places = []
    with pytest.raises(CapError, match="no more than the host budget"):
        while True:
            places.append(arena.take(max(1, budget // 9)))
    assert device.host_bytes <= budget and arena.used_bytes == sum(place.nbytes for place in places)
    assert len(places) >= budget // (64 * math.ceil(max(1, budget // 9) / 64)) - 1
    places.clear()
    arena.clear()
    assert device.host_bytes == 0


def test_room_that_must_be_left_is_left() -> None:
    arena = Arena(FakeDevice(1e9, 1e9), 1024)
    kept = arena.take(512, spare_bytes=512)
    with pytest.raises(CapError):
        arena.take(1, spare_bytes=512)
    assert arena.take(512).nbytes == kept.nbytes


def test_a_place_that_is_lost_is_found_again_with_its_copy() -> None:
    device = FakeDevice(1.0, 1.0)
    arena = Arena(device, 64)
    out = device.side_stream(torch.device("cpu"), "out")
    place = arena.take(64)
    place.region.guard.claim(out)  # and an interrupt comes: the copy was requested, its event never recorded
    source = produce(device, 64)
    device.wait(out, device.record(device.compute_stream(torch.device("cpu"))))
    device.copy(place.parts[0], source, out)
    del place
    gc.collect()
    again = arena.take(64)
    (event,) = again.region.guard.events(device)
    assert not device.query(event) and event.seconds == pytest.approx(65.0)
    arena.give(again)
    arena.give(again)
    del again  # never used: the earlier record still holds
    (event,) = arena.take(64).region.guard.events(device)
    assert event.seconds == pytest.approx(65.0)


def test_who_had_bytes_first_is_remembered_for_each_of_them() -> None:
    device = FakeDevice(1e9, 1e9)
    guards = [Guard() for _ in range(4)]
    streams = [device.side_stream(torch.device("cpu"), f"s{number}") for number in range(4)]
    for guard, stream in zip(guards, streams, strict=True):
        guard.claim(stream)
    a, b, c, d = guards
    cooling = Cooling()
    cooling.add((0, 100), a)
    cooling.add((100, 100), b)
    cooling.add((50, 100), c)
    assert cooling.over([(0, 50)]) == [a] and cooling.over([(150, 1)]) == [b] and cooling.over([(50, 100)]) == [c]
    assert cooling.over([(49, 102)]) == [a, c, b] and cooling.over([(200, 50)]) == []
    cooling.add((60, 10), d)
    assert cooling.over([(0, 200)]) == [a, c, d, b] and len(cooling._spans) == 5
    cooling.mark(device, streams)
    cooling.add((300, 10), d)
    cooling.prune(device)
    assert cooling.over([(0, 400)]) == [d] and len(cooling._spans) == 1  # of a later generation


class Counting(FakeDevice):
    """Counts queries of events."""

    questions = 0

    def query(self, event: FakeEvent) -> bool:
        self.questions += 1
        return super().query(event)


@pytest.mark.parametrize("tensors", [8, 200])
def test_the_end_of_a_backward_asks_as_much_after_many_tensors_as_after_few(tensors: int) -> None:
    device = Counting(1e9, 1e9)
    tier = HostTier(device)
    tier.stalls.timed = False
    other = copy_out(tier, produce(device, 64, 0.001))  # of a live graph: its record is not read
    record = next(iter(tier._arena._records.values()))
    looked = list[int]()
    tier._arena._records = Watched(tier._arena._records, looked)
    for _ in range(3):
        slots = [copy_out(tier, produce(device, 256, 0.001)) for _ in range(tensors)]
        for slot in slots:
            tier.wait_copied_out([slot])
            slot.free()
        assert tier.used_bytes == 64
        looked.clear()
        before = device.questions
        tier.trim()
        assert device.questions - before <= 2 and looked == []
        assert len(tier._arena._cooling._spans) <= tensors
    assert record.region() is not None and other.nbytes == 64 and device.violations == []


class Watched(dict[int, Any]):
    """Counts iterations over all of its values."""

    def __init__(self, held: dict[int, Any], looked: list[int]) -> None:
        super().__init__(held)
        self._looked = looked

    def values(self) -> Any:
        self._looked.append(len(self))
        return super().values()


def test_freed_bytes_are_guarded_until_the_copies_before_the_mark_are_done() -> None:
    device = FakeDevice(1e3, 1e3)
    arena = Arena(device, 4096)
    out = device.side_stream(torch.device("cpu"), "out")
    device.wait(out, device.record(device.compute_stream(torch.device("cpu"))))
    places, source = [arena.take(1024) for _ in range(2)], produce(device, 1024)
    for place in places:
        place.region.guard.claim(out)
        device.copy(place.parts[0], source, out)
        arena.give(place)
    arena.trim([out])  # the copies take a second each: their bytes must be waited for
    first = arena.take(1024)
    assert len(first.region.guard.events(device)) == 1
    device.compute(3.0)
    second = arena.take(1024)
    assert second.region.guard.events(device) == []  # and not again
    assert arena._cooling._spans == [] and first.region.spans != second.region.spans
