"""The engine's handles of storages that go to disk through host memory; ``SpillTier`` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ebbtide.store.disk import DiskSlot
from ebbtide.store.hostslot import HostSlot, QueuedSlot


class _Tier(Protocol):
    """The part of ``SpillTier`` that slots use; a protocol, because that module imports this one."""

    def discard(self, slot: SpillSlot) -> None: ...

    def take(self, slot: SpillSlot) -> torch.Tensor: ...

    def take_pieces(self, slot: SplitSlot) -> torch.Tensor: ...


class SpillSlot(QueuedSlot):
    """A storage on its way to disk, or a piece of one; made by ``SpillTier``, who owns its fields."""

    __slots__ = ("__weakref__", "freed", "nbytes", "on_disk", "stage", "_tier", "wanted", "where")

    def __init__(self, tier: _Tier, stage: HostSlot) -> None:
        self._tier, self.nbytes, self.where = tier, stage.nbytes, stage.where
        self.stage: HostSlot | None = stage
        self.on_disk: DiskSlot | None = None
        self.wanted = self.freed = False

    @property
    def pieces(self) -> Sequence[SpillSlot]:
        """Itself."""
        return (self,)

    def discard(self) -> None:
        """Discard an unused copy-in or read."""
        self._tier.discard(self)

    def take(self) -> torch.Tensor:
        """Return the bytes on the device they came from.

        Raises:
            TargetError: The slot was freed, or the tier is closed.
            DiskError: They cannot be read.
        """
        return self._tier.take(self)

    def free(self) -> None:
        """Free its places; at any time, in any thread, repeatedly. If it dies, they die with it."""
        self.freed = True
        for slot in (self.stage, self.on_disk):
            if slot is not None:
                slot.free()


class SplitSlot(QueuedSlot):
    """A storage larger than the stage, in pieces; made by ``SpillTier``. See [Note: spilling]."""

    __slots__ = ("__weakref__", "nbytes", "pieces", "_tier", "where")

    def __init__(self, tier: _Tier, pieces: Sequence[SpillSlot]) -> None:
        self._tier, self.pieces, self.where = tier, pieces, pieces[0].where
        self.nbytes = sum(piece.nbytes for piece in pieces)

    def discard(self) -> None:
        """Discard unused reads."""
        for piece in self.pieces:
            piece.discard()

    def take(self) -> torch.Tensor:
        """Return the bytes on the device they came from.

        Raises:
            TargetError: The slot was freed, or the tier is closed.
            DiskError: They cannot be read.
            torch.OutOfMemoryError: The device has no room for them.
        """
        return self._tier.take_pieces(self)

    def free(self) -> None:
        """Free its places; at any time, in any thread, repeatedly. If it dies, they die with it."""
        for piece in self.pieces:
            piece.free()
