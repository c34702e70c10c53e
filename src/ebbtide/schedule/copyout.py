"""Copies from the device to the store. See [Note: start of backward] and [Note: groups of copies]."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple

from ebbtide.schedule.live import LiveBytes
from ebbtide.schedule.mover import Forward, Mover, Outcome, SavedT
from ebbtide.schedule.window import Window


class _Waiting(NamedTuple, Generic[SavedT]):
    """A storage whose source is still there: its copy runs, or is held back."""

    saved: weakref.ref[SavedT]
    nbytes: int
    forward: Forward
    stream: Hashable = None  # on which it was made
    stayed: bool = False  # its forward, which is over, counted it as kept


class _Group(NamedTuple, Generic[SavedT]):
    """Storages whose copies began together, and are done together."""

    members: Sequence[_Waiting[SavedT]]
    nbytes: int

    @classmethod
    def of(cls, members: Sequence[_Waiting[SavedT]]) -> _Group[SavedT]:
        return cls(members, sum([waiting.nbytes for waiting in members]))


class CopyOut(Generic[SavedT]):
    """Copies from the device to the store: in flight or held back, both within the window; oldest first."""

    def __init__(self, mover: Mover[SavedT], window: Window) -> None:
        self.window = window
        self.in_flight_bytes = self.refused_bytes = 0
        self._mover = mover
        self._queue: deque[_Group[SavedT]] = deque()
        self._held: deque[_Waiting[SavedT]] = deque()
        self._held_live = LiveBytes()
        self._gathered: list[_Waiting[SavedT]] = []
        self._gathered_bytes = 0
        self._postponed: list[_Waiting[SavedT]] = []
        self._expected_bytes = sys.maxsize  # that a forward offers; unknown before the first has ended

    @property
    def held_bytes(self) -> int:
        """Bytes held back for backward."""
        return self._held_live.total

    def add(
        self, saved: SavedT, forward: Forward, stream: Hashable = None, *, postponed: _Waiting[SavedT] | None = None
    ) -> None:
        """Begin the copy of a storage whose source is there, or hold it back; wait while the window is exceeded.

        Args:
            saved: The storage.
            forward: What it was saved in.
            stream: On which it was made; copies of one group have one.
            postponed: What ``postpone`` noted of it: its forward has counted it by now.
        """
        new, waiting = None, postponed
        if waiting is None:
            new = waiting = _Waiting(weakref.ref(saved), saved.nbytes, forward, stream)
        nbytes = waiting.nbytes
        late = forward.offered_bytes >= self._expected_bytes - self.window.held_bytes
        forward.offered_bytes += nbytes
        if not late:
            begun = self._gather(waiting, new=new)
            if not begun and not self._held and self.in_flight_bytes <= self.window.out_bytes:  # as in ``retire``
                return
        else:
            self._held.append(waiting)
            self._held_live.add(saved)
            while self._held and self._held_live.total > self.window.held_bytes:
                begun = self._held.popleft()
                if (left := begun.saved()) is not None:
                    self._held_live.remove(left)
                self._gather(begun._replace(stayed=begun.forward is not forward), new=new)
        self.retire(new=new)

    def postpone(self, saved: SavedT, forward: Forward, stream: Hashable = None) -> None:
        """Leave a storage alone until ``resume``: its bytes may not be written yet."""
        self._postponed.append(_Waiting(weakref.ref(saved), saved.nbytes, forward, stream))

    @property
    def postponed(self) -> list[SavedT]:
        """What is postponed now."""
        return [saved for waiting in self._postponed if (saved := waiting.saved()) is not None]

    def resume(self) -> None:
        """Treat what is postponed as if it were added now."""
        postponed, self._postponed = self._postponed, []
        for waiting in postponed:
            saved = waiting.saved()
            if saved is not None:
                self.add(saved, waiting.forward, postponed=waiting)

    def expect(self, offered_bytes: int, *, to_its_end: bool) -> None:
        """The next forward is expected to offer this much.

        If not ``to_its_end``, its last block offers nothing, so its backward hides the first copy-ins, and nothing is
        held back.
        """
        self._expected_bytes = offered_bytes if to_its_end else sys.maxsize

    def end_forward(self, forward: Forward) -> None:
        """A forward is over: what it holds back stayed, and the next one is expected to offer as much."""
        if forward.offered_bytes:
            self.expect(forward.offered_bytes, to_its_end=forward.offers_last)
        self._held = deque([waiting for waiting in self._held if waiting.saved() is not None])
        own = [waiting for waiting in self._held if waiting.forward is forward]
        forward.stayed([(saved.site, waiting.nbytes) for waiting in own if (saved := waiting.saved()) is not None])

    def begin(self, new: _Waiting[SavedT] | None = None) -> None:
        """Begin the copies of what is gathered; nobody has counted ``new`` yet. See [Note: groups of copies]."""
        group, self._gathered, self._gathered_bytes = self._gathered, [], 0
        alive = [(waiting, saved) for waiting in group if (saved := waiting.saved()) is not None]
        self.in_flight_bytes -= sum([waiting.nbytes for waiting in group])
        if not alive:
            return
        outcomes = self._mover.copy_out([saved for _, saved in alive], group[0].stream)
        begun = [waiting for (waiting, _), outcome in zip(alive, outcomes, strict=True) if outcome is Outcome.BEGUN]
        if begun:
            self._queue.append(_Group.of(begun))
            self.in_flight_bytes += self._queue[-1].nbytes
        if len(begun) == len(alive):
            return
        for (waiting, saved), outcome in zip(alive, outcomes, strict=True):
            if outcome is Outcome.REFUSED:
                self.refused_bytes += waiting.nbytes
                if not waiting.stayed and waiting is not new:  # its forward has counted it as offloaded
                    waiting.forward.stayed([(saved.site, waiting.nbytes)])

    def retire(self, *, new: _Waiting[SavedT] | None = None) -> None:
        """Release the sources of finished copies; make compute wait while more than the window is in flight."""
        if self._queue:
            self._release_copied()
        held_bytes = self._held_live.total if self._held else 0
        if self.in_flight_bytes + held_bytes > self.window.out_bytes:
            self.begin(new)
            self._release_copied(self.window.out_bytes)
        if not self._queue and not self._gathered:
            self.in_flight_bytes = 0  # an interrupt may have left a wrong count

    def _release_copied(self, limit_bytes: int | None = None) -> None:
        """Release sources of finished copies, oldest first; compute waits for one while more bytes are in flight."""
        while self._queue:
            group = [saved for waiting in self._queue[0].members if (saved := waiting.saved()) is not None]
            try:
                if group and not self._mover.release_sources(group, wait=False):
                    if limit_bytes is None or self.in_flight_bytes + self._held_live.total <= limit_bytes:
                        break
                    self._mover.release_sources(group, wait=True)
            except BaseException:
                # They keep their sources. Raised once: the block that this error leaves tries again when it ends.
                self.in_flight_bytes -= self._queue.popleft().nbytes
                raise
            del group
            self.in_flight_bytes -= self._queue.popleft().nbytes

    def cancel(self, forward: Forward) -> None:
        """Cancel the copies of a forward that have not begun. See [Note: start of backward]."""
        self._postponed = [waiting for waiting in self._postponed if waiting.forward is not forward]
        for waiting in self._held:
            if waiting.forward is forward and (saved := waiting.saved()) is not None:
                self._held_live.remove(saved)
        self._held = deque(waiting for waiting in self._held if waiting.forward is not forward)
        self._gathered = [waiting for waiting in self._gathered if waiting.forward is not forward]
        self._gathered_bytes = sum(waiting.nbytes for waiting in self._gathered)
        remaining: deque[_Group[SavedT]] = deque()
        for group in self._queue:
            members = [waiting for waiting in group.members if not self._cancelled(waiting, forward)]
            if members:
                remaining.append(_Group.of(members))
        self._queue = remaining
        self.in_flight_bytes = self._gathered_bytes + sum(group.nbytes for group in remaining)

    def _cancelled(self, waiting: _Waiting[SavedT], forward: Forward) -> bool:
        """Cancel a copy if it is of a forward and has not begun; return whether it needs no more attention."""
        saved = waiting.saved()
        return saved is None or (waiting.forward is forward and self._mover.cancel_copy_out(saved))

    def _gather(self, waiting: _Waiting[SavedT], *, new: _Waiting[SavedT] | None) -> bool:
        """Begin the copy of a storage with those of others; returns whether a group of copies has begun."""
        begun = False
        if self._gathered and self._gathered[-1].stream != waiting.stream:
            self.begin(new)
            begun = True
        self._gathered.append(waiting)
        self._gathered_bytes += waiting.nbytes
        self.in_flight_bytes += waiting.nbytes
        if self._gathered_bytes >= self.window.gathered_bytes:
            self.begin(new)
            begun = True
        return begun
