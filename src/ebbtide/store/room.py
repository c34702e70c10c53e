"""Space on disk: a growing unlinked file, the places in it, and the bytes that have one or are on their way."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from enum import Enum
from typing import Any

import torch

from ebbtide.base.errors import DiskFullError
from ebbtide.base.files import FULL_ERRNOS
from ebbtide.base.units import format_size
from ebbtide.store.aligned import BackingFile, split
from ebbtide.store.buffers import Buffer, BufferPool
from ebbtide.store.extents import PLACE_ALIGN_BYTES, Extents, round_up
from ebbtide.store.faults import Fault, limit_of

_EXTENT_BYTES = 256 << 20


class ParcelState(Enum):
    """The state of a parcel."""

    QUEUED = "waits to be written"
    WRITING = "is being written"
    WRITTEN = "is on disk"
    FAILED = "could not be written"
    DEAD = "was freed or cancelled"


class Parcel:
    """The bytes of one storage on their way out, on disk, or on their way back.

    Args:
        source: The bytes; kept alive until they are written.
        align_bytes: Memory alignment of the file.
    """

    __slots__ = (
        "__weakref__", "address", "after", "before", "fault", "interior_bytes", "nbytes", "place", "read", "source",
        "state",
    )  # fmt: skip

    def __init__(self, source: torch.Tensor, align_bytes: int) -> None:
        self.nbytes, self.address = source.numel(), source.data_ptr()
        before, self.interior_bytes, after = split(self.address, self.nbytes, align_bytes)
        self.before = ctypes.string_at(self.address, before)
        self.after = ctypes.string_at(self.address + self.nbytes - after, after)
        on_disk = self.interior_bytes > 0
        self.source: torch.Tensor | None = source if on_disk else None
        self.state = ParcelState.QUEUED if on_disk else ParcelState.WRITTEN
        self.fault: Fault | None = None
        self.read: Read | None = None
        self.place = -1

    def copy_in(self, file: BackingFile, pool: BufferPool) -> torch.Tensor:
        """Return the bytes in new memory, the interior from the file. See [Note: aligned interior].

        Raises:
            OSError: The interior cannot be read.
        """
        buffer = Buffer(self.nbytes, self.address % PLACE_ALIGN_BYTES, pool)
        interior = buffer.address + len(self.before)
        ctypes.memmove(buffer.address, self.before, len(self.before))
        ctypes.memmove(interior + self.interior_bytes, self.after, len(self.after))
        if self.interior_bytes:
            file.read(interior, self.interior_bytes, self.place)
        return buffer.tensor()


class Read:
    """One copy-in: requested by ``prefetch`` or ``take``, performed by the reader."""

    __slots__ = ("ahead", "begun", "done", "fault", "parcel", "tensor", "urgent")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.urgent = self.begun = self.done = self.ahead = False
        self.tensor: torch.Tensor | None = None
        self.fault: Fault | None = None


def remove_if_present(queue: deque[Any], item: object) -> None:
    """Remove an item that an interrupted removal may have removed."""
    with contextlib.suppress(ValueError):
        queue.remove(item)


class Room:
    """Places in a growing file. Not thread-safe: callers must hold a lock.

    Args:
        file: The file.
    """

    def __init__(self, file: BackingFile) -> None:
        self._file = file
        self._extents = Extents()
        self._owners: dict[int, Parcel] = {}  # by offset

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._extents.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all places that are not free."""
        return self._extents.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of free places, and the growth that the disk allows."""
        return self._extents.free_bytes + self._file.disk_free_bytes()

    @property
    def parcels(self) -> list[Parcel]:
        """The parcels with a place."""
        return list(self._owners.values())

    def place(self, parcel: Parcel) -> None:
        """Give a parcel a place.

        Raises:
            DiskFullError: The disk is full.
            DiskError: The file cannot be grown for another reason.
        """
        place = self._reserve(parcel.interior_bytes)
        self._owners[place], parcel.place = parcel, place  # no call in between, so an interrupt cannot separate them

    def release(self, parcel: Parcel) -> None:
        """Free the place of a parcel, if it has one."""
        place, parcel.place = parcel.place, -1
        if self._owners.pop(place, None) is not None:
            self._extents.release(place, parcel.interior_bytes)

    def recount(self, *busy: Parcel | None) -> int:
        """Free every place without a parcel, or of a dead one that is not busy; return the bytes of busy dead ones."""
        for parcel in self.parcels:
            if parcel.state is ParcelState.DEAD and parcel not in busy:
                self.release(parcel)
        self._extents.keep((parcel.place, parcel.interior_bytes) for parcel in self.parcels)
        return sum(round_up(parcel.interior_bytes) for parcel in self.parcels if parcel.state is ParcelState.DEAD)

    def close(self) -> None:
        """Forget the parcels and close the file."""
        self._owners.clear()
        self._file.close()

    def _reserve(self, need_bytes: int) -> int:
        place = self._extents.reserve(need_bytes)
        if place is not None:
            return place
        least = round_up(need_bytes) - self._extents.free_end_bytes
        growth = self._file.disk_free_bytes() // PLACE_ALIGN_BYTES * PLACE_ALIGN_BYTES
        cause: OSError | None = None
        # In large steps, for contiguous blocks on disk; if that is too much, in small ones.
        for step in (min(max(least, _EXTENT_BYTES), growth), least):
            if not least <= step <= growth:
                continue
            try:
                self._file.grow(self._extents.size_bytes, step)
            except OSError as error:
                if error.errno not in FULL_ERRNOS:
                    raise Fault(f"growing the file in {self._file.directory}", error).error() from error
                cause = error
                continue
            self._extents.grow(step)
            place = self._extents.reserve(need_bytes)
            if place is not None:
                return place
        raise self._full(need_bytes, cause) from cause

    def _full(self, need_bytes: int, cause: OSError | None) -> DiskFullError:
        limit = limit_of(cause)
        found = f"{format_size(need_bytes)} needed, {format_size(self.free_bytes)} free in {self._file.directory}"
        if limit and cause is not None:  # what the file system has free is not what this file may have
            found = f"{found}, but its file, of {format_size(self.size_bytes)}, cannot grow: {cause.strerror}"
        return DiskFullError(
            found,
            expected="enough contiguous space for every offloaded storage",
            hint=f"{limit or 'free some space there'}, name a larger disk as disk_path, or offload less",
        )
