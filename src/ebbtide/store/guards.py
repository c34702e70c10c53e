"""The last copies in host memory, which its next user must wait for.

[Note: guards]
Host memory is used again while a copy may still run in it. Its next user waits, on its own stream, for the event of
the copy before. A copy is *claimed* before it is asked for: if an interrupt strikes between asking and recording its
event, an event recorded later, on the stream that was claimed, stands for it. So no interrupt can lose a copy.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Iterator

from ebbtide.store.device import Device, EventHandle, StreamHandle

Span = tuple[int, int]
"""Offset and length of some bytes."""

_FIRST, _END = operator.itemgetter(0), operator.itemgetter(1)


class Guard:
    """The last copy in a place; before there is one, the copies of those who had its bytes. See [Note: guards].

    Args:
        earlier: Guards of whom the first copy must wait for.
    """

    __slots__ = ("_earlier", "_event", "_stream")

    def __init__(self, earlier: Iterable[Guard] = ()) -> None:
        self._earlier = tuple(earlier)
        self._stream: StreamHandle = None
        self._event: EventHandle | None = None

    def claim(self, stream: StreamHandle) -> None:
        """Note that ``stream``, which waits for ``events``, is about to be asked for a copy."""
        self._event = None
        self._stream = stream
        self._earlier = ()

    @property
    def claimed(self) -> bool:
        """Whether a copy was asked for, or is about to be."""
        return self._stream is not None

    def leaves(self) -> Iterator[Guard]:
        """Return the guards that have had a copy: this one, or those before it."""
        if self.claimed:
            yield self
        else:
            for guard in self._earlier:
                yield from guard.leaves()

    def events(self, device: Device) -> list[EventHandle]:
        """Return what must have happened before the bytes are used by another stream."""
        return [leaf.done(device) for leaf in self.leaves()]

    def done(self, device: Device, *, timed: bool = False) -> EventHandle:
        """Return the event of the copy that was claimed, recording it if that was not done yet."""
        if self._event is None:
            self._event = device.record(self._stream, timed=timed)
        return self._event

    def finish(self, event: EventHandle) -> None:
        """Take the event of the copy that was claimed from whoever recorded it for several copies."""
        self._event = event

    def quiet(self, device: Device) -> bool:
        """Whether no copy runs."""
        return all(device.query(event) for event in self.events(device))


class Cooling:
    """Which guard holds for which bytes that were given back: disjoint spans in order of offset.

    Spans are forgotten by *generation*, without a look at each: an event is recorded on every stream that copies, and
    once it has happened, so have the copies of all spans that were given back before it. Each change is one assignment,
    so that an interrupt leaves the spans before it or after it.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, Guard, int]] = []  # first byte, end, guard, generation
        self._generation = 0
        self._marks: list[EventHandle] = []  # when they have happened, older generations are quiet

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: Span, guard: Guard) -> None:
        """Let ``guard`` hold for these bytes; whatever held for them before is covered by it."""
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
        """Return the guards that hold for any of these bytes, each once."""
        found: dict[int, Guard] = {}
        for first, length in spans:
            low, high = self._range(first, first + length)
            for _, _, guard, _ in self._spans[low:high]:
                found.update((id(leaf), leaf) for leaf in guard.leaves())
        return list(found.values())

    def mark(self, device: Device, streams: Iterable[StreamHandle]) -> None:
        """End a generation, unless an earlier one is still awaited.

        Args:
            device: Whose streams they are.
            streams: All that copy from or into these bytes.
        """
        if self._spans and not self._marks:
            marks = [device.record(stream) for stream in streams]
            self._generation += 1  # first: what is given back from here on is not covered by the marks
            self._marks = marks
            if not marks:  # no copy was ever asked of a stream
                self._spans = [span for span in self._spans if not span[2].quiet(device)]

    def prune(self, device: Device) -> None:
        """Forget the spans whose copies are known to be done: one question for a stream, however many spans."""
        if self._marks and all(map(device.query, self._marks)):
            self._spans = [span for span in self._spans if span[3] == self._generation]
            self._marks = []

    def _range(self, first: int, end: int) -> tuple[int, int]:
        low = bisect.bisect_right(self._spans, first, key=_END)
        return low, bisect.bisect_left(self._spans, end, lo=low, key=_FIRST)
