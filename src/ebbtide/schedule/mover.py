"""What the schedule requires of its executor."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from ebbtide.base.actions import Site


class Saved(Protocol):
    """A saved storage. The schedule holds it weakly: one that dies needs no copy."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        ...

    @property
    def site(self) -> Site:
        """Where it was saved."""
        ...


class Forward(Protocol):
    """One forward of the model, as far as it offers bytes."""

    offered_bytes: int
    """Bytes copied out, or held back, so far."""

    offers_last: bool
    """Whether its latest block has offered some."""

    def stayed(self, storages: Sequence[tuple[Site, int]]) -> None:
        """Count storages, by site and bytes, as kept instead of offloaded."""


class Outcome(enum.Enum):
    """The outcome of a requested copy-out."""

    BEGUN = enum.auto()
    REFUSED = enum.auto()
    """The store has no room: the storage stays."""
    NOT_NEEDED = enum.auto()
    """The source was changed or freed meanwhile: nobody can read it."""


SavedT = TypeVar("SavedT", bound=Saved)
_MovedT = TypeVar("_MovedT", bound=Saved, contravariant=True)


class Mover(Protocol[_MovedT]):
    """Carries out copies between the device and a store: with slots, or with simulated seconds."""

    def copy_out(self, group: Sequence[_MovedT], stream: Hashable) -> Sequence[Outcome]:
        """Begin to copy out sources that were made on one stream; return what became of each."""
        ...

    def release_sources(self, group: Sequence[_MovedT], *, wait: bool) -> bool:
        """Release sources whose copies began together and are done, or not needed any more; return whether that is so.

        If ``wait``, compute waits for the copies.
        """
        ...

    def cancel_copy_out(self, saved: _MovedT) -> bool:
        """Cancel a copy-out that has not begun; return whether none is under way now."""
        ...

    def to_copy(self, saved: _MovedT) -> int | None:
        """Return the bytes to copy in ahead of its reader.

        Returns:
            0: its source is on the device still. None: it is read elsewhere.
        """
        ...

    def copy_in(self, group: Sequence[_MovedT]) -> int:
        """Begin to copy storages in, ahead of their readers.

        Returns:
            How many, at the end of the group, have not begun because the device has no room.
        """
        ...

    def discard(self, saved: _MovedT) -> None:
        """Discard what was copied in and not read."""
