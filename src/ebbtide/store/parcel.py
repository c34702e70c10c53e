"""The bytes of one storage on their way to disk and back."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from enum import Enum
from typing import Any

import torch

from ebbtide.store.aligned import BackingFile, Split
from ebbtide.store.buffers import Buffer, BufferPool
from ebbtide.store.extents import PLACE_ALIGN_BYTES
from ebbtide.store.faults import Fault


class ParcelState(Enum):
    """The state of a parcel."""

    QUEUED = "waits to be written"
    WRITING = "is being written"
    PARKED = "is on disk"
    FAILED = "could not be written"
    DEAD = "was freed or cancelled"


class Parcel:
    """The bytes of one storage on their way out, on disk, or on their way back.

    Args:
        source: The bytes; kept alive until they are written.
        align_bytes: Memory alignment of the file.
    """

    __slots__ = (
        "__weakref__", "address", "fault", "head", "nbytes", "place", "read", "source", "split", "state", "tail",
    )  # fmt: skip

    def __init__(self, source: torch.Tensor, align_bytes: int) -> None:
        self.nbytes, self.address = source.numel(), source.data_ptr()
        self.split = Split.of(self.address, self.nbytes, align_bytes)
        self.head = ctypes.string_at(self.address, self.split.head_bytes)
        self.tail = ctypes.string_at(self.address + self.nbytes - self.split.tail_bytes, self.split.tail_bytes)
        on_disk = self.split.interior_bytes > 0
        self.source: torch.Tensor | None = source if on_disk else None
        self.state = ParcelState.QUEUED if on_disk else ParcelState.PARKED
        self.fault: Fault | None = None
        self.read: Read | None = None
        self.place = -1

    def copy_in(self, file: BackingFile, pool: BufferPool) -> torch.Tensor:
        """Return the bytes in new memory. See [Note: aligned interior].

        Args:
            file: The file with the interior.
            pool: Spare memory.

        Raises:
            OSError: The interior cannot be read.
        """
        split = self.split
        buffer = Buffer(self.nbytes, self.address % PLACE_ALIGN_BYTES, pool)
        interior = buffer.address + split.head_bytes
        ctypes.memmove(buffer.address, self.head, split.head_bytes)
        ctypes.memmove(interior + split.interior_bytes, self.tail, split.tail_bytes)
        if split.interior_bytes:
            file.read(interior, split.interior_bytes, self.place)
        return buffer.tensor()


class Read:
    """One copy-in: requested by ``prefetch`` or ``take``, performed by the reader."""

    __slots__ = ("ahead", "begun", "done", "fault", "parcel", "tensor", "urgent")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.urgent = self.begun = self.done = self.ahead = False
        self.tensor: torch.Tensor | None = None
        self.fault: Fault | None = None


def discard(queue: deque[Any], item: object) -> None:
    """Remove an item that an interrupted removal may have removed."""
    with contextlib.suppress(ValueError):
        queue.remove(item)
