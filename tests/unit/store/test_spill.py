"""Host memory first, disk for the rest: on the fake device and a real disk."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.base.errors import CapError, DiskError, TargetError
from ebbtide.store import open_tier
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostSlot, HostTier
from ebbtide.store.meter import store_bytes
from ebbtide.store.protocol import Tier
from ebbtide.store.spill import SpillSlot, SpillTier
from tests.helpers.failing import failing
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.handles import enable_over
from tests.helpers.interrupts import Fuse
from tests.helpers.models import build
from tests.helpers.oracle import same_bits
from tests.helpers.sizes import Size
from tests.helpers.slots import copy_out
from tests.unit.store.test_host import produce

KIB = 1 << 10
BUDGET = 64 * KIB  # 8 KiB of it are the staging buffer


@contextlib.contextmanager
def spilling(
    folder: Path, *, budget: int = BUDGET, rate: float = 1e6, rate_in: float | None = None, **given: Any
) -> Iterator[tuple[Any, SpillTier]]:
    device = FakeDevice(rate, rate_in or rate, **given)
    tier = SpillTier(HostTier(device, budget_bytes=budget), lambda: DiskTier(folder), budget_bytes=budget)
    yield device, tier
    tier.close()
    gc.collect()
    assert device.host_bytes == 0 and device.violations == []


def test_tiers_with_the_default_budget_have_one_together(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several models may train in one process: each with the whole budget, they would exceed the memory there is."""
    mib = 1 << 20
    device = FakeDevice(1e9, 1e9)
    monkeypatch.setattr("ebbtide.store.accelerator.AcceleratorDevice", lambda home: device)
    monkeypatch.setattr("ebbtide.store.fair_share_bytes", lambda: 8 * mib - device.host_bytes)
    monkeypatch.setattr("ebbtide.store.arena._sharing", weakref.WeakSet())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    tiers: list[Any] = [open_tier("host", disk_path=disk) for _ in range(2)]
    slots = [copy_out(tiers[0], produce(device, 6 * mib))]
    tiers += [open_tier("host", disk_path=disk), open_tier("host", disk_path=disk, host_budget_bytes=8 * mib)]
    assert [store_bytes(tier) for tier in tiers] == [7 * mib, mib, mib, 7 * mib]
    slots += [copy_out(tier, produce(device, 4 * mib)) for tier in tiers[1:]]
    assert [type(slot) for slot in slots] == [HostSlot, SpillSlot, SpillSlot, HostSlot]
    assert sum(tier.gauges()["host_held_bytes"] for tier in tiers[:3]) <= (8 + 1) * mib  # each has a stage
    slots[0].free()
    tiers[0].close()
    assert store_bytes(tiers[1]) > 3 * mib
    assert type(copy_out(tiers[1], produce(device, 3 * mib))) is HostSlot
    for slot in slots[1:]:
        slot.free()
    for tier in tiers:
        tier.close()


def test_plans_know_what_host_memory_holds_before_it_spills(disk: Path) -> None:
    with spilling(disk) as (device, tier):
        held = store_bytes(tier)
        assert held == BUDGET - 8 * KIB and store_bytes(tier.host) is None
        slots = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(held // (8 * KIB) + 1)]
        assert [type(slot) for slot in slots] == [HostSlot] * (len(slots) - 1) + [SpillSlot]
        for slot in slots:
            slot.free()


def test_what_does_not_fit_goes_to_disk_and_all_comes_back(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with spilling(disk) as (device, place):
        tier: Tier = place
        for _ in range(3):
            sources = [produce(device, n) for n in [4 * KIB, 3001, 5000, 2 * KIB] * 12]
            slots = [copy_out(tier, source) for source in sources]
            kinds = [type(slot) for slot in slots]
            assert kinds.count(HostSlot) >= 12 and kinds.count(SpillSlot) >= 20
            for slot in slots:
                tier.wait_copied_out([slot])
                assert tier.are_copied_out([slot]) and not slot.cancel()
            assert device.host_bytes <= BUDGET
            for slot, source in zip(reversed(slots), reversed(sources), strict=True):
                tier.prefetch([slot])
                taken = slot.take()
                assert torch.equal(taken, source) and taken.untyped_storage().nbytes() == source.numel()
                slot.free()
                slot.free()
            tier.trim()
        assert tier.used_bytes == 0 and tier.free_bytes is not None
        spilled = place.gauges()["disk_written_bytes"]
        assert 0 < spilled < place.counters.out_bytes == device.out_bytes
        assert place.counters.in_bytes == device.in_bytes
        told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == 1 and told[0].startswith("the host budget is reached (") and "goes to disk" in told[0]


def test_nothing_of_the_disk_is_touched_below_the_budget(disk: Path) -> None:
    with spilling(disk) as (device, tier):
        for _ in range(3):
            sources = [produce(device, 8 * KIB) for _ in range(7)]
            slots = [copy_out(tier, source) for source in sources]
            assert all(isinstance(slot, HostSlot) for slot in slots)
            for slot in slots:
                tier.wait_copied_out([slot])
            del slot, slots
        assert tier.counters.stalls.total_seconds > 0
        assert "disk_written_bytes" not in tier.gauges() and tier.free_bytes is None


def test_a_wait_for_room_in_the_stage_is_counted_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tier counts how long its write was waited for."""
    write = os.pwritev

    def slow(*args: Any) -> int:
        time.sleep(0.1)
        return write(*args)

    with spilling(disk) as (device, tier):
        kept = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(7)]
        copy_out(tier, produce(device, 8 * KIB)).free()  # opens the disk
        monkeypatch.setattr(os, "pwritev", slow)
        before, began = tier.stalls.total_seconds, time.perf_counter()
        slot = copy_out(tier, produce(device, 32 * KIB))  # in four pieces, for three of which the stage is full
        counted = tier.stalls.total_seconds - before
        assert 0 < counted <= time.perf_counter() - began
        for each in (*kept, slot):
            each.free()


def test_what_is_copied_out_together_shares_a_region_while_all_of_it_fits(disk: Path) -> None:
    with spilling(disk) as (device, tier):
        for sizes, regions in (([KIB, 2 * KIB, 3 * KIB], 1), ([30 * KIB, 14 * KIB, 7 * KIB], 2)):
            slots = tier.copy_out_all([produce(device, n) for n in sizes])
            found = {id(slot.place.region) for slot in slots if isinstance(slot, HostSlot) and slot.place is not None}
            assert len(found) == regions and not any(isinstance(slot, CapError) for slot in slots)
        del slots


def test_from_the_stage_while_it_is_there(disk: Path) -> None:
    with spilling(disk, rate=1.0) as (device, tier):
        sources = [produce(device, 8 * KIB) for _ in range(7)]
        kept = [copy_out(tier, each) for each in sources]
        source = produce(device, 8 * KIB)
        slot = copy_out(tier, source)
        assert isinstance(slot, SpillSlot) and not tier.are_copied_out([slot])
        tier.prefetch([slot])
        assert torch.equal(slot.take(), source)
        assert tier.gauges()["disk_read_bytes"] == 0
        for each in (*kept, slot):
            each.free()


def test_a_stage_that_was_wanted_when_its_disk_write_ended_is_freed_when_it_is_no_longer(disk: Path) -> None:
    with spilling(disk, rate=1.0) as (device, tier):
        kept = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(7)]
        slot = copy_out(tier, produce(device, 8 * KIB))
        assert isinstance(slot, SpillSlot)
        (piece,) = slot.pieces
        tier.host.wait_copied(piece.stage)
        with tier._lock:
            tier._pass_on()
        tier._disk.wait_copied_out([piece.on_disk])
        tier.prefetch([slot])
        with tier._lock:
            tier._pass_on()
        assert piece.stage is not None
        slot.discard()
        with tier._lock:
            assert tier._pass_on()
        assert piece.stage is None and not tier._written
        for each in (*kept, slot):
            each.free()


def test_what_is_prefetched_together_is_one_group_of_copies(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device call costs the host microseconds, whether or not something else has gone to disk by then."""
    with spilling(disk, rate=1.0) as (device, tier):
        sources = [produce(device, 8 * KIB) for _ in range(8)]
        slots = [copy_out(tier, source) for source in sources]
        assert [type(slot) for slot in slots] == [HostSlot] * 7 + [SpillSlot]
        groups: list[int] = []
        copy_all = device.copy_all
        monkeypatch.setattr(
            device, "copy_all", lambda pairs, stream: (groups.append(len(pairs)), copy_all(pairs, stream))
        )
        assert tier.prefetch([slots[0], slots[7], *slots[1:7]]) == 0
        assert groups == [8]
        for slot, source in zip(slots, sources, strict=True):
            assert torch.equal(slot.take(), source)
            slot.free()


def test_a_full_device_leaves_the_end_of_a_prefetch(disk: Path) -> None:
    with spilling(disk, device_limit_bytes=40 * KIB) as (device, tier):
        slots = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(7)]
        spilled = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(2)]
        assert {type(slot) for slot in spilled} == {SpillSlot}
        (read,), (unread,) = (slot.pieces for slot in spilled)
        while read.stage or unread.stage:
            with tier._lock:
                tier._pass_on(wait=True)
        assert tier.prefetch([slots[6]]) == 0  # of five that the device has room for
        assert tier.prefetch([*slots[:2], spilled[0], *slots[2:5], slots[6], spilled[1], slots[5]]) == 4
        assert [slot.ahead is not None for slot in slots] == [True] * 4 + [False, False, True]
        assert read.wanted and not unread.wanted
        assert tier.prefetch([spilled[1], slots[5]]) == 1 and unread.wanted
        with pytest.raises(torch.OutOfMemoryError):
            tier.prefetch([slots[5], spilled[1]])
        for slot in (*slots, *spilled):
            slot.free()


def test_a_storage_larger_than_the_stage_goes_to_disk_in_pieces(disk: Path) -> None:
    with spilling(disk) as (device, tier):
        kept = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(7)]
        for nbytes in (8 * KIB + 1, 20_001, 3 * BUDGET):
            for prefetched in (False, True):
                source = produce(device, nbytes)
                device.peak_bytes = 0
                slot = copy_out(tier, source)
                assert device.host_bytes <= BUDGET and not slot.cancel()
                tier.wait_copied_out([slot])
                assert tier.are_copied_out([slot])
                if prefetched:
                    tier.prefetch([slot])
                    slot.discard()
                    tier.prefetch([slot])
                for _ in range(2):
                    taken = slot.take()
                    assert torch.equal(taken, source) and taken.untyped_storage().nbytes() == nbytes
                    assert device.peak_bytes == nbytes
                    del taken
                slot.free()
                slot.free()
                for ask in (slot.take, slot.discard, lambda slot=slot: tier.prefetch([slot])):
                    with pytest.raises(TargetError, match="freed"):
                        ask()
        tier.trim()
        assert tier.used_bytes == 7 * 8 * KIB
        assert tier.counters.out_bytes == device.out_bytes and tier.counters.in_bytes == device.in_bytes
        for each in kept:
            each.free()


def test_the_copies_out_of_all_pieces_are_waited_for(disk: Path) -> None:
    with spilling(disk, rate=1.0, rate_in=1e6) as (device, tier):
        kept = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(7)]
        source = produce(device, 12 * KIB)
        assert torch.equal(copy_out(tier, source).take(), source)
        slot = copy_out(tier, source)
        assert [piece.nbytes for piece in slot.pieces] == [8 * KIB, 4 * KIB]
        assert slot.pieces[0].stage is None and slot.pieces[1].stage is not None
        assert not tier.are_copied_out([slot])
        tier.wait_copied_out([slot])
        assert tier.are_copied_out([slot])
        del slot
        for each in kept:
            each.free()
        assert tier.used_bytes == 0


def test_a_piece_finds_room_in_a_stage_of_any_size(disk: Path) -> None:
    """Places are a multiple of 64 bytes, and this budget and an eighth of it are not."""
    budget = BUDGET + 312
    with spilling(disk, budget=budget) as (device, tier):
        kept, source = copy_out(tier, produce(device, 57_600)), produce(device, 20_000)
        assert isinstance(kept, HostSlot) and budget - 57_600 - budget // 8 < 64
        slot = copy_out(tier, source)
        assert torch.equal(slot.take(), source)
        slot.free()
        kept.free()


def test_a_disk_that_fails_within_a_storage_leaves_it_on_the_device(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces before the one that fails are freed."""
    with spilling(disk) as (device, tier):
        kept = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(7)]
        copy_out(tier, produce(device, 20 * KIB)).free()
        write, count = os.pwritev, itertools.count()

        def third(*args: Any) -> int:
            if next(count) >= 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return write(*args)

        monkeypatch.setattr(os, "pwritev", third)
        (found,) = tier.copy_out_all([produce(device, 48 * KIB)])
        assert isinstance(found, CapError) and "Input/output error" in str(found)
        assert tier.used_bytes == 7 * 8 * KIB and next(count) == 3
        for each in kept:
            each.free()
        assert tier.used_bytes == 0


@pytest.mark.parametrize("reason", ["no directory", "disk full"])
def test_a_disk_that_cannot_take_the_rest_is_a_cap_error(
    reason: str, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk / "missing" if reason == "no directory" else disk
    with spilling(folder) as (device, tier):
        if reason == "disk full":
            monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        slots: list[tuple[Any, torch.Tensor]] = []
        with pytest.raises(CapError, match=r"no more than the host budget of 64\.0 KiB\nhint: raise host_budget"):
            while True:
                source = produce(device, 4 * KIB)
                slots.append((copy_out(tier, source), source))
        assert len(slots) == (14 if reason == "no directory" else 16)  # what cannot go to disk stays staged
        for slot, source in slots:
            tier.wait_copied_out([slot])
            assert torch.equal(slot.take(), source)
            slot.free()
        assert tier.used_bytes == 0
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == (1 if reason[0] == "n" else 2)


def test_a_read_that_fails_is_an_error(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with spilling(disk) as (device, tier):
        sources = [produce(device, 8 * KIB) for _ in range(12)]
        slots = [copy_out(tier, source) for source in sources]
        spilled = next(slot for slot in slots if isinstance(slot, SpillSlot) and slot.pieces[0].stage is None)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing(errno.EIO))
            with pytest.raises(DiskError, match="reading"):
                spilled.take()
        for slot in slots:
            tier.wait_copied_out([slot])
            slot.free()
        for ask in (spilled.take, lambda: tier.prefetch([spilled])):
            with pytest.raises(TargetError, match="freed"):
                ask()


def test_slots_die_in_any_thread_while_others_are_copied_out(disk: Path) -> None:
    with spilling(disk) as (device, tier):
        dying: list[Any] = []
        done = threading.Event()

        def bury() -> None:
            while not done.is_set() or dying:
                with contextlib.suppress(IndexError):
                    dying.pop().free()
                os.sched_yield()

        thread = threading.Thread(target=bury)
        thread.start()
        try:
            for number in range(300):
                source = produce(device, 1 + (number * 977) % (7 * KIB))
                slot = copy_out(tier, source)
                tier.wait_copied_out([slot])
                if number % 3 == 0:
                    assert torch.equal(slot.take(), source)
                dying.append(slot)
        finally:
            done.set()
            thread.join()
        assert tier.host.used_bytes == 0


def test_a_dead_slot_holds_nothing(disk: Path) -> None:
    with spilling(disk) as (device, tier):
        slots = [copy_out(tier, produce(device, 8 * KIB)) for _ in range(12)]
        stages = {slot.pieces[0].stage is None for slot in slots if isinstance(slot, SpillSlot)}
        assert stages == {True, False}  # on disk, and still staged
        slots.clear()
        assert tier.used_bytes == 0
        assert torch.equal(copy_out(tier, source := produce(device, 8 * KIB)).take(), source)


@pytest.mark.parametrize("tokens", [16, 256])
def test_gradients_are_those_of_plain_training_when_most_is_spilled(tokens: int, disk: Path) -> None:
    """With more tokens, most storages are larger than the stage."""
    tiny = build("mlp", size=Size(tokens=tokens))
    weights = list(tiny.model.parameters())

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(tiny.loss()[0], weights))

    expected = step()
    with (
        spilling(disk, budget=40 * KIB) as (_, tier),
        enable_over(tier, tiny.model, policy="offload", min_bytes=0, window=1) as handle,
    ):
        for _ in range(4):
            assert all(map(same_bits, step(), expected))
        assert handle.stats().live_tickets == handle.stats().store_bytes == 0
        assert handle.stats().kept_bytes == 0 and tier.gauges()["disk_written_bytes"] > 40 * KIB


@pytest.mark.parametrize("sizes", [[4 * KIB] * 22, [20 * KIB] * 5])
def test_an_interrupt_anywhere_loses_nothing(
    sizes: list[int], disk: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)  # a destructor was interrupted
    with spilling(disk) as (device, tier):

        def work() -> None:
            offloaded = [(copy_out(tier, source := produce(device, size)), source) for size in sizes]
            for slot, source in reversed(offloaded):
                tier.wait_copied_out([slot])
                tier.prefetch([slot])
                assert torch.equal(slot.take(), source)
                slot.free()
            tier.trim()

        work()
        counting = Fuse(KeyboardInterrupt)
        counting.burn(work)
        assert counting.count > 1000
        for when in random.sample(range(1, counting.count + 1), 60):
            fuse = Fuse(KeyboardInterrupt, when)
            with contextlib.suppress(KeyboardInterrupt):
                fuse.burn(work)
            gc.collect()
            device.compute(1e6)
            device.violations.clear()  # the sources of an interrupted step are dropped while their copies run
            work()
            assert tier.host.used_bytes == 0, fuse.where
            assert device.violations == [] and device.host_bytes <= BUDGET, fuse.where
