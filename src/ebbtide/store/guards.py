"""The last copies in host memory, for which its next user must wait.

[Note: guards] Host memory is reused while a copy may still run in it. Its next user waits, on its own stream, for the
event of the previous copy. A copy is *claimed* before it is queued: if an interrupt comes before its event is recorded,
an event recorded later on the claimed stream replaces it. So no interrupt can lose a copy.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Iterator

from ebbtide.store.device import Device, EventHandle, StreamHandle

Span = tuple[int, int]
"""Offset and length of a byte range."""

_FIRST, _END = operator.itemgetter(0), operator.itemgetter(1)


class Guard:
    """The last copy in a place; before the first, the copies of earlier owners of its bytes. See [Note: guards].

    Args:
        earlier: Guards for which the first copy must wait.
    """

    __slots__ = ("_earlier", "_event", "_stream")

    def __init__(self, earlier: Iterable[Guard] = ()) -> None:
        self._earlier = tuple(earlier)
        self._stream: StreamHandle = None
        self._event: EventHandle | None = None

    def claim(self, stream: StreamHandle) -> None:
        """Note that a copy is about to be queued on ``stream``, which waits for ``events``."""
        self._event = None
        self._stream = stream
        self._earlier = ()

    @property
    def claimed(self) -> bool:
        """Whether a copy was queued, or is about to be."""
        return self._stream is not None

    def leaves(self) -> Iterator[Guard]:
        """Return the guards with a copy: this one, or those before it."""
        if self.claimed:
            yield self
        else:
            for guard in self._earlier:
                yield from guard.leaves()

    def events(self, device: Device) -> list[EventHandle]:
        """Return the events that another stream must wait for before it uses the bytes."""
        return [leaf.done(device) for leaf in self.leaves()]

    def done(self, device: Device) -> EventHandle:
        """Return the event of the claimed copy; record it if necessary."""
        if self._event is None:
            self._event = device.record(self._stream)
        return self._event

    def finish(self, event: EventHandle) -> None:
        """Set the event of the claimed copy, which was recorded for several copies."""
        self._event = event

    def quiet(self, device: Device) -> bool:
        """Whether no copy runs."""
        return all(device.query(event) for event in self.events(device))


class Cooling:
    """The guards of released bytes: disjoint spans, sorted by offset.

    Spans are dropped by *generation*, without inspecting each: an event is recorded on every copying stream, and once
    it has completed, so have the copies of all spans released before it. Each change is one assignment, so an interrupt
    leaves a consistent list.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, Guard, int]] = []  # first byte, end, guard, generation
        self._generation = 0
        self._marks: list[EventHandle] = []  # when they have completed, older generations are quiet

    def add(self, span: Span, guard: Guard) -> None:
        """Set ``guard`` for these bytes; it covers their earlier guards."""
        first, end = span[0], span[0] + span[1]
        low, high = self._range(first, end)
        between = [(first, end, guard, self._generation)]
        if low < high:
            left, right = self._spans[low], self._spans[high - 1]
            if left[0] < first:
                between.insert(0, (left[0], first, *left[2:]))
            if right[1] > end:
                between.append((end, right[1], *right[2:]))
        self._spans[low:high] = between

    def over(self, spans: Iterable[Span]) -> list[Guard]:
        """Return the guards of any of these bytes, each once."""
        found: dict[int, Guard] = {}
        for first, length in spans:
            low, high = self._range(first, first + length)
            for _, _, guard, _ in self._spans[low:high]:
                found.update((id(leaf), leaf) for leaf in guard.leaves())
        return list(found.values())

    def mark(self, device: Device, streams: Iterable[StreamHandle]) -> None:
        """End a generation, unless an earlier one is pending; ``streams`` are all that copy from or into the spans."""
        if self._spans and not self._marks:
            marks = [device.record(stream) for stream in streams]
            self._generation += 1  # first: bytes released from here on are not covered by the marks
            self._marks = marks
            if not marks:  # no copy was ever queued
                self._spans = [span for span in self._spans if not span[2].quiet(device)]

    def prune(self, device: Device) -> None:
        """Drop the spans whose copies are done: one query per stream, for any number of spans."""
        if self._marks and all(map(device.query, self._marks)):
            self._spans = [span for span in self._spans if span[3] == self._generation]
            self._marks = []

    def _range(self, first: int, end: int) -> tuple[int, int]:
        low = bisect.bisect_right(self._spans, first, key=_END)
        return low, bisect.bisect_left(self._spans, end, lo=low, key=_FIRST)
