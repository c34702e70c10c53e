"""The host tier on the fake device: the right protocol passes, and every planted mistake is found."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from ebbtide.base.errors import CapError, ConfigError, TargetError
from ebbtide.store.host import HostTier
from tests.helpers.fakedevice import FakeDevice, FakeEvent, FakeStream
from tests.helpers.slots import copy_out

POISON = 0xFF


def produce(device: FakeDevice, nbytes: int, seconds: float = 1.0) -> torch.Tensor:
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)  # never 255: that is poison
    device.compute(seconds, writes=tensor)
    return tensor


def test_bytes_come_back_and_times_are_exact() -> None:
    device = FakeDevice(100, 200)
    tier = HostTier(device)
    source = produce(device, 300)
    expected, slot = source.clone(), copy_out(tier, source)
    assert not tier.are_copied_out([slot])
    device.compute(1.0)
    tier.stalls.reader = "copying out"
    tier.wait_copied_out([slot])
    assert tier.are_copied_out([slot])
    del source
    tier.prefetch([slot])
    tier.prefetch([slot])
    device.compute(0.5)
    tier.stalls.reader = "taking"
    first = slot.take()
    tier.stalls.reader = "taking again"
    second = slot.take()
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert first.untyped_storage().nbytes() == 300 and first.storage_offset() == 0
    assert device.violations == []
    assert (tier.counters.out_bytes, tier.counters.in_bytes) == (device.out_bytes, device.in_bytes) == (300, 600)
    assert tier.counters.out_seconds == pytest.approx(3.0)
    assert tier.counters.in_seconds == pytest.approx(3.0)
    assert tier.counters.stalls.total_seconds == pytest.approx(4.5)
    assert (
        tier.stalls.read() == [("copying out", 2.0), ("taking", 1.0), ("taking again", 1.5)]
        and tier.stalls.read() == []
    )
    assert tier.used_bytes == 300 and tier.free_bytes is None
    slot.free()
    assert tier.used_bytes == 0
    del first, second
    assert device.live_bytes == 0


def test_a_wait_of_the_host_for_a_copy_out_is_counted_once() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    slot = copy_out(tier, produce(device, 300))
    tier.stalls.reader = "passing on"
    for _ in range(2):
        tier.wait_copied(slot)
        assert device.query(slot.done)
    assert [reader for reader, _ in tier.stalls.read()] == ["passing on"]


class Contended(deque[Any]):
    """Timed copies; while one thread is about to count one, another counts them all, unless it has to wait.

    Args:
        spans: The copies.
        count: Counts them.
    """

    def __init__(self, spans: Iterable[Any], count: Callable[[], None]) -> None:
        super().__init__(spans)
        self.other = threading.Thread(target=count)

    def popleft(self) -> Any:
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.2)
        return super().popleft()


def test_two_threads_count_each_timed_copy_once() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    tier.wait_copied_out([copy_out(tier, produce(device, 300))])
    copies = tier.copies
    spans = copies._spans["out"] = Contended(copies._spans["out"], copies.harvest)
    assert len(spans) == 1
    copies.harvest()
    spans.other.join(30)
    assert not spans and tier.counters.timed_out_bytes == 300


def test_a_slot_that_is_requested_twice_together_is_copied_once() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    slots = [copy_out(tier, produce(device, 300)) for _ in range(2)]
    assert tier.prefetch([slots[0], slots[1], slots[0]]) == 0
    assert device.live_bytes == tier.counters.in_bytes == device.in_bytes == 600
    for slot in slots:
        slot.take()
    assert device.violations == [] and tier.counters.in_bytes == 600


def test_places_are_reused_and_nothing_new_is_allocated() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device, budget_bytes=1024)
    for _ in range(5):
        slots = [copy_out(tier, produce(device, n)) for n in (100, 200, 300)]
        for slot in slots:
            tier.wait_copied_out([slot])
            slot.take()
            slot.free()
        tier.trim()
        assert device.host_calls == 1 and device.host_bytes == tier.gauges()["host_held_bytes"] == 1024
    assert tier.used_bytes == 0 and tier.free_bytes == 1024
    tier.close()
    assert device.host_bytes == 0


def test_cap_waits_for_copies_before_it_fails() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device, budget_bytes=512)
    source = produce(device, 400)
    copy_out(tier, source).free()  # its copy-out still runs
    kept = produce(device, 300)
    slot = copy_out(tier, kept)  # after it, in the same memory
    assert device.host_bytes == 512
    with pytest.raises(CapError, match="host budget of 512 B") as caught:
        copy_out(tier, produce(device, 201))
    assert "hint: raise host_budget" in str(caught.value)
    tier.wait_copied_out([slot])
    assert torch.equal(slot.take(), kept) and device.violations == []


def test_a_machine_without_host_memory_is_a_cap_error() -> None:
    device = FakeDevice(100, 100, host_limit_bytes=64)
    with pytest.raises(CapError, match="cannot allocate another"):
        copy_out(HostTier(device), produce(device, 101))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_synchronous_where_copies_are_not(asynchronous: bool) -> None:
    device = FakeDevice(100, 100, asynchronous_copies=asynchronous)
    tier = HostTier(device, synchronous=asynchronous)
    assert tier.synchronous
    source = produce(device, 100)
    expected, slot = source.clone(), copy_out(tier, source)
    tier.wait_copied_out([slot])
    assert tier.are_copied_out([slot]) and not slot.cancel()
    del source
    tier.prefetch([slot])
    taken = slot.take()
    assert torch.equal(taken, expected) and tier.stalls.read() == [] and device.violations == []
    assert device.now_seconds == pytest.approx(3.0)


def test_freed_at_any_moment() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    source, other = produce(device, 100), produce(device, 100)
    copy_out(tier, source).free()
    slot = copy_out(tier, other)  # into the same buffer, after the first copy
    tier.prefetch([slot])
    slot.free()  # its copy-in still runs: the target's memory must not be dropped before
    slot.free()
    last = copy_out(tier, source)
    tier.wait_copied_out([last])
    assert torch.equal(last.take(), source)
    assert last.place is not None and last.place.region.spans == ((0, 128),) and device.violations == []
    del last
    gc.collect()
    assert tier.used_bytes == 0 and device.live_bytes == 0


def test_free_never_waits_for_the_lock() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    source = produce(device, 100)
    slot = copy_out(tier, source)
    with tier._lock:
        slot.free()
    assert tier.used_bytes == 0


def test_after_close_and_after_free() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    source = produce(device, 100)
    slot, freed = copy_out(tier, source), copy_out(tier, source)
    freed.free()
    for ask in (freed.take, lambda: tier.prefetch([freed])):
        with pytest.raises(TargetError, match="freed"):
            ask()
    tier.close()
    tier.close()
    for ask in (lambda: copy_out(tier, source), slot.take, lambda: tier.prefetch([slot])):
        with pytest.raises(TargetError, match="closed"):
            ask()
    slot.free()
    assert device.host_bytes == 0


def test_a_slot_that_dies_while_another_settles_is_freed_although_the_tier_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    slots = [copy_out(tier, produce(device, 100)) for _ in range(2)]
    tier.wait_copied_out(slots)
    device.compute(10.0)
    tier.close()
    give = tier._arena.give

    def give_while_another_dies(*places: Any) -> None:
        if len(slots) > 1:
            slots.pop().free()
        give(*places)

    monkeypatch.setattr(tier._arena, "give", give_while_another_dies)
    slots[0].free()
    assert (tier.used_bytes, device.host_bytes) == (0, 0)


def test_only_plain_bytes() -> None:
    device = FakeDevice(1, 1)
    with pytest.raises(ConfigError, match="contiguous"):
        copy_out(HostTier(device), torch.zeros(4))


class Forgetful(FakeDevice):
    """Omits the waits of one kind of stream for the events of another."""

    def __init__(self, waiting: str, awaited: str) -> None:
        super().__init__(100, 100)
        self.waiting, self.awaited = waiting, awaited

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if not (stream.name.startswith(self.waiting) and event.stream.name.startswith(self.awaited)):
            super().wait(stream, event)


@pytest.mark.parametrize("busy", [0.0, 100.0])  # whether timing may hide the mistake
@pytest.mark.parametrize(
    ("waiting", "awaited"),
    [("out", "compute"), ("in", "out"), ("in", "compute"), ("compute", "in")],
)
def test_a_missing_wait_is_found(waiting: str, awaited: str, busy: float) -> None:
    device = Forgetful(waiting, awaited)
    tier = HostTier(device)
    source = produce(device, 100)
    slot = copy_out(tier, source)  # the source lives on: compute need not wait for the copy-out
    device.compute(busy)
    taken = slot.take()
    device.compute(busy)
    assert bool((taken == POISON).all())


def reuse_while_it_is_read(device: FakeDevice, tier: HostTier, busy: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Free a place while a copy-in still reads it, as another compute stream's ``free`` may."""
    first, second = produce(device, 100), produce(device, 100)
    slot = copy_out(tier, first)
    tier.prefetch([slot])
    place, slot.place = slot.place, None
    assert place is not None
    tier._arena.give(place)
    device.compute(busy)
    again = copy_out(tier, second)
    assert again.place is not None and again.place.region.spans == place.region.spans
    return [(first, slot.take()), (second, again.take())]


@pytest.mark.parametrize("busy", [0.0, 100.0])
def test_a_host_buffer_used_again_too_early_is_found(busy: float) -> None:
    device = Forgetful("out", "in")
    pairs = reuse_while_it_is_read(device, HostTier(device), busy)
    assert bool((pairs[1][1] == POISON).all()) and device.violations

    device = FakeDevice(100, 100)
    for expected, taken in reuse_while_it_is_read(device, HostTier(device), busy):
        assert torch.equal(taken, expected)
    assert device.violations == []


def test_a_source_dropped_early_is_found() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    slot = copy_out(tier, produce(device, 100))
    assert not tier.are_copied_out([slot])
    slot.source = None
    gc.collect()
    tier.wait_copied_out([slot])
    assert bool((slot.take() == POISON).all())
    assert "source died" in device.violations[0]


def test_a_source_outlives_its_slot_until_its_copy_is_done() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    source = produce(device, 100)
    alive = weakref.ref(source.untyped_storage())
    slot = copy_out(tier, source)
    del source
    slot.free()
    del slot
    assert tier.used_bytes == 0 and alive() is not None
    device.compute(1.0)
    assert tier.used_bytes == 0 and alive() is None and device.violations == []


def test_an_unread_prefetch_is_discarded_and_repeated() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    source = produce(device, 100)
    slot = copy_out(tier, source)
    slot.discard()
    tier.prefetch([slot])
    assert device.live_bytes == 100
    slot.discard()
    assert device.live_bytes == 0
    assert torch.equal(slot.take(), source) and device.in_bytes == 200 and device.violations == []


def test_a_host_buffer_freed_early_is_found() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    source = produce(device, 100)
    slot = copy_out(tier, source)
    tier.wait_copied_out([slot])
    tier.prefetch([slot])
    assert slot.place is not None
    device.free_host(slot.place.parts[0])
    assert bool((slot.take() == POISON).all()) and "freed before its end" in device.violations[0]


def test_a_target_dropped_early_is_found() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    slot = copy_out(tier, source := produce(device, 100))
    tier.wait_copied_out([slot])
    tier.prefetch([slot])
    slot.ahead = None
    device.compute(10)
    assert source is not None and "target died" in device.violations[0]


def test_a_tier_goes_with_its_last_slot_without_the_collector() -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    slot = copy_out(tier, produce(device, 100))
    tier.wait_copied_out([slot])
    gone = weakref.ref(tier)
    gc.disable()
    try:
        del slot, tier
        assert gone() is None
    finally:
        gc.enable()
    assert device.host_bytes == 0


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_asks_the_device_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(100, 100)
    tier = HostTier(device)
    tier.stalls.timed = True
    slot = copy_out(tier, produce(device, 100))

    def refuse(*args: object) -> None:
        raise RuntimeError("cannot re-initialize the device in a forked subprocess")

    tier._lock.acquire()  # as in another thread
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(5)  # ends a child that waits for the lock
        try:
            for name in ("query", "synchronize", "record", "wait", "free_host"):
                monkeypatch.setattr(device, name, refuse)
            assert tier.used_bytes == tier.gauges()["host_used_bytes"] == 100 and tier.counters.out_bytes == 100
            assert tier.free_bytes is None
            slot.free()
            del slot
            tier.trim()
            tier.close()
            code = 0
        finally:
            os._exit(code)
    tier._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slot.take().numel() == 100


def test_poison_is_nan() -> None:
    assert FakeDevice(1, 1).allocate(8, torch.device("cpu")).view(torch.float32).isnan().all()
