"""The two threads of the disk tier, and their queues.

[Note: who may hold the lock] One lock guards the queues. Slots die in any thread, and through the garbage collector
even in one that holds the lock. So neither their death nor ``free()`` takes it: parcels are left in ``claims``, for the
next holder; see [Note: death and interrupts]. (Trying the lock does not help: an interrupt right after would leave it
locked.) Nor is an object dropped under the lock whose destructor could run foreign code: sources and targets go to
``_trash``, which is emptied after the lock is released.

[Note: who has a place] A live slot has its place. When the slot dies, the place is *draining* while a thread writes or
reads there (``_writing``, ``_reading``): it is unused but cannot be reassigned. Then it is free. No counter tracks
this, because an interrupt could corrupt it: ``_audit`` counts them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.base.errors import DiskError, DiskFullError
from ebbtide.base.units import format_size
from ebbtide.store.aligned import BackingFile
from ebbtide.store.buffers import BufferPool
from ebbtide.store.claims import Claims
from ebbtide.store.counters import TierCounters
from ebbtide.store.faults import Fault, closed_error, ended_error, forked_error, freed_error
from ebbtide.store.room import Parcel, ParcelState, Read, Room, remove_if_present
from ebbtide.store.waiting import wait_held

_WINDOW_BYTES = 512 << 20
"""Most bytes queued to be written before ``copy_out`` waits, and most bytes read ahead."""

_WAKE_SECONDS = 5.0
"""How often a waiting thread checks whether the other side is still alive."""


class DiskWork:
    """Queues, threads and their lock.

    Args:
        file: The backing file; closed by the last thread that ends.
        room: The places in it.
        counters: Receives the counts.
    """

    def __init__(self, file: BackingFile, room: Room, counters: TierCounters) -> None:
        self._file, self._room, self._counters = file, room, counters
        self.pool = BufferPool()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Three conditions, so that the end of a write wakes its waiters and not an idle reader.
        self._to_write = threading.Condition(self._lock)
        self._to_read = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._writes: deque[Parcel] = deque()
        self._reads: deque[Read] = deque()
        self.claims: Claims[Parcel] = Claims()  # of slots
        self._trash: deque[Any] = deque()
        self._writing: Parcel | None = None
        self._reading: Parcel | None = None
        self._out_bytes = self._ahead_bytes = 0
        self._closed, self._running = False, 2
        self._broken: Fault | None = None
        self._in_use: Callable[[], object] | None = None  # see ``close_unused``
        self._threads = [
            threading.Thread(target=self._run, args=(name, loop), name=f"ebbtide-disk-{name}", daemon=True)
            for name, loop in (("writer", self._write_loop), ("reader", self._read_loop))
        ]

    def start(self) -> None:
        """Start the threads. Raises RuntimeError if one cannot be started."""
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        """Whether this process may use the tier."""
        return not self._closed and os.getpid() == self._pid

    def check_usable(self) -> None:
        """Raise a DiskError if the process has forked, the tier was closed, or a thread has died."""
        if os.getpid() != self._pid:
            raise forked_error(self._pid)
        if self._closed:
            raise closed_error("disk", DiskError)
        if self._broken is not None:
            raise self._broken.error()

    def check(self, parcel: Parcel) -> None:
        """Raise a DiskError if the parcel was not written, or was freed, or the tier cannot be used."""
        self.check_usable()
        if parcel.fault is not None:
            raise parcel.fault.error()
        if parcel.state is ParcelState.DEAD:
            raise freed_error(DiskError)

    def measure(self) -> tuple[int, int, int]:
        """Return the bytes of live slots' places, of draining places, and those that could still be offloaded."""
        with self._lock:
            draining = self._audit()
            found = self._room.used_bytes - draining, draining, self._room.free_bytes + draining
        self._trash.clear()
        return found

    def copy_out(self, parcels: Sequence[Parcel]) -> None:
        """Queue writes; waits while the window is full, or the disk is full and a place is draining.

        Raises:
            DiskFullError: The disk cannot hold them.
            DiskError: The tier cannot be used.
        """
        with self._lock:
            self._release_dead()
            for parcel in parcels:
                need = parcel.interior_bytes
                self._wait_until(lambda need=need: self._out_bytes <= 0 or self._out_bytes + need <= _WINDOW_BYTES)
                with contextlib.suppress(DiskFullError):
                    self._room.place(parcel)
                if parcel.place < 0:  # lost or draining places may make the disk look full
                    self._wait_until(lambda: not self._audit())
                    self._room.place(parcel)
                if not self._writes:  # else the writer has been woken, or has not yet come to rest
                    self._to_write.notify()
                self._writes.append(parcel)
                self._out_bytes += need  # last: too low a count widens the window, too high would wait forever
        self._trash.clear()

    def wait_copied_out(self, parcel: Parcel) -> None:
        """Wait for the end of the write; raises as ``check`` does."""
        self.check_usable()
        with self._lock:
            self._release_dead()
            self._hasten(parcel)
            self._wait_until(lambda: parcel.state not in (ParcelState.QUEUED, ParcelState.WRITING))
        self._trash.clear()
        self.check(parcel)

    def cancel(self, parcel: Parcel) -> bool:
        """Cancel a write that has not begun and that no ``take`` waits for; True if it was cancelled."""
        self.check_usable()
        with self._lock:
            self._release_dead()
            taken = any(read.parcel is parcel and read is not parcel.read for read in self._reads)
            if cancelled := parcel.state is ParcelState.QUEUED and not taken:
                self._release_place(parcel)
        self._trash.clear()
        return cancelled

    def prefetch(self, parcels: Sequence[Parcel]) -> None:
        """Queue a read of each, unless one is queued; raises as ``check`` does."""
        for parcel in parcels:
            self.check(parcel)
        with self._lock:
            self._release_dead()
            for parcel in parcels:
                if parcel.read is None and parcel.state not in (ParcelState.FAILED, ParcelState.DEAD):
                    self._ask(parcel)
            self._to_read.notify()
        self._trash.clear()

    def discard(self, parcel: Parcel) -> None:
        """Discard an unused read; also where a thread has died, so that a handle can be closed."""
        if not self.usable:
            return
        with self._lock:
            self._release_dead()
            self._drop_read(parcel)
        self._trash.clear()

    def take(self, parcel: Parcel) -> torch.Tensor:
        """Wait for a read, and return the tensor; raises as ``check`` does, and if the read failed."""
        self.check(parcel)
        with self._lock:
            self._release_dead()
            read, parcel.read = parcel.read or self._ask(parcel), None
            try:
                read.urgent = True
                self._hasten(parcel)
                self._to_read.notify()
                self._wait_until(lambda: read.done)
            except BaseException:
                # An interrupt or a dead worker: leave the read for free() and the next take().
                parcel.read = parcel.read or read
                raise
            self._claim(read)
        self._trash.clear()
        if read.fault is not None:
            raise read.fault.error()
        if read.tensor is None:
            raise freed_error(DiskError, when=" during a read")
        return read.tensor

    def close_unused(self, in_use: Callable[[], object]) -> None:
        """Close once ``in_use()`` is false, which the threads look at every few seconds."""
        self._in_use = in_use

    def close(self, *, join: bool) -> None:
        """End the threads after their current work, and ``join`` them, except in a finalizer, which could deadlock."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        if self._lock.acquire(blocking=join):
            try:
                self._wake_all()
            finally:
                self._lock.release()
        for thread in filter(threading.Thread.is_alive, self._threads if join else ()):
            thread.join()

    # The lock is held from here to the threads.
    def _wait_until(self, happened: Callable[[], bool]) -> None:
        if happened():
            return
        started = time.perf_counter()
        while not happened():
            self.check_usable()
            if not wait_held(self._done, _WAKE_SECONDS) and not all(x.is_alive() for x in self._threads):
                raise ended_error()
            self._release_dead()
        self._counters.stalls.add_since(started)

    def _ask(self, parcel: Parcel) -> Read:
        read = parcel.read = Read(parcel)  # first: after an interrupt, the next caller continues
        self._reads.append(read)
        return read

    def _hasten(self, parcel: Parcel) -> None:
        if parcel.state is ParcelState.QUEUED:
            self._writes.appendleft(parcel)  # the old position is skipped: an interrupt could lose a moved one

    def _wake_all(self) -> None:
        for condition in (self._to_write, self._to_read, self._done):
            condition.notify_all()

    def _claim(self, read: Read) -> None:
        if read.ahead:
            read.ahead = False
            self._ahead_bytes -= read.parcel.nbytes
            self._to_read.notify()

    def _release_dead(self) -> None:
        self.claims.release_dead(self._release_place)
        if self._in_use is not None and not self._in_use():
            self._closed = True
            self._wake_all()

    def _audit(self) -> int:
        """Repair the state after an interrupt, and return the draining bytes. See [Note: who has a place]."""
        self._release_dead()
        draining = self._room.recount(self._writing, self._reading)
        waiting = {parcel for parcel in self._writes if parcel.state is ParcelState.QUEUED}
        self._out_bytes = sum(parcel.interior_bytes for parcel in {*waiting, self._writing} if parcel)
        self._ahead_bytes = sum(p.nbytes for p in self._room.parcels if p.read is not None and p.read.ahead)
        return draining

    def _release_place(self, parcel: Parcel) -> None:
        """Forget a parcel; may be repeated, as after an interrupt."""
        self._trash.append(parcel)
        if parcel.state is ParcelState.QUEUED:
            remove_if_present(self._writes, parcel)
            self._written(parcel)
        parcel.state = ParcelState.DEAD
        self._drop_read(parcel)
        self._release_if_unused(parcel)
        self._to_read.notify()
        self._done.notify_all()

    def _drop_read(self, parcel: Parcel) -> None:
        read = parcel.read
        if read is not None:
            self._trash.append(read)
            if not read.begun:
                remove_if_present(self._reads, read)
                read.begun = read.done = True
            self._claim(read)
            parcel.read = None

    def _written(self, parcel: Parcel) -> None:
        self._out_bytes -= parcel.interior_bytes
        self._trash.append(parcel.source)
        parcel.source = None

    def _release_if_unused(self, parcel: Parcel) -> None:
        if parcel.state is ParcelState.DEAD and parcel is not self._writing and parcel is not self._reading:
            self._room.release(parcel)

    # The two threads.

    def _run(self, name: str, loop: Callable[[], None]) -> None:
        broken: Fault | None = None
        try:
            loop()
        except BaseException as error:  # waiters must be notified of any error
            broken = Fault(f"the {name} thread of the disk tier", error, hint="close this handle and open a new one")
        with self._lock:
            self._broken = self._broken or broken
            self._running -= 1
            if self._running == 0:
                self.claims.clear()
                while self._writes:
                    self._written(self._writes.popleft())
                self._reads.clear()
                self._room.close()
                self.pool.trim(all_chunks=True)
            self._wake_all()
        self._trash.clear()

    def _write_loop(self) -> None:
        while True:
            with self._lock:
                self._release_dead()
                while not self._writes and not self._closed:
                    self._to_write.wait(_WAKE_SECONDS)
                    self._release_dead()
                if self._closed:
                    return
                parcel = self._writes.popleft()
                if parcel.state is not ParcelState.QUEUED:
                    continue
                parcel.state, self._writing = ParcelState.WRITING, parcel
            self._trash.clear()
            self._write(parcel)
            del parcel

    def _write(self, parcel: Parcel) -> None:
        need, fault, written, started = parcel.interior_bytes, None, 0, time.perf_counter()
        try:
            start = parcel.address + len(parcel.before)
            written = self._file.write(start, need, parcel.place, lambda: parcel.state is ParcelState.DEAD)
        except BaseException as error:
            fault = Fault(f"writing {format_size(parcel.nbytes)} to {self._file.directory}", error)
        parcel.source = None  # before it is marked as written: waiters must find the memory free
        with self._lock:
            moved = parcel.nbytes if written == need and not fault else written
            self._counters.out_bytes += moved
            self._counters.copied_out(moved, time.perf_counter() - started)
            parcel.fault = fault
            self._written(parcel)  # first: if this fails, the parcel is never marked as written
            if parcel.state is ParcelState.WRITING:
                parcel.state = ParcelState.FAILED if fault else ParcelState.WRITTEN
            self._writing = None
            self._release_if_unused(parcel)
            if self._reads:
                self._to_read.notify()
            self._done.notify_all()
        self._trash.clear()

    def _read_loop(self) -> None:
        while True:
            with self._lock:
                self._release_dead()
                while (read := self._next_read()) is None and not self._closed:
                    self._to_read.wait(_WAKE_SECONDS)
                    self._release_dead()
                if read is None or self._closed:
                    return
            self._trash.clear()
            self._fetch(read)
            del read

    def _next_read(self) -> Read | None:
        """Take the first read that compute waits for, else the first for which the window has room."""
        ready = [x for x in self._reads if x.parcel.state not in (ParcelState.QUEUED, ParcelState.WRITING)]
        room_bytes = _WINDOW_BYTES - self._ahead_bytes if self._ahead_bytes > 0 else sys.maxsize
        fitting = (x for x in ready if x.parcel.nbytes <= room_bytes)
        chosen = next((x for x in ready if x.urgent), None) or next(fitting, None)
        if chosen is not None:
            self._reads.remove(chosen)
            chosen.begun, self._reading = True, chosen.parcel
            if not chosen.urgent:
                chosen.ahead = True
                self._ahead_bytes += chosen.parcel.nbytes
        return chosen

    def _fetch(self, read: Read) -> None:
        parcel, tensor, fault = read.parcel, None, read.parcel.fault
        started = time.perf_counter()
        if fault is None and parcel.state is not ParcelState.DEAD:
            try:
                tensor = parcel.copy_in(self._file, self.pool)
            except BaseException as error:
                fault = Fault(f"reading {format_size(parcel.nbytes)} from {self._file.directory}", error)
        with self._lock:
            if tensor is not None:
                self._counters.in_bytes += parcel.nbytes
                self._counters.copied_in(parcel.nbytes, time.perf_counter() - started)
            read.tensor, read.fault, read.done, self._reading = tensor, fault, True, None
            self._release_if_unused(parcel)
            self._done.notify_all()
        self._trash.clear()
