"""The protocol between the engine and a tier.

[Note: a slot's life]
``Tier.park(source)`` begins the copy-out and returns a ``Slot``. The source's bytes must stay as they are until
``slot.parked`` is true, or until ``slot.wait_parked()`` has made the compute stream wait for it; until then the slot
holds their memory, even one that was freed meanwhile. ``slot.take()`` brings the bytes back, as often as it is called;
``prefetch()`` begins that early, ``put_back()`` drops what it brought. ``slot.free()`` gives the place back, at any
moment: a copy still running is waited for, cancelled, or finished before the place is used again.

The same protocol is served by the disk tier (threads are the streams) and by the host tier over a ``Device`` (streams
and events); a tier knows no autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ebbtide.base.errors import CapError
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import StreamHandle


class Slot(Protocol):
    """One offloaded storage."""

    @property
    def nbytes(self) -> int:
        """Bytes parked."""
        ...

    @property
    def parked(self) -> bool:
        """Whether the copy-out is done. Raises what the copy raised, if it failed."""
        ...

    def wait_parked(self) -> None:
        """Make compute wait for the copy-out. Raises what the copy raised."""
        ...

    def cancel(self) -> bool:
        """Cancel a copy-out that has not begun. True: it was cancelled, nothing is parked, the slot is dead."""
        ...

    def prefetch(self) -> None:
        """Begin the copy-in now (after the copy-out, if that still runs). Harmless when it has begun.

        Raises:
            torch.OutOfMemoryError: The device has no room for bytes that nobody needs yet.
        """
        ...

    def put_back(self) -> None:
        """Drop what a copy-in has brought and nobody took, or withdraw it. Harmless when there is none."""
        ...

    def take(self) -> torch.Tensor:
        """Return the bytes.

        The tensor is one-dimensional ``uint8``, on the device it came from, owns its storage whole (offset 0, exactly
        ``nbytes`` long), and is ordered before whatever compute does next. It belongs to the caller: a later ``take``
        copies in again. Raises what either copy raised.
        """
        ...

    def free(self) -> None:
        """Give the place back. Harmless when repeated."""
        ...


class Tier(Protocol):
    """A tier with slots, for the tensors of one kind of device."""

    @property
    def name(self) -> str:
        """``"host"`` or ``"disk"``."""
        ...

    @property
    def can_cancel(self) -> bool:
        """Whether a copy-out that has not begun can be cancelled; if not, it is best asked for when it is needed."""
        ...

    @property
    def stalls(self) -> Stalls:
        """For whom compute waited; ``reader`` is to be set before something is asked."""
        ...

    @property
    def counters(self) -> TierCounters:
        """What was moved, and for whom compute waited, as far as it is known now."""
        ...

    def gauges(self) -> dict[str, int]:
        """Return what is held and was moved, by name: see ``Stats.store``."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on the device whose memory is scarce."""
        ...

    def capturing(self) -> bool:
        """Whether what the caller asks of the device now is recorded in a graph, which no copy may be part of."""
        ...

    def stream_of(self, tensor: torch.Tensor) -> StreamHandle | None:
        """Return the stream on which the caller computes now, where a tensor lies; None where there are none."""
        ...

    def follow(self, tensor: torch.Tensor, stream: StreamHandle | None) -> None:
        """Order the caller after what was asked of another stream: there ``tensor`` was made, here it is read."""
        ...

    def park(self, source: torch.Tensor) -> Slot:
        """Begin to copy out ``source``.

        Args:
            source: One-dimensional contiguous ``uint8`` view of the bytes, on the device; not empty.

        Raises:
            DiskFullError: The disk cannot hold it.
            CapError: The cap given by the user is reached.
        """
        ...

    def park_all(
        self, sources: Sequence[torch.Tensor], *, compute: StreamHandle | None = None
    ) -> Sequence[Slot | CapError]:
        """Begin to copy out several sources together; where copies are asked of streams, at the price of one.

        Args:
            sources: As for ``park``.
            compute: The stream on which they were made, see ``stream_of``; None: the caller's.

        Returns:
            For each source its slot, or why it has none: a cap that is reached.
        """
        ...

    def prefetch(self, slots: Sequence[Any]) -> int:
        """Begin the copies-in of several slots of this tier together, as with ``Slot.prefetch``.

        Returns:
            How many have not begun, the last of them: the device has no room for more.

        Raises:
            torch.OutOfMemoryError: It has no room for the first.
        """
        ...

    def expect(self, nbytes: int) -> None:
        """Take the number of further bytes of this pass, as predicted by the first block."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of places that live slots have now; exact as soon as a slot is dead, whatever still runs."""
        ...

    @property
    def free_bytes(self) -> int | None:
        """Bytes that could still be parked; ``None`` where that is not known."""
        ...

    def trim(self) -> None:
        """Give spare buffers back to the system; called between a backward and the next forward."""
        ...

    def close(self) -> None:
        """Stop threads and give everything back. Harmless when repeated."""
        ...
