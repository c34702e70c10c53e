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
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ebbtide.base.actions import Action
from ebbtide.base.errors import CapError, note_place
from ebbtide.base.units import format_size
from ebbtide.engine.marks import marked
from ebbtide.engine.passes import Pass, RunRecord
from ebbtide.engine.tickets import Entry
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide.engine")

LEAST_WINDOW = 16 * 1024**2
"""Smallest window that follows the model: below this, copies are too short to hide anything."""


BACKWARDS_WITH_ROOM = 50
"""After so many the window that a full device has made smaller grows again."""

_LEAST_ROOM = 1024**2
"""What it grows to at least: a device that had no room at all would else need a thousand backwards."""


class Window:
    """Bytes allowed in flight each way. See [Note: window].

    Args:
        fixed_bytes: What the user asked for; None: follow the model.
    """

    def __init__(self, fixed_bytes: int | None) -> None:
        self._fixed_bytes = fixed_bytes
        self._block_bytes = 0
        self._room_bytes = sys.maxsize
        self._backwards = 0  # since the room was found too small, or was made larger

    def saw_block(self, offloaded_bytes: int) -> None:
        """A block offloaded this much."""
        self._block_bytes = max(self._block_bytes, offloaded_bytes)

    def shrink(self, ahead_bytes: int) -> None:
        """The device has no room beside ``ahead_bytes`` that were brought in: bring in half of that from now on.

        Args:
            ahead_bytes: What was brought in; 0: nothing was, for there was too little room before.
        """
        smaller = (ahead_bytes or self.in_bytes) // 2
        first, self._room_bytes = self._room_bytes == sys.maxsize, min(self._room_bytes, smaller)
        self._backwards = 0
        if first:
            logger.warning(
                "the device has no room for a window of %s beside what backward needs: copies in run less far ahead, "
                "and compute may wait for them; a smaller window, or offloading less, makes room",
                format_size(self._fixed_bytes or max(self._block_bytes, LEAST_WINDOW)),
            )

    def recover(self) -> None:
        """A backward begins: after many that had room, bring in twice as much."""
        self._backwards += 1
        if self._backwards > BACKWARDS_WITH_ROOM and self._room_bytes != sys.maxsize:
            self._room_bytes, self._backwards = min(max(2 * self._room_bytes, _LEAST_ROOM), sys.maxsize - 1), 0

    @property
    def out_bytes(self) -> int:
        """Window of the copy-out; without a limit until the first block was seen whole."""
        if self._fixed_bytes is None and not self._block_bytes:
            return sys.maxsize
        return self._fixed_bytes or max(2 * self._block_bytes, LEAST_WINDOW)

    @property
    def in_bytes(self) -> int:
        """Window of the copy-in."""
        return min(self._fixed_bytes or max(self._block_bytes, LEAST_WINDOW), self._room_bytes)

    @property
    def held_bytes(self) -> int:
        """Most bytes held back for the turn-around."""
        return min(self.in_bytes, self.out_bytes)


class LiveBytes:
    """The bytes of those entries of many that are alive, without a look at each: it is asked at every saved tensor."""

    def __init__(self) -> None:
        self._bytes: dict[weakref.ref[Entry], int] = {}
        self._dead: deque[weakref.ref[Entry]] = deque()
        self._total = 0

    def add(self, entry: Entry) -> None:
        """Count an entry as long as it lives."""
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


class CopyOut:
    """Copies from the device to the store: under way, or held back; oldest first.

    Args:
        tier: The store.
        window: Bounds the bytes of both.
    """

    def __init__(self, tier: Tier, window: Window) -> None:
        self.window = window
        self.in_flight_bytes = self.refused_bytes = 0
        self._tier = tier
        self._queue: deque[_Waiting] = deque()
        self._held: deque[_Waiting] = deque()
        self._held_live = LiveBytes()
        self._expected_bytes = sys.maxsize  # what a pass offers; unknown before the first has ended

    @property
    def held_bytes(self) -> int:
        """Bytes held back for the turn-around."""
        return self._held_live.total

    def add(self, entry: Entry, pass_: Pass) -> None:
        """Begin the copy of an entry whose source is there, or hold it back; wait while the window is exceeded."""
        waiting = _Waiting(weakref.ref(entry), entry.nbytes, pass_)
        late = pass_.offered_bytes >= self._expected_bytes - self.window.held_bytes
        pass_.offered_bytes += entry.nbytes
        if self._tier.can_cancel or not late:
            self._begin(waiting)
        else:
            self._held.append(waiting)
            self._held_live.add(entry)
            while self._held and self.held_bytes > self.window.held_bytes:
                begun = self._held.popleft()
                self._is_held_no_more(begun)
                self._begin(begun, counted=begun is not waiting and begun.pass_ is pass_)
        self.retire()

    def end_pass(self, pass_: Pass) -> None:
        """A forward is over: what it holds back stayed, and the next one is expected to offer as much."""
        if pass_.offered_bytes:
            self._expected_bytes = pass_.offered_bytes
        self._held = deque(waiting for waiting in self._held if waiting.entry() is not None)
        for waiting in self._held:
            entry = waiting.entry()
            if waiting.pass_ is pass_ and entry is not None:
                pass_.stayed(entry.site, waiting.nbytes)

    def retire(self, *, settle: bool = False) -> None:
        """Drop the sources of finished copies; make compute wait while more than the window is in flight.

        Args:
            settle: Wait for all of them.
        """
        while self._queue:
            entry = self._queue[0].entry()
            if entry is not None and entry.source is not None and entry.slot is not None:
                try:
                    if not entry.slot.parked:
                        if not settle and self.in_flight_bytes + self.held_bytes <= self.window.out_bytes:
                            break
                        entry.slot.wait_parked()
                except BaseException as error:
                    # It keeps its source. Said once: the block that this error leaves asks again when it ends.
                    self.in_flight_bytes -= self._queue.popleft().nbytes
                    note_place(error, f"while copying out {entry.site} ({entry.action.value})")
                    raise
                drop_source(entry)
            del entry
            self.in_flight_bytes -= self._queue.popleft().nbytes
        if not self._queue:
            self.in_flight_bytes = 0  # whatever an interrupt left of a count

    def cancel(self, pass_: Pass) -> None:
        """Cancel the copies of a pass that have not begun. See [Note: turn-around]."""
        for waiting in self._held:
            if waiting.pass_ is pass_:
                self._is_held_no_more(waiting)
        self._held = deque(waiting for waiting in self._held if waiting.pass_ is not pass_)
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
        self.in_flight_bytes = sum(waiting.nbytes for waiting in remaining)

    def _is_held_no_more(self, waiting: _Waiting) -> None:
        entry = waiting.entry()
        if entry is not None:
            self._held_live.remove(entry)

    def _begin(self, waiting: _Waiting, *, counted: bool = False) -> None:
        """Ask the store to take an entry; ``counted``: its pass, which runs, has counted it as offloaded."""
        entry = waiting.entry()
        if entry is None or entry.source is None:
            return
        if entry.changed or entry.source.untyped_storage().nbytes() < entry.last:
            return  # changed, or its memory taken away, while it was held: plain autograd could not read it either
        try:
            entry.slot = marked("copy_out", functools.partial(self._tier.park, entry.source))
        except CapError as error:
            entry.action = Action.KEEP
            if not self.refused_bytes:
                # As text: a log record may be kept, and an error holds the frames it came through.
                logger.warning("what the store cannot take stays on the device: %s", str(error))
            self.refused_bytes += entry.nbytes
            if counted:
                waiting.pass_.stayed(entry.site, waiting.nbytes)
            return
        except BaseException as error:
            note_place(error, f"while copying out {entry.site} ({entry.action.value})")
            raise
        self._queue.append(waiting)
        self.in_flight_bytes += waiting.nbytes


def drop_source(entry: Entry) -> None:
    """Let go of the device memory of an entry whose copy-out is done."""
    entry.tainted = entry.changed
    entry.source = None


class CopyIn:
    """Brings entries in ahead of their readers, in one backward.

    Args:
        run: The block in which the backward showed first.
        window: Bounds the bytes brought in and not yet read.
    """

    def __init__(self, run: RunRecord, window: Window) -> None:
        self.window = window
        self.ahead_bytes = 0
        self._requested: dict[weakref.ref[Entry], tuple[int, int]] = {}  # bytes, and the number of the block's run
        self._next: tuple[weakref.ref[Entry], int] | None = None
        self._upcoming = _walk(run)

    def advance(self) -> None:
        """Begin as many copies as the window allows."""
        while (upcoming := self._next or next(self._upcoming, None)) is not None:
            self._next = None
            reference, number = upcoming
            entry = reference()
            if entry is None or entry.slot is None or entry.source is not None or entry.restored is not None:
                continue
            if reference in self._requested or entry.live_storage is not None:
                continue
            if self.ahead_bytes and self.ahead_bytes + entry.nbytes > self.window.in_bytes:
                self._next = upcoming
                return
            try:
                marked("copy_in", entry.slot.prefetch)
            except torch.OutOfMemoryError:
                self.window.shrink(self.ahead_bytes)
                self._next = upcoming
                return
            except BaseException as error:
                note_place(error, f"while bringing in {entry.site} ({entry.action.value}) ahead of its reader")
                raise
            self._requested[weakref.ref(entry, self._forget)] = entry.nbytes, number
            self.ahead_bytes += entry.nbytes

    def has_read(self, entry: Entry) -> None:
        """An entry was read: its bytes no longer count as ahead."""
        self._forget(weakref.ref(entry))
        self.advance()

    def reach(self, run: RunRecord) -> None:
        """A block's backward begins: what blocks before the last one did not come for is in the way of what comes."""
        self._put_back(lambda number: number > run.number + 1)

    def put_back(self) -> None:
        """Let go of all that was brought in and not read."""
        self._put_back(lambda number: True)

    def _put_back(self, which: Callable[[int], bool]) -> None:
        for reference in [r for r, (_, number) in self._requested.items() if which(number)]:
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
        yield from ((reference, number) for reference in run.backward_order())
        run = run.previous
