"""The schedule: when copies begin, when sources are dropped, how far copy-in runs ahead.

[Note: window]
Copy-out: a source stays until its copy is done. When the bytes still waiting exceed the window, compute waits for the
oldest copy; that is a stall, and is counted. Copy-in: from the first sign of backward in a block on, what comes next is
brought in, never more ahead of its reader than the window, however many blocks that reaches over. Unless the user gives
a window it follows the model: two of its largest block's offloaded bytes on the way out (one being made, one being
copied), one of them on the way in. A device that has no room for what comes in makes that window smaller.

[Note: turn-around]
What is saved last is read first. Copies that have not begun when backward begins are withdrawn, and the bytes are
served from the source. Where the store cannot withdraw (what was asked of a stream is done), the last bytes of a pass,
as many as the window in holds, are *held back*: the trace for this is how many bytes the pass before offered. A pass
that turns out longer begins the oldest of them when more would be held; a shorter one holds less. Bytes held back count
as bytes in the window, so memory is the same with and without a trace that fits.

[Note: groups of copies]
What is asked of a stream costs the host microseconds, and a block saves dozens of tensors. So where copies are asked of
streams, sources are *gathered*, and their copies begin together: when they are a quarter of the window, when the
window is full, or when their block's forward ends, whichever comes first. On the way in the window is filled again
when a quarter of it is free, by a quarter at a time: a reader waits for its group. What is gathered counts as in
flight.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ebbtide.base.actions import Action
from ebbtide.base.errors import CapError, note_place
from ebbtide.engine.marks import marked
from ebbtide.engine.passes import Pass, RunRecord
from ebbtide.engine.tickets import Entry, KeptStorage
from ebbtide.engine.window import Window
from ebbtide.store.device import StreamHandle
from ebbtide.store.protocol import Slot, Tier

logger = logging.getLogger("ebbtide.engine")


class LiveBytes:
    """The bytes of those of many entries that are alive, without a look at each: it is asked at every saved tensor."""

    def __init__(self) -> None:
        self._bytes: dict[weakref.ref[Entry | KeptStorage], int] = {}
        self._dead: deque[weakref.ref[Entry | KeptStorage]] = deque()
        self._total = 0

    def add(self, entry: Entry | KeptStorage) -> None:
        """Count an entry, or a storage without one, as long as it lives."""
        self._bytes[weakref.ref(entry, self._dead.append)] = entry.nbytes  # nothing interrupts a deque's ``append``
        self._total += entry.nbytes

    def remove(self, entry: Entry) -> None:
        """Count an entry no longer."""
        self._total -= self._bytes.pop(weakref.ref(entry), 0)

    @property
    def total(self) -> int:
        """Bytes of the entries that are alive."""
        while self._dead:
            self._total -= self._bytes.pop(self._dead.popleft(), 0)
        if not self._bytes:
            self._total = 0  # whatever an interrupt left of a sum
        return self._total


class _Waiting(NamedTuple):
    """An entry whose source is still there: its copy runs, or is held back."""

    entry: weakref.ref[Entry]
    nbytes: int
    pass_: Pass
    stream: StreamHandle | None = None  # on which it was saved
    stayed: bool = False  # its pass, which is over, counted it as kept


class CopyOut:
    """Copies from the device to the store: under way, or held back; oldest first.

    Args:
        tier: The store.
        window: Bounds the bytes of both.
    """

    def __init__(self, tier: Tier, window: Window) -> None:
        self.window = window
        self.in_flight_bytes = self.refused_bytes = 0
        self._tier, self._can_cancel = tier, tier.can_cancel
        self._queue: deque[_Waiting] = deque()
        self._held: deque[_Waiting] = deque()
        self._held_live = LiveBytes()
        self._gathered: list[_Waiting] = []
        self._gathered_bytes = 0
        self._expected_bytes = sys.maxsize  # what a pass offers; unknown before the first has ended

    @property
    def held_bytes(self) -> int:
        """Bytes held back for the turn-around."""
        return self._held_live.total

    def add(self, entry: Entry, pass_: Pass) -> None:
        """Begin the copy of an entry whose source is there, or hold it back; wait while the window is exceeded."""
        stream = None if self._can_cancel or entry.source is None else self._tier.stream_of(entry.source)
        waiting = _Waiting(weakref.ref(entry), entry.nbytes, pass_, stream)
        late = pass_.offered_bytes >= self._expected_bytes - self.window.held_bytes
        pass_.offered_bytes += entry.nbytes
        if self._can_cancel:
            self.in_flight_bytes += waiting.nbytes
            self._begin([waiting], waiting)
        elif not late:
            if not self._gather(waiting, new=waiting) and self._in_window:
                return
        else:
            self._held.append(waiting)
            self._held_live.add(entry)
            while self._held and self._held_live.total > self.window.held_bytes:
                begun = self._held.popleft()
                self._is_held_no_more(begun)
                self._gather(begun._replace(stayed=begun.pass_ is not pass_), new=waiting)
        self.retire(new=waiting)

    @property
    def _in_window(self) -> bool:
        held_bytes = self._held_live.total if self._held else 0
        return self.in_flight_bytes + held_bytes <= self.window.out_bytes

    def end_pass(self, pass_: Pass) -> None:
        """A forward is over: what it holds back stayed, and the next one is expected to offer as much."""
        if pass_.offered_bytes:
            self._expected_bytes = pass_.offered_bytes
        self._held = deque(waiting for waiting in self._held if waiting.entry() is not None)
        for waiting in self._held:
            entry = waiting.entry()
            if waiting.pass_ is pass_ and entry is not None:
                pass_.stayed(entry.site, waiting.nbytes)

    def begin(self, new: _Waiting | None = None) -> None:
        """Begin the copies of what is gathered. See [Note: groups of copies].

        Args:
            new: One that is being offloaded now, and that nobody has counted yet.
        """
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if gathered:
            self._begin(gathered, new)

    def retire(self, *, settle: bool = False, new: _Waiting | None = None) -> None:
        """Drop the sources of finished copies; make compute wait while more than the window is in flight.

        Args:
            settle: Wait for all of them.
            new: See ``begin``.
        """
        if self._queue:
            self._drop_copied(sys.maxsize)
        if settle or not self._in_window:
            self.begin(new)
            self._drop_copied(-1 if settle else self.window.out_bytes)
        if not self._queue and not self._gathered:
            self.in_flight_bytes = 0  # whatever an interrupt left of a count

    def _drop_copied(self, limit_bytes: int) -> None:
        """Drop the sources of finished copies, oldest first; compute waits for one while more bytes are in flight."""
        while self._queue:
            entry = self._queue[0].entry()
            if entry is not None and entry.source is not None and entry.slot is not None:
                try:
                    if not entry.slot.parked:
                        if self.in_flight_bytes + self._held_live.total <= limit_bytes:
                            break
                        entry.slot.wait_parked()
                except BaseException as error:
                    # It keeps its source. Said once: the block that this error leaves asks again when it ends.
                    self.in_flight_bytes -= self._queue.popleft().nbytes
                    note_place(error, f"while copying out {entry.site} ({entry.action.value})")
                    raise
                entry.tainted = entry.changed
                entry.source = None
            del entry
            self.in_flight_bytes -= self._queue.popleft().nbytes

    def cancel(self, pass_: Pass) -> None:
        """Cancel the copies of a pass that have not begun. See [Note: turn-around]."""
        for waiting in self._held:
            if waiting.pass_ is pass_:
                self._is_held_no_more(waiting)
        self._held = deque(waiting for waiting in self._held if waiting.pass_ is not pass_)
        self._gathered = [waiting for waiting in self._gathered if waiting.pass_ is not pass_]
        self._gathered_bytes = sum(waiting.nbytes for waiting in self._gathered)
        remaining: deque[_Waiting] = deque()
        for waiting in self._queue:
            entry = waiting.entry()
            if entry is None or entry.slot is None or entry.source is None:
                continue
            if waiting.pass_ is pass_:
                slot, entry.slot = entry.slot, None  # first: interrupted here, the bytes are served from the source
                if slot.cancel():
                    continue
                entry.slot = slot
            remaining.append(waiting)
        self._queue = remaining
        self.in_flight_bytes = self._gathered_bytes + sum(waiting.nbytes for waiting in remaining)

    def _is_held_no_more(self, waiting: _Waiting) -> None:
        entry = waiting.entry()
        if entry is not None:
            self._held_live.remove(entry)

    def _gather(self, waiting: _Waiting, *, new: _Waiting) -> bool:
        """Begin the copy of an entry with those of others; returns whether a group of copies has begun."""
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

    def _begin(self, group: Sequence[_Waiting], new: _Waiting | None) -> None:
        """Ask the store to take entries that were saved on one stream and count as in flight."""
        ready: list[tuple[_Waiting, Entry, torch.Tensor]] = []
        for waiting in group:
            entry = waiting.entry()
            source = None if entry is None else entry.source
            # Changed, or its memory taken away, meanwhile: plain autograd could not read it either.
            if entry is None or source is None or entry.changed or source.untyped_storage().nbytes() < entry.last:
                self.in_flight_bytes -= waiting.nbytes
            else:
                ready.append((waiting, entry, source))
        if not ready:
            return
        try:
            work = functools.partial(self._tier.park_all, [source for _, _, source in ready], compute=group[0].stream)
            slots = marked("copy_out", work)
        except BaseException as error:
            self.in_flight_bytes -= sum(waiting.nbytes for waiting, _, _ in ready)
            note_place(error, f"while copying out {ready[0][1].site} ({ready[0][1].action.value})")
            raise
        for (waiting, entry, _), slot in zip(ready, slots, strict=True):
            if isinstance(slot, CapError):
                self.in_flight_bytes -= waiting.nbytes
                self._is_refused(waiting, entry, slot, counted=not waiting.stayed and waiting is not new)
            else:
                entry.slot = slot
                self._queue.append(waiting)

    def _is_refused(self, waiting: _Waiting, entry: Entry, error: CapError, *, counted: bool) -> None:
        """Keep an entry that the store cannot take; ``counted``: its pass has counted it as offloaded."""
        entry.action = Action.KEEP
        if not self.refused_bytes:
            # As text: a log record may be kept, and an error holds the frames it came through.
            logger.warning("what the store cannot take stays on the device: %s", str(error))
        self.refused_bytes += entry.nbytes
        if counted:
            waiting.pass_.stayed(entry.site, waiting.nbytes)


_Coming = tuple[weakref.ref[Entry], Entry, int, Slot]
"""What is to be brought in: an entry, the number of its block's run, its slot."""


class CopyIn:
    """Brings entries in ahead of their readers, in one backward.

    Args:
        run: The block in which the backward showed first.
        window: Bounds the bytes brought in and not yet read.
        tier: The store.
    """

    def __init__(self, run: RunRecord, window: Window, tier: Tier) -> None:
        self.window, self._tier, self._can_cancel = window, tier, tier.can_cancel
        self.ahead_bytes = 0
        self._requested: dict[weakref.ref[Entry], tuple[int, int]] = {}  # bytes, and the number of the block's run
        self._upcoming = _walk(run)
        self._later: deque[tuple[weakref.ref[Entry], int]] = deque()  # met already, and comes before those

    def advance(self) -> None:
        """Begin as many copies as the window allows, once a group of them fits. See [Note: groups of copies]."""
        group_bytes = 0 if self._can_cancel else self.window.gathered_bytes
        if self.ahead_bytes and self.ahead_bytes > self.window.in_bytes - group_bytes:
            return
        while group := self._coming(group_bytes):
            if not self._begin_group(group):
                return

    def _begin_group(self, group: Sequence[_Coming]) -> bool:
        """Begin the copies of a group; returns whether the device had room for all."""
        try:
            refused = marked("copy_in", functools.partial(self._tier.prefetch, [slot for _, _, _, slot in group]))
        except torch.OutOfMemoryError:
            refused = len(group)
        except BaseException as error:
            site = group[0][1].site
            note_place(error, f"while bringing in {site} ({group[0][1].action.value}) ahead of its reader")
            raise
        begun = group[: len(group) - refused]
        for _, entry, number, _ in begun:
            self._requested[weakref.ref(entry, self._forget)] = entry.nbytes, number
            self.ahead_bytes += entry.nbytes
        if refused:
            self.window.shrink(self.ahead_bytes)
            later = [(reference, number) for reference, _, number, _ in group[len(begun) :]]
            self._later.extendleft(reversed(later))
        return not refused

    def _coming(self, group_bytes: int) -> list[_Coming]:
        """Return what comes next and fits into the window; of a group at most, if copies are grouped."""
        group: list[_Coming] = []
        grouped: set[weakref.ref[Entry]] = set()  # what two blocks saved is in the orders of both
        ahead_bytes = self.ahead_bytes
        while (upcoming := self._later.popleft() if self._later else next(self._upcoming, None)) is not None:
            reference, number = upcoming
            entry = reference()
            if entry is None or entry.slot is None or entry.source is not None or entry.restored is not None:
                continue
            if reference in self._requested or reference in grouped or entry.live_storage is not None:
                continue
            if ahead_bytes and ahead_bytes + entry.nbytes > self.window.in_bytes:
                self._later.appendleft(upcoming)
                break
            group.append((reference, entry, number, entry.slot))
            grouped.add(reference)
            ahead_bytes += entry.nbytes
            if ahead_bytes - self.ahead_bytes >= group_bytes:
                break
        return group

    def has_read(self, entry: Entry) -> None:
        """An entry was read: its bytes no longer count as ahead."""
        self.ahead_bytes -= self._requested.pop(weakref.ref(entry), (0, 0))[0]
        free_bytes = self.window.in_bytes - self.ahead_bytes
        if not self.ahead_bytes or self._can_cancel or free_bytes >= self.window.gathered_bytes:
            self.advance()

    def reach(self, run: RunRecord) -> None:
        """A block's backward begins: what blocks before the last one did not come for is in the way of what comes."""
        self._put_back(run.number + 2)

    def put_back(self) -> None:
        """Let go of all that was brought in and not read."""
        self._put_back(0)

    def _put_back(self, first: int) -> None:
        """Let go of what was brought in for the runs of blocks numbered ``first`` and later."""
        for reference in [r for r, (_, number) in self._requested.items() if number >= first]:
            entry = reference()
            if entry is not None and entry.slot is not None:
                entry.slot.put_back()
            self._forget(reference)

    def _forget(self, reference: weakref.ref[Entry]) -> None:
        self.ahead_bytes -= self._requested.pop(reference, (0, 0))[0]


class Backward:
    """What is remembered during one backward, and dropped at its end."""

    def __init__(self) -> None:
        self.flows: dict[int, CopyIn] = {}  # by pass
        self.restored: list[weakref.ref[Entry]] = []
        self.run: RunRecord | None = None


def flow_of(backward: Backward | None, run: RunRecord | None) -> CopyIn | None:
    """Return the copies in of a block's pass in a backward, if both are known."""
    return backward.flows.get(id(run.pass_)) if backward is not None and run is not None else None


def _walk(run: RunRecord | None) -> Iterator[tuple[weakref.ref[Entry], int]]:
    # Yields references: a suspended generator would keep an entry, and with it a slot, alive.
    while run is not None:
        number = run.number
        for reference in run.backward_order():
            yield reference, number
        run = run.previous
