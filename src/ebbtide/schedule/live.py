"""How many objects are alive, and a running sum of their bytes.

[Note: counted while alive]
What is counted has no ``__del__``: Python runs that before it clears weak references, and another thread would find the
dying object through them; and an interrupt in it would be lost, with the count wrong for ever. Python's own count of
references to a mark, which each object holds, has neither fault, and needs no object besides them: the garbage
collector visits all that live from forward to backward. Where bytes are summed, a weak reference of each object removes
itself: nothing interrupts the ``append`` of a deque.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import Any

from ebbtide.schedule.mover import Saved, SavedT


class LiveCount:
    """The number of live objects that hold ``mark``. See [Note: counted while alive]."""

    __slots__ = ("_others", "mark")

    def __init__(self) -> None:
        self.mark = object()
        self._others = sys.getrefcount(self.mark)

    def __len__(self) -> int:
        return sys.getrefcount(self.mark) - self._others


class LiveBytes:
    """The bytes of the live ones of many objects, without visiting each: the sum is read at every saved tensor."""

    def __init__(self) -> None:
        self._bytes: dict[weakref.ref[Any], int] = {}
        self._dead: deque[weakref.ref[Any]] = deque()
        self._note_dead = self._dead.append  # one object for all references
        self._total = 0

    def add(self, item: SavedT) -> weakref.ref[SavedT]:
        """Count an object as long as it lives; returns a reference to it."""
        if self._dead:  # nobody may ever ask for the sum
            self._forget_dead()
        self._bytes[reference := weakref.ref(item, self._note_dead)] = item.nbytes
        self._total += item.nbytes
        return reference

    def remove(self, item: Saved) -> None:
        """Count an object no longer."""
        self._total -= self._bytes.pop(weakref.ref(item), 0)

    @property
    def total(self) -> int:
        """Bytes of the objects that are alive."""
        if self._dead:
            self._forget_dead()
        if not self._bytes:
            self._total = 0  # an interrupt may have left a wrong sum
        return self._total

    def _forget_dead(self) -> None:
        while self._dead:
            self._total -= self._bytes.pop(self._dead.popleft(), 0)
