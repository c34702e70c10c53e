"""The bytes of one storage on their way to disk and back."""

from __future__ import annotations

import ctypes
from enum import Enum

import torch

from ebbtide.store.aligned import Split
from ebbtide.store.faults import Fault


class State(Enum):
    """Where a parcel is in its life."""

    QUEUED = "waits to be written"
    WRITING = "is being written"
    PARKED = "is on disk"
    FAILED = "could not be written"
    DEAD = "was freed or withdrawn"


class Parcel:
    """The bytes of one storage on their way out, on disk, or on their way back.

    Args:
        source: The bytes; kept alive until they are written.
        align_bytes: Memory alignment of the file.
    """

    __slots__ = ("address", "fault", "head", "nbytes", "place", "read", "source", "split", "state", "tail", "users")

    def __init__(self, source: torch.Tensor, align_bytes: int) -> None:
        self.nbytes, self.address = source.numel(), source.data_ptr()
        self.split = Split.of(self.address, self.nbytes, align_bytes)
        self.head = ctypes.string_at(self.address, self.split.head_bytes)
        self.tail = ctypes.string_at(self.address + self.nbytes - self.split.tail_bytes, self.split.tail_bytes)
        on_disk = self.split.interior_bytes > 0
        self.source: torch.Tensor | None = source if on_disk else None
        self.state = State.QUEUED if on_disk else State.PARKED
        self.fault: Fault | None = None
        self.read: Read | None = None
        self.place = -1
        self.users = 0


class Read:
    """One copy-in: asked for by ``prefetch`` or ``take``, done by the reader."""

    __slots__ = ("ahead", "begun", "done", "fault", "parcel", "tensor", "urgent")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.urgent = self.begun = self.done = self.ahead = False
        self.tensor: torch.Tensor | None = None
        self.fault: Fault | None = None
