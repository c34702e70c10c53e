"""The engine's handle of a storage on its way to disk; ``SpillTier`` does the work. See [Note: spilling]."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from ebbtide.store.disk import DiskSlot
from ebbtide.store.hostslot import HostSlot


class _Tier(Protocol):
    """The part of ``SpillTier`` that a slot uses; a protocol, because that module imports this one."""

    def put_back(self, slot: SpillSlot) -> None: ...

    def take(self, slot: SpillSlot) -> torch.Tensor: ...


class SpillSlot:
    """One storage on its way to disk; made by ``SpillTier``, who owns its fields."""

    __slots__ = ("__weakref__", "freed", "nbytes", "on_disk", "stage", "_tier", "wanted", "where")

    def __init__(self, tier: _Tier, stage: HostSlot) -> None:
        self._tier, self.nbytes, self.where = tier, stage.nbytes, stage.where
        self.stage: HostSlot | None = stage
        self.on_disk: DiskSlot | None = None
        self.wanted = self.freed = False

    def cancel(self) -> bool:
        """Return False: a copy queued on a stream cannot be cancelled."""
        return False

    def put_back(self) -> None:
        """Discard an unused copy-in or read."""
        self._tier.put_back(self)

    def take(self) -> torch.Tensor:
        """Return the bytes on the device they came from.

        Raises:
            TargetError: The slot was freed, or the tier is closed.
            DiskError: They cannot be read.
        """
        return self._tier.take(self)

    def free(self) -> None:
        """Free its places; at any time, in any thread, repeatedly."""
        self.freed = True
        for slot in (self.stage, self.on_disk):
            if slot is not None:
                slot.free()

    __del__ = free


def stages(slots: Sequence[HostSlot | SpillSlot]) -> list[HostSlot]:
    """Return the slots in host memory; one that was passed on to disk has none any more."""
    return [stage for slot in slots if (stage := slot if isinstance(slot, HostSlot) else slot.stage) is not None]


def staged(reference: weakref.ref[SpillSlot]) -> tuple[SpillSlot, HostSlot] | None:
    """Return a slot and its stage; ``None`` if it is dead or freed."""
    slot = reference()
    if slot is None or slot.stage is None:
        return None
    if slot.freed:
        slot.free()  # an interrupt may have prevented that
        return None
    return slot, slot.stage
