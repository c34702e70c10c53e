"""Limit prefetches so that the device's allocator does not flush its cache.

[Note: headroom] Before torch's allocator raises, it frees all cached memory: the device synchronizes, and each later
allocation calls the driver. A prefetch must not cause that, because its bytes are not needed yet. So free memory is
queried before a prefetch; copy-ins for a waiting reader are never refused here. Prefetched bytes may also leave too
little memory for compute, whose allocations then flush the cache: the allocator counts flushes, and after one in a
backward the next prefetch is refused, which shrinks the window. Flushes of a forward or an optimizer do not count: once
there was one at all, the end of each backward queries too.

The query costs the host some tens of microseconds, so one result is used for half of the memory that was free then, and
at most for the bytes that the link moves in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.base.units import format_size
from ebbtide.store.device import Device

_MOST_BYTES = 256 << 20
"""Most bytes copied in per query: compute's allocations in the meantime are unknown."""


class Headroom:
    """Bytes that may still be prefetched, by device. See [Note: headroom]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._left_bytes: dict[torch.device, int] = {}
        self._flushes: dict[torch.device, int] = {}

    def forget(self) -> None:
        """End a backward: query again next time, and count no flushes before that."""
        self._left_bytes.clear()
        for origin, before in tuple(self._flushes.items()):
            room = self._device.free_memory(origin) if before else None
            if room is not None and room.flushes == before:
                del self._flushes[origin]

    def take(self, sizes: Sequence[int], origin: torch.device) -> int:
        """Count bytes that are about to be prefetched, and return how many of the sizes fit.

        Args:
            sizes: Bytes of each, not empty.
            origin: The device that they go to.

        Raises:
            torch.OutOfMemoryError: The first does not fit. The allocator was not called and keeps its cache.
        """
        left = self._left_bytes.get(origin, 0)
        for taken, nbytes in enumerate(sizes):
            if left < nbytes:
                room = self._device.free_memory(origin)
                if room is None:  # not known: all are tried
                    break
                flushed = room.flushes > self._flushes.setdefault(origin, room.flushes)
                self._flushes[origin] = room.flushes
                if flushed or room.free_bytes < nbytes:
                    self._left_bytes.pop(origin, None)
                    if taken:
                        return taken
                    raise torch.OutOfMemoryError(
                        f"{format_size(nbytes)} are to be prefetched, {format_size(room.free_bytes)} of device "
                        f"memory are free{' after the allocator gave back what it kept' if flushed else ''}"
                    )
                left = max(min(room.free_bytes // 2, _MOST_BYTES), nbytes)
            left -= nbytes
        self._left_bytes[origin] = left
        return len(sizes)
