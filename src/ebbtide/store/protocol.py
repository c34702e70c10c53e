"""The protocol between the engine and a tier.

[Note: a slot's life]
``Tier.copy_out_all(sources)`` begins copy-outs and returns a ``Slot`` for each. The bytes of a source must not change
until ``Tier.are_copied_out`` is true, or until ``Tier.wait_copied_out`` has made the compute stream wait for it; until
then the slot, even a freed one, keeps their memory alive. ``slot.take()`` copies the bytes in, each time it is called;
``Tier.prefetch`` begins that early, ``slot.discard()`` discards a prefetch. ``slot.free()`` frees the place, at any
time: a running copy is waited for, cancelled, or finished before the place is reused.

The disk tier (threads in place of streams) and the host tier over a ``Device`` (streams and events) implement this
protocol; tiers are independent of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ebbtide.base.errors import CapError
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import StreamHandle


class Slot(Protocol):
    """One offloaded storage."""

    def cancel(self) -> bool:
        """Cancel a copy-out that has not begun. True: it was cancelled and the slot is dead."""
        ...

    def discard(self) -> None:
        """Discard or cancel an unused copy-in, if there is one."""

    def take(self) -> torch.Tensor:
        """Return the bytes.

        The tensor is one-dimensional ``uint8``, on the source's device, has its own storage (offset 0, no
        other bytes), and is ordered before the next work of compute. It belongs to the caller: a later ``take`` copies
        in again. Raises the error of a failed copy.
        """
        ...

    def free(self) -> None:
        """Free the place. May be called repeatedly."""


class Streamless:
    """What tiers without streams do alike: the host computes in order."""

    def expect(self, nbytes: int) -> None:
        """Do nothing: room costs nothing."""

    def capturing(self) -> bool:
        """Return False: the host has no graphs."""
        return False

    def stream_of(self, device: torch.device) -> None:
        """Return None: the host computes in order."""

    def follow(self, tensor: torch.Tensor, stream: StreamHandle) -> None:
        """Do nothing."""


class Tier(Protocol):
    """A tier with slots, for the tensors of one kind of device."""

    @property
    def name(self) -> str:
        """``"host"`` or ``"disk"``."""
        ...

    @property
    def stalls(self) -> Stalls:
        """Stalls of compute, by reader; set ``reader`` before calling the tier."""
        ...

    @property
    def counters(self) -> TierCounters:
        """Moved bytes and stalls known so far."""
        ...

    def gauges(self) -> dict[str, int]:
        """Return held and moved bytes, by name: see ``Stats.store``."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device whose memory is to be saved."""
        ...

    def capturing(self) -> bool:
        """Whether the caller is capturing a device graph, which no copy may be part of."""
        ...

    def stream_of(self, device: torch.device) -> StreamHandle | None:
        """Return the caller's compute stream on a device; None without streams."""
        ...

    def follow(self, tensor: torch.Tensor, stream: StreamHandle) -> None:
        """Order the caller, which reads ``tensor``, after another stream, on which it was made."""

    def copy_out_all(
        self, sources: Sequence[torch.Tensor], *, compute: StreamHandle | None = None
    ) -> Sequence[Slot | CapError]:
        """Begin to copy out several sources together; with streams, at the host cost of one.

        Args:
            sources: One-dimensional contiguous ``uint8`` views of the bytes, on the device; not empty.
            compute: The stream on which they were made, see ``stream_of``; None: the caller's.

        Returns:
            For each source its slot, or the error of a cap that is reached.
        """
        ...

    def are_copied_out(self, slots: Sequence[Any]) -> bool:
        """Whether the copy-outs of several slots of this tier are done. Raises the error of a failed copy."""
        ...

    def wait_copied_out(self, slots: Sequence[Any]) -> None:
        """Make compute wait for the copy-outs of several slots of this tier. Raises the error of a failed copy."""

    def prefetch(self, slots: Sequence[Any]) -> int:
        """Begin the copy-ins of several slots of this tier together (after their copy-outs), unless they have begun.

        Returns:
            How many, at the end of the list, have not begun for lack of device memory.

        Raises:
            torch.OutOfMemoryError: It has no room for the first.
        """
        ...

    def expect(self, nbytes: int) -> None:
        """Announce the number of further bytes of this pass, as predicted by the first block."""

    @property
    def used_bytes(self) -> int:
        """Bytes of live slots' places; a dead slot no longer counts, even if its copy is running."""
        ...

    @property
    def free_bytes(self) -> int | None:
        """Bytes that could still be offloaded; ``None``: not known."""
        ...

    def trim(self) -> None:
        """Free spare buffers; called between a backward and the next forward."""

    def close_unused(self, in_use: Callable[[], object]) -> None:
        """Stop threads and free everything once nothing is in use, even if nobody calls the tier any more.

        Host memory is freed when the last slot dies, the disk a few seconds after ``in_use`` returns false.

        Args:
            in_use: Whether somebody may still call the tier. Called in any thread, under the tier's lock.
        """

    def close(self) -> None:
        """Stop threads and free everything. May be called repeatedly."""


def copy_out_one(tier: Tier, source: torch.Tensor) -> Slot:
    """Copy out one source, and make compute wait for that.

    Raises:
        DiskFullError: The disk cannot hold it.
        CapError: The user's cap is reached.
    """
    (slot,) = tier.copy_out_all([source])
    if isinstance(slot, CapError):
        raise slot
    tier.wait_copied_out([slot])
    return slot
