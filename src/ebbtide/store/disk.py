"""The disk tier: one thread writes, one thread reads, straight between tensors and a file without a name.

[Note: who may hold the lock]
One lock guards the tier. ``free()`` is called by dying tickets: in any thread, and through the garbage collector even
in a thread that holds the lock already. So it never waits: it leaves the slot in ``_dead`` and settles only if the lock
is free; whoever takes the lock next settles first. For the same reason nothing is dropped under the lock whose death
could run foreign code: sources and targets go to ``_trash``, which is emptied after the lock is released.

[Note: users of a place]
A place returns to the free list when its slot was freed and ``users`` is zero: the write that has not ended counts one,
and so does each read.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from ebbtide.base.errors import ConfigError, DiskError, DiskFullError
from ebbtide.base.units import format_size
from ebbtide.store.aligned import BackingFile, Buffer, Split
from ebbtide.store.counters import TierCounters
from ebbtide.store.extents import Extents, round_up
from ebbtide.store.location import check_directory, default_directory

_LOG = logging.getLogger("ebbtide.store")
_EXTENT_BYTES = 256 << 20
_DEFAULT_IN_FLIGHT_BYTES = 512 << 20
_ALIVE_CHECK_SECONDS = 5.0


class _State(Enum):
    QUEUED = "waits to be written"
    WRITING = "is being written"
    PARKED = "is on disk"
    FAILED = "could not be written"
    DEAD = "was freed or withdrawn"


class _Failure:
    """An error of a worker thread, kept as a recipe: raising one object twice would chain tracebacks for ever."""

    def __init__(self, doing: str, cause: BaseException) -> None:
        self.doing, self.cause = doing, cause.with_traceback(None)

    def error(self) -> DiskError:
        """Return a fresh error, chained to what the system said."""
        full = isinstance(self.cause, OSError) and self.cause.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = DiskFullError if full else DiskError
        made = kind(
            f"{self.doing} failed: {self.cause}",
            expected="a disk that takes and returns every byte",
            hint="make room there, or give another directory with disk_path=..."
            if full
            else "see the system log, or give another directory with disk_path=...",
        )
        made.__cause__ = self.cause
        return made


class _Read:
    """One copy-in: asked for by ``prefetch`` or ``take``, done by the reader."""

    __slots__ = ("ahead", "begun", "done", "failure", "slot", "tensor", "urgent")

    def __init__(self, slot: DiskSlot) -> None:
        self.slot = slot
        self.urgent = self.begun = self.done = self.ahead = False
        self.tensor: torch.Tensor | None = None
        self.failure: _Failure | None = None


class DiskSlot:
    """One storage on disk. See [Note: a slot's life]; made by ``DiskTier.park`` only."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_failure",
        "_head",
        "_nbytes",
        "_place",
        "_read",
        "_source",
        "_split",
        "_state",
        "_tail",
        "_tier",
        "_users",
    )

    def __init__(self, tier: DiskTier, source: torch.Tensor, align_bytes: int) -> None:
        self._tier, self._nbytes = tier, source.numel()
        self._address = source.data_ptr()
        self._split = Split.of(self._address, self._nbytes, align_bytes)
        self._head = ctypes.string_at(self._address, self._split.head_bytes)
        interior_end = self._address + self._nbytes - self._split.tail_bytes
        self._tail = ctypes.string_at(interior_end, self._split.tail_bytes)
        self._source: torch.Tensor | None = source
        self._state = _State.QUEUED
        self._failure: _Failure | None = None
        self._read: _Read | None = None
        self._place = -1
        self._users = 0

    @property
    def nbytes(self) -> int:
        """Bytes parked."""
        return self._nbytes

    @property
    def parked(self) -> bool:
        """Whether the copy-out is done.

        Raises:
            DiskError: It failed, or the tier is closed.
        """
        self._tier._check_usable()
        if self._failure is not None:
            raise self._failure.error()
        return self._state is _State.PARKED

    def wait_parked(self) -> float:
        """Wait for the copy-out; returns the stall in seconds.

        Raises:
            DiskError: It failed, the slot was freed, or the tier is closed.
        """
        return self._tier._wait_parked(self)

    def cancel(self) -> bool:
        """Withdraw a copy-out that has not begun; True if it was withdrawn."""
        return self._tier._cancel(self)

    def prefetch(self) -> None:
        """Ask for the bytes now; the reader begins when the copy-out is done and the window has room.

        Raises:
            DiskError: The slot was freed, or the tier is closed.
        """
        self._tier._prefetch(self)

    def take(self) -> tuple[torch.Tensor, float]:
        """Return the bytes in fresh memory and the stall in seconds.

        Raises:
            DiskError: Either copy failed, the slot was freed, or the tier is closed.
        """
        return self._tier._take(self)

    def free(self) -> None:
        """Give the place back; at any moment, in any thread."""
        self._tier._free(self)


class DiskTier:
    """A tier on disk for tensors in RAM.

    Args:
        path: Directory on a disk; ``None``: the first usable of the temporary directory, ``/var/tmp`` and
            ``~/.cache/ebbtide``.
        budget_bytes: Most bytes the file may take; ``None``: as many as the disk gives.
        in_flight_bytes: Window: ``park`` waits when more than this is queued to be written, and ``prefetch`` reads no
            further ahead than this.

    Raises:
        DiskError: The directory is missing, not writable, or in RAM.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        budget_bytes: int | None = None,
        in_flight_bytes: int = _DEFAULT_IN_FLIGHT_BYTES,
    ) -> None:
        directory = default_directory() if path is None else check_directory(path)
        self._file = BackingFile(directory)
        self._budget_bytes, self._in_flight_limit = budget_bytes, in_flight_bytes
        self._pid = os.getpid()
        self.counters = TierCounters()
        self._extents = Extents()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writes: deque[DiskSlot] = deque()
        self._reads: deque[_Read] = deque()
        self._dead: deque[DiskSlot] = deque()
        self._trash: deque[Any] = deque()
        self._writing_bytes = 0
        self._ahead_bytes = 0
        self._closed = False
        self._broken: _Failure | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"ebbtide-disk-{name}", daemon=True)
            for name, loop in (("writer", self._write_loop), ("reader", self._read_loop))
        ]
        for thread in self._threads:
            thread.start()
        _LOG.debug("disk tier in %s, %s I/O", directory, "direct" if self._file.direct else "buffered")

    @property
    def name(self) -> str:
        """``"disk"``."""
        return "disk"

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return self._file.direct

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in RAM, which is what this tier spares."""
        return tensor.device.type == "cpu"

    @property
    def used_bytes(self) -> int:
        """Bytes of places in use now."""
        if self._closed or os.getpid() != self._pid:
            return 0
        with self._lock:
            self._settle()
            return self._extents.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that could still be parked: free places, and what the disk and the budget let the file grow by."""
        self._check_usable()
        with self._lock:
            self._settle()
            return self._extents.free_bytes + self._growth_bytes()

    def park(self, source: torch.Tensor) -> DiskSlot:
        """Begin to write ``source`` out.

        Args:
            source: One-dimensional contiguous ``uint8`` view in RAM; not empty.

        Raises:
            ConfigError: The source is not such a tensor.
            DiskFullError: Budget or disk cannot hold it.
            DiskError: The tier is closed or broken, or used in a forked child.
        """
        self._check_usable()
        if source.dtype is not torch.uint8 or source.dim() != 1 or not source.numel() or not source.is_contiguous():
            raise ConfigError(
                f"source is {source.dtype} of shape {tuple(source.shape)}",
                expected="a contiguous, one-dimensional, not empty torch.uint8 tensor",
            )
        slot = DiskSlot(self, source, self._file.align_bytes)
        need = slot._split.interior_bytes
        if need == 0:
            slot._source, slot._state = None, _State.PARKED
            return slot
        with self._lock:
            self._settle()
            self._wait_until(lambda: self._writing_bytes == 0 or self._writing_bytes + need <= self._in_flight_limit)
            slot._place = self._reserve(need)
            slot._users = 1
            self._writing_bytes += need
            self._writes.append(slot)
            self._changed.notify_all()
        self._trash.clear()
        return slot

    def trim(self) -> None:
        """Do what dying tickets left to be done; the tier keeps no spare buffers."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            self._settle()
        self._trash.clear()

    def close(self) -> None:
        """Withdraw what has not begun, join the threads, and give the disk back. Harmless when repeated."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._trash.extend((*self._writes, *self._reads))
        self._writes.clear()
        self._reads.clear()
        for slot in (x for x in self._trash if isinstance(x, DiskSlot)):
            slot._source = None
        self._trash.clear()
        self._file.close()

    # ---- what slots ask (each takes the lock itself)

    def _wait_parked(self, slot: DiskSlot) -> float:
        self._check_usable()
        if slot._state is _State.PARKED:
            return 0.0
        started = time.perf_counter()
        with self._lock:
            self._settle()
            self._hasten(slot)
            self._wait_until(lambda: slot._state not in (_State.QUEUED, _State.WRITING))
            stall = time.perf_counter() - started
            self.counters.stall_seconds += stall
        self._trash.clear()
        self._check_slot(slot)
        return stall

    def _cancel(self, slot: DiskSlot) -> bool:
        self._check_usable()
        with self._lock:
            self._settle()
            reads = 0 if slot._read is None else 1
            withdrawn = slot._state is _State.QUEUED and slot._users == 1 + reads
            if withdrawn:
                self._bury(slot)
        self._trash.clear()
        return withdrawn

    def _prefetch(self, slot: DiskSlot) -> None:
        self._check_usable()
        with self._lock:
            self._settle()
            if slot._state is _State.DEAD:
                self._check_slot(slot)
            if slot._read is None and slot._state is not _State.FAILED:
                slot._read = self._ask(slot)
        self._trash.clear()

    def _take(self, slot: DiskSlot) -> tuple[torch.Tensor, float]:
        self._check_usable()
        self._check_slot(slot)
        started = time.perf_counter()
        with self._lock:
            self._settle()
            read, slot._read = slot._read or self._ask(slot), None
            read.urgent = True
            self._hasten(slot)
            self._changed.notify_all()
            try:
                self._wait_until(lambda: read.done)
            except BaseException:
                # An interrupt, or a dead worker: leave the read where free() and the next take() find it.
                if slot._read is None:
                    slot._read = read
                raise
            self._claim(read)
            stall = time.perf_counter() - started
            self.counters.stall_seconds += stall
        self._trash.clear()
        if read.failure is not None:
            raise read.failure.error()
        if read.tensor is None:
            self._check_usable()
            raise DiskError("a slot was freed while it was read", hint="keep the ticket until its bytes are back")
        return read.tensor, stall

    def _free(self, slot: DiskSlot) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._dead.append(slot)  # see [Note: who may hold the lock]
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
            self._trash.clear()

    # ---- checks and waits

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DiskError(
                f"a disk tier of process {self._pid} is used in process {os.getpid()}, its forked child",
                expected="one tier a process: threads and file positions do not survive a fork",
                hint="open the tier after the fork, or start workers with the 'spawn' method",
            )
        if self._closed:
            raise DiskError("the disk tier is closed", hint="keep it open until the last backward is done")
        if self._broken is not None:
            raise self._broken.error()

    def _check_slot(self, slot: DiskSlot) -> None:
        if slot._failure is not None:
            raise slot._failure.error()
        if slot._state is _State.DEAD:
            raise DiskError("a slot is used after it was freed or withdrawn", hint="this is a bug: please report it")

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait, lock held, until ``happened()``; an interrupt leaves everything as it is."""
        while not happened():
            self._check_usable()
            if not self._changed.wait(_ALIVE_CHECK_SECONDS) and not all(x.is_alive() for x in self._threads):
                raise DiskError("a worker thread of the disk tier is gone", hint="open a new tier in this process")
            self._settle()

    # ---- bookkeeping (lock held)

    def _reserve(self, need: int) -> int:
        place = self._extents.reserve(need)
        if place is not None:
            return place
        least = round_up(need) - self._extents.tail_bytes
        growth = self._growth_bytes()
        cause: OSError | None = None
        for nbytes in (min(max(least, _EXTENT_BYTES), growth // 4096 * 4096), least):
            if not least <= nbytes <= growth:
                continue
            try:
                self._file.grow(self._extents.size_bytes, nbytes)
            except OSError as error:
                cause = error
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise _Failure(f"growing the file in {self._file.directory}", error).error() from error
                continue
            self._extents.grow(nbytes)
            place = self._extents.reserve(need)
            if place is not None:
                return place
        free = self._extents.free_bytes + growth
        budget = "" if self._budget_bytes is None else f", budget {format_size(self._budget_bytes)}"
        raise DiskFullError(
            f"{format_size(need)} needed on disk, {format_size(free)} free in {self._file.directory}{budget}",
            expected="room for every offloaded byte",
            hint="make room there, give a larger disk with disk_path=..., raise the budget, or offload less",
        ) from cause

    def _growth_bytes(self) -> int:
        disk = self._file.disk_free_bytes()
        return disk if self._budget_bytes is None else min(disk, max(0, self._budget_bytes - self._extents.size_bytes))

    def _ask(self, slot: DiskSlot) -> _Read:
        read = _Read(slot)
        slot._users += 1
        self._reads.append(read)
        self._changed.notify_all()
        return read

    def _hasten(self, slot: DiskSlot) -> None:
        """Somebody waits for this slot: write it next."""
        if slot._state is _State.QUEUED and self._writes and self._writes[0] is not slot:
            self._writes.remove(slot)
            self._writes.appendleft(slot)

    def _claim(self, read: _Read) -> None:
        """The bytes read ahead are the caller's now: the window has room again."""
        if read.ahead:
            read.ahead = False
            self._ahead_bytes -= read.slot._nbytes
            self._changed.notify_all()

    def _drop_read(self, slot: DiskSlot) -> None:
        read, slot._read = slot._read, None
        if read is None:
            return
        if not read.begun:
            self._reads.remove(read)
            read.begun = read.done = True
            slot._users -= 1
        self._claim(read)
        self._trash.append(read)

    def _settle(self) -> None:
        while self._dead:
            slot = self._dead.popleft()
            if slot._state is not _State.DEAD:
                self._bury(slot)

    def _bury(self, slot: DiskSlot) -> None:
        if slot._state is _State.QUEUED:
            self._writes.remove(slot)
            self._written(slot)
        slot._state = _State.DEAD
        self._drop_read(slot)
        self._release_if_unused(slot)
        self._changed.notify_all()

    def _written(self, slot: DiskSlot) -> None:
        self._writing_bytes -= slot._split.interior_bytes
        slot._users -= 1
        self._trash.append(slot._source)
        slot._source = None

    def _release_if_unused(self, slot: DiskSlot) -> None:
        if slot._state is _State.DEAD and slot._users == 0 and slot._place >= 0:
            place, slot._place = slot._place, -1
            self._extents.release(place, slot._split.interior_bytes)

    # ---- the two threads

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # whatever it was, those who wait must hear of it
            with self._lock:
                self._broken = _Failure("a worker thread of the disk tier", error)
                self._changed.notify_all()

    def _write_loop(self) -> None:
        while True:
            with self._lock:
                self._settle()
                while not self._writes and not self._closed:
                    self._changed.wait()
                    self._settle()
                if self._closed:
                    return
                slot = self._writes.popleft()
                slot._state = _State.WRITING
            self._trash.clear()
            self._write(slot)
            del slot

    def _write(self, slot: DiskSlot) -> None:
        split, failure = slot._split, None
        started = time.perf_counter()
        try:
            start = slot._address + split.head_bytes
            self._file.write(start, split.interior_bytes, slot._place, lambda: slot._state is _State.DEAD)
        except BaseException as error:
            failure = _Failure(f"writing {format_size(slot._nbytes)} to {self._file.directory}", error)
        with self._lock:
            self.counters.out_seconds += time.perf_counter() - started
            if failure is None:
                self.counters.out_bytes += slot._nbytes
            slot._failure = failure
            if slot._state is _State.WRITING:
                slot._state = _State.PARKED if failure is None else _State.FAILED
            self._written(slot)
            self._release_if_unused(slot)
            self._changed.notify_all()
        self._trash.clear()

    def _read_loop(self) -> None:
        while True:
            with self._lock:
                self._settle()
                while (read := self._next_read()) is None and not self._closed:
                    self._changed.wait()
                    self._settle()
                if read is None or self._closed:
                    return
            self._trash.clear()
            self._read(read)
            del read

    def _next_read(self) -> _Read | None:
        chosen: _Read | None = None
        for read in self._reads:
            if read.slot._state in (_State.QUEUED, _State.WRITING):
                continue
            if read.urgent:
                chosen = read
                break
            room = self._ahead_bytes == 0 or self._ahead_bytes + read.slot._nbytes <= self._in_flight_limit
            if chosen is None and room:
                chosen = read
        if chosen is not None:
            self._reads.remove(chosen)
            chosen.begun = True
            if not chosen.urgent:
                chosen.ahead = True
                self._ahead_bytes += chosen.slot._nbytes
        return chosen

    def _read(self, read: _Read) -> None:
        slot, tensor = read.slot, None
        split, failure = slot._split, slot._failure
        started = time.perf_counter()
        if failure is None and slot._state is not _State.DEAD:
            try:
                buffer = Buffer(slot._nbytes, slot._address % 4096)
                interior = buffer.address + split.head_bytes
                ctypes.memmove(buffer.address, slot._head, split.head_bytes)
                ctypes.memmove(interior + split.interior_bytes, slot._tail, split.tail_bytes)
                if split.interior_bytes:
                    self._file.read(interior, split.interior_bytes, slot._place)
                tensor = buffer.tensor()
            except BaseException as error:
                failure = _Failure(f"reading {format_size(slot._nbytes)} from {self._file.directory}", error)
        with self._lock:
            if tensor is not None:
                self.counters.in_bytes += slot._nbytes
                self.counters.in_seconds += time.perf_counter() - started
            read.tensor, read.failure, read.done = tensor, failure, True
            slot._users -= 1
            self._release_if_unused(slot)
            self._changed.notify_all()
        self._trash.clear()
