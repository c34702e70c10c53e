"""Copies from the store to the device. See [Note: window] and [Note: groups of copies]."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic

from ebbtide.schedule.mover import Mover, SavedT
from ebbtide.schedule.window import Window

Upcoming = Iterator[tuple[Sequence[weakref.ref[SavedT]], int]]
"""Storages in the order in which a backward reads them: those of a block's run at a time, with the run's number. As
references: a suspended generator would keep what it yields alive."""


_Ahead = tuple[int, int, int]
"""Bytes ahead of their reader, those of them that were copied in, and the number of the block's run."""

_NOTHING: _Ahead = (0, 0, 0)


class CopyIn(Generic[SavedT]):
    """Prefetches storages ahead of their readers, in one backward; the window bounds the bytes not yet read."""

    def __init__(self, upcoming: Upcoming[SavedT], window: Window, mover: Mover[SavedT]) -> None:
        self.window, self._mover = window, mover
        # Not read; what died since is subtracted by ``advance``.
        self.ahead_bytes = 0  # copied in
        self._taken_bytes = 0  # of the window: those, and what is on the device still
        self._ahead: dict[weakref.ref[SavedT], _Ahead] = {}
        self._dead: deque[weakref.ref[SavedT]] = deque()
        self._note_dead = self._dead.append  # which nothing interrupts; one object for all references
        self._upcoming = upcoming
        self._later: deque[tuple[weakref.ref[SavedT], int]] = deque()  # met already, and comes before those
        self._more = True  # to copy, perhaps

    def advance(self) -> None:
        """Begin as many copies as the window allows, once a group of them fits. See [Note: groups of copies]."""
        group_bytes = self.window.gathered_bytes
        while self._dead:
            self._forget(self._dead.popleft())
        if self._taken_bytes and self._taken_bytes > self.window.in_bytes - group_bytes:
            return
        while group := self._next_group(group_bytes):
            if not self._begin(group):
                return

    def _begin(self, group: Sequence[tuple[SavedT, int]]) -> bool:
        """Begin the copies of a group; returns whether the device had room for all."""
        begun = 0
        try:
            begun = len(group) - self._mover.copy_in([saved for saved, _ in group])
        finally:
            for saved, _ in group[begun:]:
                self._forget(weakref.ref(saved))
        if begun == len(group):
            return True
        self.window.shrink(self.ahead_bytes)
        self._more = True
        self._later.extendleft(reversed([(weakref.ref(saved), number) for saved, number in group[begun:]]))
        return False

    def _next_group(self, group_bytes: int) -> list[tuple[SavedT, int]]:
        """Return what is to be copied next and fits into the window, a group at most; note it, and what never left."""
        group: list[tuple[SavedT, int]] = []
        group_taken = 0
        while group_taken < group_bytes or not group:
            if not self._later:
                references, number = next(self._upcoming, (None, 0))
                if references is None:
                    self._more = False
                    break
                self._later.extend([(reference, number) for reference in references])
                continue
            upcoming = reference, number = self._later.popleft()
            saved = reference()
            if saved is None or reference in self._ahead:  # what two blocks saved is in the orders of both
                continue
            nbytes, copied_bytes = saved.nbytes, self._mover.to_copy(saved)
            if copied_bytes is None:
                continue
            if self._taken_bytes and self._taken_bytes + nbytes > self.window.in_bytes:
                self._later.appendleft(upcoming)
                break
            self._ahead[weakref.ref(saved, self._note_dead)] = nbytes, copied_bytes, number
            self._taken_bytes += nbytes
            if copied_bytes:
                self.ahead_bytes += copied_bytes
                group.append((saved, number))
                group_taken += copied_bytes
        return group

    def has_read(self, saved: SavedT) -> None:
        """A storage was read: its bytes no longer count as ahead."""
        nbytes, copied_bytes, _ = self._ahead.pop(weakref.ref(saved), _NOTHING)  # as ``_forget``
        self._taken_bytes -= nbytes
        self.ahead_bytes -= copied_bytes
        free_bytes = self.window.in_bytes - self._taken_bytes
        if self._more and (free_bytes >= self.window.gathered_bytes or not self._taken_bytes or self._dead):
            self.advance()

    def reach(self, number: int) -> None:
        """A block's backward begins: discard what was prefetched for blocks before the last one, and never read."""
        self.discard(number + 2)

    def discard(self, first: int = 0) -> None:
        """Discard what was prefetched for the runs of blocks numbered ``first`` and later, and not read."""
        for reference, copied_bytes in [(r, n) for r, (_, n, number) in self._ahead.copy().items() if number >= first]:
            saved = reference()
            if saved is not None and copied_bytes:
                self._mover.discard(saved)
            self._forget(reference)

    def _forget(self, reference: weakref.ref[SavedT]) -> None:
        nbytes, copied_bytes, _ = self._ahead.pop(reference, _NOTHING)
        self._taken_bytes -= nbytes
        self.ahead_bytes -= copied_bytes
