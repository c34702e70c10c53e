"""How much may be brought in ahead of its reader before the device's allocator must give back what it keeps.

[Note: headroom]
Before torch's allocator raises, it gives back all memory that it keeps for reuse: the device stands still, and each
further allocation asks the driver again. A prefetch must not cause that, for nobody needs its bytes yet. So the device
is asked for what is free before bytes are copied in ahead of their reader; what a reader itself needs is never refused
here. Bytes that are ahead may also leave too little for compute, whose allocations then have the cache given back: the
allocator counts that, and once it happened the next prefetch is refused, which makes the window smaller.

The question costs the host some tens of microseconds, so one answer serves for half of what was free then, and for at
most as much as the link moves in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.base.units import format_size
from ebbtide.store.device import Device

_MOST_BYTES = 256 << 20
"""Brought in on one answer: what compute takes meanwhile is not known."""


class Headroom:
    """Bytes that may still be copied in ahead, by device. See [Note: headroom]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._left_bytes: dict[torch.device, int] = {}
        self._flushes: dict[torch.device, int] = {}

    def forget(self) -> None:
        """Ask anew next time."""
        self._left_bytes.clear()

    def take(self, sizes: Sequence[int], where: torch.device) -> int:
        """Count bytes that are about to be copied in ahead, and return for how many of the sizes there is room.

        Args:
            sizes: Bytes of each, not empty.
            where: The device.

        Raises:
            torch.OutOfMemoryError: There is no room for the first. The allocator was not asked, and keeps what it has.
        """
        for taken, nbytes in enumerate(sizes):
            try:
                self._take(nbytes, where)
            except torch.OutOfMemoryError:
                if not taken:
                    raise
                return taken
        return len(sizes)

    def _take(self, nbytes: int, where: torch.device) -> None:
        left = self._left_bytes.get(where, 0)
        if left < nbytes:
            room = self._device.free_memory(where)
            if room is None:
                return
            flushed = room.flushes > self._flushes.setdefault(where, room.flushes)
            self._flushes[where] = room.flushes
            if flushed or room.free_bytes < nbytes:
                self._left_bytes.pop(where, None)
                raise torch.OutOfMemoryError(
                    f"{format_size(nbytes)} are to be copied in ahead, {format_size(room.free_bytes)} of device "
                    f"memory are free{' after the allocator gave back what it kept' if flushed else ''}"
                )
            left = max(min(room.free_bytes // 2, _MOST_BYTES), nbytes)
        self._left_bytes[where] = left - nbytes
