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


class CopyIn(Generic[SavedT]):
    """Prefetches storages ahead of their readers, in one backward.

    Args:
        upcoming: What the backward will read.
        window: Bounds the bytes copied in and not yet read.
        mover: Carries the copies out.
    """

    def __init__(self, upcoming: Upcoming[SavedT], window: Window, mover: Mover[SavedT]) -> None:
        self.window, self._mover, self._can_cancel = window, mover, mover.can_cancel
        self.ahead_bytes = 0  # requested and not read; what died since is subtracted by ``advance``
        self._requested: dict[weakref.ref[SavedT], tuple[int, int]] = {}  # bytes, and the number of the block's run
        self._dead: deque[weakref.ref[SavedT]] = deque()
        self._note_dead = self._dead.append  # which nothing interrupts; one object for all references
        self._upcoming = upcoming
        self._later: deque[tuple[weakref.ref[SavedT], int]] = deque()  # met already, and comes before those

    def advance(self) -> None:
        """Begin as many copies as the window allows, once a group of them fits. See [Note: groups of copies]."""
        group_bytes = 0 if self._can_cancel else self.window.gathered_bytes
        while self._dead:
            self._forget(self._dead.popleft())
        if self.ahead_bytes and self.ahead_bytes > self.window.in_bytes - group_bytes:
            return
        while group := self._next_group(group_bytes):
            if not self._begin(group):
                return

    def _begin(self, group: Sequence[tuple[SavedT, int]]) -> bool:
        """Begin the copies of a group; returns whether the device had room for all."""
        refused = self._mover.copy_in([saved for saved, _ in group])
        begun = len(group) - refused
        for saved, number in group[:begun]:
            self._requested[weakref.ref(saved, self._note_dead)] = saved.nbytes, number
            self.ahead_bytes += saved.nbytes
        if refused:
            self.window.shrink(self.ahead_bytes)
            self._later.extendleft(reversed([(weakref.ref(saved), number) for saved, number in group[begun:]]))
        return not refused

    def _next_group(self, group_bytes: int) -> list[tuple[SavedT, int]]:
        """Return what comes next and fits into the window; of a group at most, if copies are grouped."""
        group: list[tuple[SavedT, int]] = []
        grouped: set[weakref.ref[SavedT]] = set()  # what two blocks saved is in the orders of both
        ahead_bytes = self.ahead_bytes
        while True:
            if not self._later:
                references, number = next(self._upcoming, (None, 0))
                if references is None:
                    break
                self._later.extend([(reference, number) for reference in references])
                continue
            upcoming = reference, number = self._later.popleft()
            saved = reference()
            if saved is None or reference in self._requested or reference in grouped:
                continue
            if not self._mover.is_stored(saved):
                continue
            if ahead_bytes and ahead_bytes + saved.nbytes > self.window.in_bytes:
                self._later.appendleft(upcoming)
                break
            group.append((saved, number))
            grouped.add(reference)
            ahead_bytes += saved.nbytes
            if ahead_bytes - self.ahead_bytes >= group_bytes:
                break
        return group

    def has_read(self, saved: SavedT) -> None:
        """A storage was read: its bytes no longer count as ahead."""
        self.ahead_bytes -= self._requested.pop(weakref.ref(saved), (0, 0))[0]
        free_bytes = self.window.in_bytes - self.ahead_bytes
        if not self.ahead_bytes or self._can_cancel or free_bytes >= self.window.gathered_bytes or self._dead:
            self.advance()

    def reach(self, number: int) -> None:
        """A block's backward begins: discard what was prefetched for blocks before the last one, and never read.

        Args:
            number: Of the block's run.
        """
        self._discard(number + 2)

    def discard(self) -> None:
        """Discard all that was prefetched and not read."""
        self._discard(0)

    def _discard(self, first: int) -> None:
        """Discard what was prefetched for the runs of blocks numbered ``first`` and later."""
        for reference in [r for r, (_, number) in self._requested.copy().items() if number >= first]:
            saved = reference()
            if saved is not None:
                self._mover.discard(saved)
            self._forget(reference)

    def _forget(self, reference: weakref.ref[SavedT]) -> None:
        self.ahead_bytes -= self._requested.pop(reference, (0, 0))[0]
