"""The engine's handle of a storage in host memory; ``HostTier`` does the work.

[Note: an unfinished copy-in] The target of a copy-in is put into its slot before the copy is queued, and removed when
compute has waited for the copy; only then may its memory be reused. So an interrupt in between loses nothing: the next
use or release of the slot finds an unfinished copy-in, makes compute wait, and drops it.

[Note: who holds a source] A copy-out reads its source until it ends, even if the slot is dropped meanwhile: at the
start of backward the last tensors are read, and die, before their copies are done. The allocator would give their
memory to compute, or unmap it, during the copy. So the slot holds its source until the copy is known to be done or
compute waits for it; a slot that dies earlier passes it to the tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ebbtide.store.arena import Place
from ebbtide.store.device import EventHandle, StreamHandle
from ebbtide.store.faults import freed_error


@dataclass(slots=True, eq=False)
class HostCopyIn:
    """A copy-in: its target, the stream of the target's memory, the copying stream, and its event once complete."""

    target: torch.Tensor
    compute: StreamHandle
    into: StreamHandle
    done: EventHandle | None = None


class _Tier(Protocol):
    """The part of ``HostTier`` that a slot uses; a protocol, because that module imports this one."""

    def discard(self, slot: HostSlot) -> None: ...

    def take(self, slot: HostSlot) -> torch.Tensor: ...

    def release(self, slot: HostSlot) -> None: ...


class QueuedSlot:
    """A storage whose copy-out is queued on a stream."""

    __slots__ = ()

    def cancel(self) -> bool:
        """Return False: a copy queued on a stream cannot be cancelled."""
        return False


class HostSlot(QueuedSlot):
    """One storage in host memory. See [Note: a slot's life]; made by ``HostTier.copy_out_all``, who owns its fields."""

    __slots__ = ("__weakref__", "ahead", "compute", "done", "freed", "nbytes", "origin", "place", "source", "_tier")

    def __init__(self, tier: _Tier, place: Place, origin: torch.device) -> None:
        self.origin, self.nbytes = origin, place.nbytes
        self._tier: _Tier | None = tier  # None once freed: the tier queues freed slots: this would be a cycle
        self.place: Place | None = place
        self.compute: StreamHandle = None
        self.done: EventHandle | None = None
        self.ahead: HostCopyIn | None = None
        self.source: torch.Tensor | None = None  # [Note: who holds a source]
        self.freed = False

    def content(self) -> torch.Tensor:
        """Return the bytes in host memory once they are copied out: that memory, or a copy if it is in pieces."""
        parts = self.has_place().parts
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def has_place(self) -> Place:
        """Return the place of the bytes; raises TargetError if the slot was freed."""
        if self.place is None:
            raise freed_error()
        return self.place

    def discard(self) -> None:
        """Discard an unused copy-in; raises TargetError if the slot was freed, or the tier is closed."""
        if self._tier is None:
            raise freed_error()
        self._tier.discard(self)

    def take(self) -> torch.Tensor:
        """Return the bytes on the device they came from.

        Raises:
            TargetError: The slot was freed, or the tier is closed.
            torch.OutOfMemoryError: The device has no room for them.
        """
        if self._tier is None:
            raise freed_error()
        return self._tier.take(self)

    def free(self) -> None:
        """Free the place; the next user of its bytes waits for a running copy."""
        tier = self._tier
        if tier is not None:
            tier.release(self)
            self._tier, self.freed = None, True

    __del__ = free
