"""How much may be prefetched before the device's allocator must give back what it keeps.

[Note: headroom]
Before torch's allocator raises, it gives back all memory that it keeps for reuse: the device stands still, and each
further allocation asks the driver again. A prefetch must not cause that, for nobody needs its bytes yet. So the device
is asked for what is free before a prefetch; a copy-in that its reader waits for is never refused here. Bytes
that are ahead may also leave too little for compute, whose allocations then have the cache given back: the allocator
counts that, and once it happened the next prefetch is refused, which makes the window smaller.

The question costs the host some tens of microseconds, so one answer serves for half of what was free then, and for at
most as much as the link moves in a few milliseconds.
"""

from __future__ import annotations

import torch

from ebbtide.base.units import format_size
from ebbtide.store.device import Device

_MOST_BYTES = 256 << 20
"""Prefetched on one answer: what compute takes meanwhile is not known."""


class Headroom:
    """Bytes that may still be prefetched, by device. See [Note: headroom]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._left_bytes: dict[torch.device, int] = {}
        self._flushes: dict[torch.device, int] = {}

    def forget(self) -> None:
        """Ask anew next time."""
        self._left_bytes.clear()

    def take(self, nbytes: int, where: torch.device) -> None:
        """Count bytes that are about to be prefetched.

        Raises:
            torch.OutOfMemoryError: There is no room for them. The allocator was not asked, and keeps what it has.
        """
        left = self._left_bytes.get(where, 0)
        if left < nbytes:
            room = self._device.room(where)
            if room is None:
                return
            flushed = room.flushes > self._flushes.setdefault(where, room.flushes)
            self._flushes[where] = room.flushes
            if flushed or room.free_bytes < nbytes:
                self._left_bytes.pop(where, None)
                raise torch.OutOfMemoryError(
                    f"{format_size(nbytes)} are to be prefetched, {format_size(room.free_bytes)} of device "
                    f"memory are free{' after the allocator gave back what it kept' if flushed else ''}"
                )
            left = max(min(room.free_bytes // 2, _MOST_BYTES), nbytes)
        self._left_bytes[where] = left - nbytes
