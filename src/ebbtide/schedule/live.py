"""A running sum of the bytes of objects that are alive."""

from __future__ import annotations

import weakref
from collections import deque

from ebbtide.schedule.mover import Saved


class LiveBytes:
    """The bytes of the live ones of many objects, without visiting each: the sum is read at every saved tensor."""

    def __init__(self) -> None:
        self._bytes: dict[weakref.ref[Saved], int] = {}
        self._dead: deque[weakref.ref[Saved]] = deque()
        self._total = 0

    def add(self, item: Saved) -> None:
        """Count an object as long as it lives."""
        if self._dead:  # nobody may ever ask for the sum
            self._forget_dead()
        self._bytes[weakref.ref(item, self._dead.append)] = item.nbytes  # nothing interrupts a deque's ``append``
        self._total += item.nbytes

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
