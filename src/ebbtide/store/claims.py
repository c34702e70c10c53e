"""What objects hold, to be released when they are dead.

[Note: death and interrupts]
Saved tensors, and what serves them, die in the middle of a backward, within torch's C++ code: an exception that a
Python function raises there reaches nobody. A signal that came while torch computed is noticed in the first Python
function that the main thread runs, so with a ``__del__`` or a callback in Python about every second Ctrl-C was lost. So
nothing in Python runs when such an object dies: a weak reference appends itself to a deque, which is C and notices no
signal, and what the object held is released at the next use of the store. This also works in any thread, and within the
garbage collector, while somebody holds the store's lock. Slots in host memory have a ``__del__``: the backward of a
device runs in a thread of its own, where no signal is noticed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Held = TypeVar("_Held")


class Claim(weakref.ref[Any], Generic[_Held]):
    """A weak reference to an object, with what that object holds."""

    __slots__ = ("held",)
    held: _Held
    __eq__, __hash__ = object.__eq__, object.__hash__  # the object may have no hash


class Claims(Generic[_Held]):
    """What objects hold while they live. See [Note: death and interrupts]."""

    __slots__ = ("_dead", "_live", "_note_dead")

    def __init__(self) -> None:
        self._live: set[Claim[_Held]] = set()  # a reference that is dead itself would tell nobody
        self._dead: deque[Claim[_Held]] = deque()
        self._note_dead = self._dead.append  # one object for all references

    def add(self, holder: object, held: _Held) -> Claim[_Held]:
        """Note what an object holds until it is dead; ``give_back`` takes the claim that is returned."""
        claim: Claim[_Held] = Claim(holder, self._note_dead)
        claim.held = held
        self._live.add(claim)
        return claim

    def give_back(self, claim: Claim[_Held]) -> None:
        """Release what an object holds as if it were dead; may be repeated."""
        self._note_dead(claim)

    def release_dead(self, release: Callable[[_Held], None]) -> None:
        """Release what dead objects held.

        Args:
            release: Releases it; called again, at the next time, if it was interrupted.
        """
        while self._dead:
            claim = self._dead[0]
            release(claim.held)
            self._live.discard(claim)
            self._dead.popleft()  # last

    def clear(self) -> None:
        """Forget all, and release nothing."""
        self._live.clear()
        self._dead.clear()
