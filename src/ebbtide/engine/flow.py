"""The schedule: when copies begin, when sources are dropped, how far copy-in runs ahead.

[Note: window]
Copy-out: a source stays until its copy is done. When the bytes still waiting exceed the window, compute waits for the
oldest copy; that is a stall, and is counted. Copy-in: from the first sign of backward in a block on, what comes next is
brought in, never more ahead of its reader than the window. Unless the user gives a window it follows the model: two of
its largest block's offloaded bytes on the way out (one being made, one being copied), one of them on the way in.

[Note: turn-around]
When backward begins, the sources of the last blocks are usually still there. Copies that have not begun are withdrawn,
and the bytes are served from the source.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebbtide.base.errors import note_place
from ebbtide.engine.tickets import Entry

if TYPE_CHECKING:
    from ebbtide.engine.run import BlockRun


LEAST_WINDOW = 16 * 1024**2
"""Smallest window that follows the model: below this, copies are too short to hide anything."""


class Window:
    """Bytes allowed in flight each way. See [Note: window].

    Args:
        given_bytes: What the user asked for; None: follow the model.
    """

    def __init__(self, given_bytes: int | None) -> None:
        self._given_bytes = given_bytes
        self._block_bytes = 0

    def saw_block(self, offloaded_bytes: int) -> None:
        """A block offloaded this much."""
        self._block_bytes = max(self._block_bytes, offloaded_bytes)

    @property
    def out_bytes(self) -> int:
        """Window of the copy-out; without a limit until the first block was seen whole."""
        if self._given_bytes is None and not self._block_bytes:
            return sys.maxsize
        return self._given_bytes or max(2 * self._block_bytes, LEAST_WINDOW)

    @property
    def in_bytes(self) -> int:
        """Window of the copy-in."""
        return self._given_bytes or max(self._block_bytes, LEAST_WINDOW)


class CopyOut:
    """Copies under way from the device to the store, oldest first."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.in_flight_bytes = 0
        self.stall_seconds = 0.0
        self._queue: deque[tuple[weakref.ref[Entry], int]] = deque()

    def add(self, entry: Entry) -> None:
        """Watch a copy that has just begun."""
        self._queue.append((weakref.ref(entry), entry.nbytes))
        self.in_flight_bytes += entry.nbytes

    def retire(self) -> float:
        """Drop the sources of finished copies; wait while more than the window is in flight. Returns the stall."""
        stall = 0.0
        while self._queue:
            entry = self._queue[0][0]()
            if entry is not None and entry.source is not None and entry.slot is not None:
                try:
                    if not entry.slot.parked:
                        if self.in_flight_bytes <= self.window.out_bytes:
                            break
                        stall += entry.slot.wait_parked()
                except BaseException as error:
                    # It keeps its source. Said once: the block that this error leaves asks again when it ends.
                    self.in_flight_bytes -= self._queue.popleft()[1]
                    note_place(error, f"while copying out {entry.site} ({entry.action.value})")
                    raise
                drop_source(entry)
            del entry
            self.in_flight_bytes -= self._queue.popleft()[1]
        if not self._queue:
            self.in_flight_bytes = 0  # whatever an interrupt left of a count
        self.stall_seconds += stall
        return stall

    def withdraw(self) -> None:
        """Cancel copies that have not begun. See [Note: turn-around]."""
        remaining: deque[tuple[weakref.ref[Entry], int]] = deque()
        for reference, nbytes in self._queue:
            entry = reference()
            if entry is None or entry.slot is None or entry.source is None:
                continue
            slot, entry.slot = entry.slot, None  # first: interrupted here, the bytes are served from the source
            if not slot.cancel():
                entry.slot = slot
                remaining.append((reference, nbytes))
        self._queue = remaining
        self.in_flight_bytes = sum(nbytes for _, nbytes in remaining)


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

    def __init__(self, run: BlockRun, window: Window) -> None:
        self.window = window
        self.ahead_bytes = 0
        self._asked: dict[weakref.ref[Entry], int] = {}
        self._next: weakref.ref[Entry] | None = None
        self._upcoming = _walk(run)

    def advance(self) -> None:
        """Begin as many copies as the window allows."""
        while (reference := self._next or next(self._upcoming, None)) is not None:
            self._next = None
            entry = reference()
            if entry is None or entry.slot is None or entry.source is not None or entry.restored is not None:
                continue
            if reference in self._asked:
                continue
            if self.ahead_bytes and self.ahead_bytes + entry.nbytes > self.window.in_bytes:
                self._next = reference
                return
            try:
                entry.slot.prefetch()
            except BaseException as error:
                note_place(error, f"while bringing in {entry.site} ({entry.action.value}) ahead of its reader")
                raise
            self._asked[weakref.ref(entry, self._gone)] = entry.nbytes
            self.ahead_bytes += entry.nbytes

    def has_read(self, entry: Entry) -> None:
        """An entry was read: its bytes no longer count as ahead."""
        self._gone(weakref.ref(entry))
        self.advance()

    def _gone(self, reference: weakref.ref[Entry]) -> None:
        self.ahead_bytes -= self._asked.pop(reference, 0)


def _walk(run: BlockRun | None) -> Iterator[weakref.ref[Entry]]:
    # Yields references: a suspended generator would keep an entry, and with it a slot, alive.
    while run is not None:
        yield from run.backward_order()
        run = run.previous
