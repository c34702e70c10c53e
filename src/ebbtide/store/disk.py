"""The disk tier: offloaded bytes are in an unlinked file; one thread writes it, one reads it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence

import torch

from ebbtide.base.errors import ConfigError
from ebbtide.store.aligned import BackingFile
from ebbtide.store.allocator import return_large_blocks, trim_heap
from ebbtide.store.claims import Claim
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import StreamHandle
from ebbtide.store.diskwork import DiskWork, Parcel, ParcelState
from ebbtide.store.faults import unstarted_error
from ebbtide.store.location import check_directory, default_directory
from ebbtide.store.protocol import Streamless
from ebbtide.store.room import Room

_LOG = logging.getLogger("ebbtide.store")


class DiskSlot:
    """One storage on disk. See [Note: a slot's life]; made by ``DiskTier.copy_out_all`` only.

    It keeps its tier alive: a tier that is never closed ends with its last slot.
    """

    __slots__ = ("__weakref__", "_claim", "_parcel", "_tier", "_work")

    def __init__(self, tier: DiskTier, work: DiskWork, parcel: Parcel) -> None:
        self._tier, self._work, self._parcel = tier, work, parcel
        # Also of one dropped by an interrupt in ``copy_out_all``.
        self._claim: Claim[Parcel] | None = work.claims.add(self, parcel)

    def cancel(self) -> bool:
        """Cancel a copy-out that has not begun; True: it was cancelled, and the slot is dead."""
        return self._work.cancel(self._parcel)

    def discard(self) -> None:
        """Discard an unused read, or cancel it."""
        self._work.discard(self._parcel)

    def take(self) -> torch.Tensor:
        """Return the bytes in new memory.

        Raises:
            DiskError: Either copy failed, the slot was freed, or the tier cannot be used.
        """
        return self._work.take(self._parcel)

    def free(self) -> None:
        """Free the place once no thread uses it; at any time, in any thread, repeatedly."""
        if self._claim is not None:
            self._work.claims.give_back(self._claim)
            self._claim = None  # last: repeated after an interrupt


class DiskTier(Streamless):
    """A tier on disk for tensors in RAM.

    Args:
        path: Directory on a disk; ``None``: the first usable of the temporary directory, ``/var/tmp`` and
            ``~/.cache/ebbtide``.

    Raises:
        DiskError: The directory is missing, not writable, or in RAM.
    """

    name = "disk"

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        file = BackingFile(default_directory() if path is None else check_directory(path))
        self.counters = TierCounters()
        self._align_bytes = file.align_bytes
        self._trims_heap: Callable[[], bool] = lambda: False
        self._room = Room(file)
        self._work = DiskWork(file, self._room, self.counters)
        try:
            self._work.start()
        except BaseException as error:
            self._work.close(join=True)
            self._room.close()
            if isinstance(error, RuntimeError):
                raise unstarted_error(error) from error
            raise
        # The threads reference the work, not the tier: they end with a tier that is dropped without being closed.
        weakref.finalize(self, self._work.close, join=False).atexit = False
        _LOG.debug("disk tier in %s, %s I/O", file.directory, "direct" if file.direct else "buffered")

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in RAM, the memory that this tier saves."""
        return tensor.device.type == "cpu"

    @property
    def stalls(self) -> Stalls:
        """Stalls of compute, by reader."""
        return self.counters.stalls

    def gauges(self) -> dict[str, int]:
        """Return the bytes on disk and moved, by name."""
        used, draining, _ = self._work.measure() if self._work.usable else (0, 0, 0)
        return {
            "disk_file_bytes": self._room.size_bytes,
            "disk_used_bytes": used,
            "disk_draining_bytes": draining,
            "disk_written_bytes": self.counters.out_bytes,
            "disk_read_bytes": self.counters.in_bytes,
        }

    @property
    def used_bytes(self) -> int:
        """Bytes of places that live slots have now; 0 when closed."""
        return self._work.measure()[0] if self._work.usable else 0

    @property
    def free_bytes(self) -> int:
        """Bytes that could still be offloaded: free or draining places, and the growth that the disk allows.

        Raises:
            DiskError: The tier cannot be used.
        """
        self._work.check_usable()
        return self._work.measure()[2]

    def copy_out_all(self, sources: Sequence[torch.Tensor], *, compute: StreamHandle | None = None) -> list[DiskSlot]:
        """Begin to write several sources out together; see ``Tier.copy_out_all``.

        Raises:
            ConfigError: A source is not as described there.
            DiskFullError: The disk cannot hold them.
            DiskError: The tier cannot be used: closed, forked, or a thread has died.
        """
        self._work.check_usable()
        for source in sources:
            fits = source.dtype is torch.uint8 and source.dim() == 1 and source.is_contiguous() and self.owns(source)
            if not fits or source.numel() == 0:
                raise ConfigError(
                    f"source is {source.dtype} of shape {tuple(source.shape)} on {source.device}",
                    expected="a contiguous, one-dimensional, not empty torch.uint8 tensor on the CPU",
                    hint="pass tensor.contiguous().view(-1).view(torch.uint8)",
                )
        parcels = [Parcel(source, self._align_bytes) for source in sources]
        slots = [DiskSlot(self, self._work, parcel) for parcel in parcels]
        self._work.copy_out([parcel for parcel in parcels if parcel.state is ParcelState.QUEUED])
        return slots

    def are_copied_out(self, slots: Sequence[DiskSlot]) -> bool:
        """Whether the copy-outs of several slots are done."""
        self._work.check_usable()
        for slot in slots:
            parcel = slot._parcel
            if parcel.fault is not None:
                raise parcel.fault.error()
            if parcel.state is not ParcelState.WRITTEN:
                return False
        return True

    def wait_copied_out(self, slots: Sequence[DiskSlot]) -> None:
        """Wait for the copy-outs of several slots."""
        for slot in slots:
            self._work.wait_copied_out(slot._parcel)

    def prefetch(self, slots: Sequence[DiskSlot]) -> int:
        """Request the bytes of several slots. Returns 0: each read begins when the window has room for it."""
        self._work.prefetch([slot._parcel for slot in slots])
        return 0

    def trim(self) -> None:
        """Free spare memory of reads, and the memory of ``return_freed_memory``."""
        trims_heap = self._trims_heap()
        if self._work.usable:
            self._work.measure()
            self._work.pool.trim(all_chunks=trims_heap)
        if trims_heap:
            trim_heap()

    def return_freed_memory(self, when: Callable[[], bool] = lambda: True, *, at_once: bool = False) -> None:
        """Return memory that the process has freed to the system, now and at each ``trim`` from now on.

        Args:
            when: Whether to return it at a ``trim``.
            at_once: Large blocks also whenever they are freed: no heap in pieces, and more page faults.
        """
        self._trims_heap = when
        if at_once:
            return_large_blocks()
        trim_heap()

    def close_unused(self, in_use: Callable[[], object]) -> None:
        """Close once ``in_use()`` is false; see ``Tier.close_unused``."""
        self._work.close_unused(in_use)

    def close(self) -> None:
        """Drop queued work, join the threads, free the disk. May be called repeatedly."""
        self._work.close(join=True)
