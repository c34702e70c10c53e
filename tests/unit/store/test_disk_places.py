"""Owners of a place on disk: the live slot, then briefly a thread that still reads or writes it, then none."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.base.errors import DiskError, DiskFullError
from ebbtide.store.disk import DiskSlot, DiskTier
from ebbtide.store.extents import round_up
from ebbtide.store.protocol import copy_out_one
from tests.helpers.handles import training
from tests.helpers.interrupts import Fuse
from tests.helpers.slots import copy_out, small_disk
from tests.unit.store.conftest import Gate, noise

MIB = 1 << 20
UNIT = 1 << 16


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch the collector off, so that leftovers stay; reports of interrupted destructors keep no frames."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_step_that_ends_before_its_writes_uses_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a write still runs when the backward that used its source is over."""
    with training("offload", "disk", window=None) as trainee:
        gate, copy_out_all = Gate(os.pwritev), DiskTier.copy_out_all

        def copy_out_and_begin(tier: DiskTier, sources: Sequence[torch.Tensor], **options: Any) -> list[Any]:
            slots = copy_out_all(tier, sources, **options)
            assert gate.came.wait(60)  # a write that has not begun would be cancelled
            return slots

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", gate)
            patch.setattr(DiskTier, "copy_out_all", copy_out_and_begin)
            trainee.step()
            stats = trainee.handle.stats()
            gate.open()
        assert stats.live_tickets == stats.store_bytes == stats.store["disk_used_bytes"] == 0
        assert stats.store["disk_draining_bytes"] > 0  # the gate has held the write of a dead ticket
        trainee.assert_recovers()


def test_what_a_dead_slot_writes_is_never_another_slots_place(tier: DiskTier, write_gate: Gate) -> None:
    dying, source = copy_out(tier, noise(MIB)), noise(MIB)
    assert write_gate.came.wait(60)
    for _ in range(2):
        dying.free()
    assert tier.used_bytes == tier.gauges()["disk_used_bytes"] == 0
    assert tier.gauges()["disk_draining_bytes"] == round_up(dying._parcel.interior_bytes)
    slot = copy_out(tier, source)
    assert 0 < slot._parcel.interior_bytes <= tier.used_bytes
    assert slot._parcel.place >= dying._parcel.interior_bytes  # after the one that is still being written
    write_gate.open()
    assert torch.equal(slot.take(), source)  # one writer: the first write has ended
    assert tier.gauges()["disk_draining_bytes"] == 0
    with pytest.raises(DiskError, match="freed"):
        dying.take()


def test_what_is_read_for_a_dead_slot_is_never_another_slots_place(tier: DiskTier, read_gate: Gate) -> None:
    dying, source = copy_out(tier, noise(MIB)), noise(MIB)
    tier.prefetch([dying])
    assert read_gate.came.wait(60)
    place = dying._parcel.place
    dying.free()
    assert tier.used_bytes == 0 < tier.gauges()["disk_draining_bytes"]
    slot = copy_out(tier, source)
    assert slot._parcel.place != place
    read_gate.open()
    assert torch.equal(slot.take(), source)
    assert tier.gauges()["disk_draining_bytes"] == 0
    again = copy_out(tier, noise(MIB))
    assert again._parcel.place == place  # now it is free


def test_a_full_disk_waits_for_a_place_whose_write_ends(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, gate = small_disk(disk, MIB), Gate(os.pwritev)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", gate)
        dying, source = copy_out(tier, noise(MIB)), noise(MIB)
        assert gate.came.wait(60)
        with pytest.raises(DiskFullError):
            copy_out(tier, source)  # it has an owner
        dying.free()
        assert tier.free_bytes == MIB  # places in use by a thread are waited for
        waits, wait_until = threading.Event(), tier._work._wait_until

        def waiting(*args: object) -> None:
            waits.set()
            wait_until(*args)  # type: ignore[arg-type]

        patch.setattr(tier._work, "_wait_until", waiting)
        opening = threading.Thread(target=lambda: waits.wait(60) and gate.open())
        opening.start()
        try:
            slot = copy_out(tier, source)
        finally:
            gate.open()
            waits.set()
            opening.join()
    assert torch.equal(slot.take(), source)
    tier.close()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("nbytes", [MIB, 100])  # the smaller ones are not on disk
def test_a_dead_slot_holds_nothing(tier: DiskTier, write_gate: Gate, nbytes: int, prefetched: bool) -> None:
    """Also one that dies while its bytes are written or read."""
    writing = copy_out(tier, noise(MIB))
    assert write_gate.came.wait(60)
    slots = [writing, copy_out(tier, noise(nbytes))]
    if prefetched:
        tier.prefetch(slots)
    dead = [weakref.ref(slot._parcel) for slot in slots]
    del slots, writing
    assert tier.used_bytes == 0
    write_gate.open()
    copy_out_one(tier, noise(MIB))
    assert tier.used_bytes == tier.gauges()["disk_draining_bytes"] == 0
    assert [parcel() for parcel in dead] == [None, None]
    assert tier._work._ahead_bytes == 0


def interrupted(work: Callable[[], object], *also: str) -> Iterator[tuple[list[BaseException], str]]:
    """Interrupt ``work`` at each of its points in turn; yield the exception, to be dropped, and its point."""
    for when in range(1, 2000):
        fuse, held = Fuse(KeyboardInterrupt, when, also=also), list[BaseException]()
        try:
            fuse.burn(work)
        except KeyboardInterrupt as error:
            held.append(error)
        if not fuse.where:
            return
        yield held, fuse.where
        held.clear()
    raise AssertionError("the work has no end")


@pytest.mark.usefixtures("no_collector")
def test_interrupted_copies_out_of_several_free_all_their_places(tier: DiskTier) -> None:
    sources, count = [noise(UNIT) for _ in range(3)], 0
    for held, where in interrupted(lambda: tier.copy_out_all(sources)):
        count += 1
        assert tier.used_bytes <= 3 * UNIT, where
        held.clear()
        slots = tier.copy_out_all(sources)
        assert len({slot._parcel.place for slot in slots}) == 3, where
        assert [torch.equal(slot.take(), source) for slot, source in zip(slots, sources, strict=True)] == [True] * 3, (
            where
        )
        slots.clear()
        assert tier.used_bytes == 0, where
    assert count > 20


@pytest.mark.usefixtures("no_collector")
def test_an_interrupted_copy_out_never_frees_a_place_of_another(tier: DiskTier) -> None:
    """A shell may keep the exception for long, and with it the slot that was never returned."""
    source, count = noise(UNIT), 0
    for held, where in interrupted(lambda: copy_out(tier, source)):
        count += 1
        assert tier.used_bytes <= UNIT, where
        content = noise(UNIT)
        slots = [copy_out(tier, content)]
        held.clear()
        slots += [copy_out(tier, noise(UNIT)) for _ in range(3)]
        assert len({slot._parcel.place for slot in slots}) == 4, where
        assert torch.equal(slots[0].take(), content), where
        slots.clear()
        assert tier.used_bytes == 0, where
    assert count > 20


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("prefetched", [False, True])
def test_a_place_is_free_wherever_its_release_was_interrupted(tier: DiskTier, prefetched: bool) -> None:
    kept: list[DiskSlot] = []  # a place must not wait for its slot to die

    def work() -> None:
        kept.append(copy_out(tier, noise(UNIT)))
        if prefetched:
            tier.wait_copied_out([kept[-1]])
            tier.prefetch([kept[-1]])
        kept[-1].free()
        tier.trim()

    for held, where in interrupted(work):
        held.clear()
        for slot in kept:
            slot.free()
        assert tier.used_bytes == 0, where
        copy_out(tier, noise(UNIT)).take()
        assert tier.used_bytes == tier._work._out_bytes == tier._work._ahead_bytes == 0, where
        assert tier.gauges()["disk_draining_bytes"] == 0, where
    assert len(kept) > 50


@pytest.mark.usefixtures("no_collector")
def test_a_place_is_free_wherever_its_cancellation_was_interrupted(tier: DiskTier, write_gate: Gate) -> None:
    begun, kept = copy_out(tier, noise(UNIT)), list[DiskSlot]()
    assert write_gate.came.wait(60)
    used = tier.used_bytes

    def work() -> None:
        kept.append(copy_out(tier, noise(UNIT)))
        assert kept[-1].cancel()

    for held, where in interrupted(work):
        held.clear()
        for slot in kept:
            slot.free()
        assert tier.used_bytes == used and tier.gauges()["disk_draining_bytes"] == 0, where
    assert len(kept) > 20 and not tier.are_copied_out([begun])


@pytest.mark.usefixtures("no_collector")
def test_the_lock_is_left_as_it_should_be_wherever_a_wait_was_interrupted(tier: DiskTier) -> None:
    """A lock released twice may be taken away from the thread that holds it by then."""
    source = noise(UNIT)
    slot, struck = copy_out(tier, source), set[str]()
    tier.wait_copied_out([slot])
    for held, where in interrupted(slot.take, threading.__file__):
        held.clear()
        assert torch.equal(slot.take(), source), where
        struck.add(where.split(":")[0])
    assert struck >= {"threading.py", "diskwork.py"}
    slot.free()
    assert tier.used_bytes == 0


@pytest.mark.usefixtures("no_collector")
def test_a_read_whose_asking_was_interrupted_is_done_once(tier: DiskTier, read_gate: Gate) -> None:
    blocking, slot, count = copy_out(tier, noise(UNIT)), copy_out(tier, noise(UNIT)), 0
    tier.wait_copied_out([slot])
    tier.prefetch([blocking])
    assert read_gate.came.wait(60)  # the reader is busy: no read of the other slot begins
    for held, where in interrupted(lambda: tier.prefetch([slot])):
        count += 1
        held.clear()
        tier.prefetch([slot])
        assert [read.parcel for read in tier._work._reads] == [slot._parcel], where
        slot.discard()
    assert count > 5
