"""Copies between a device and host memory: queued in groups, ordered by events, and timed.

[Note: groups] Each device call costs the host microseconds: recording an event, a wait, entering a stream. So copies
that are queued together share all calls but the copies themselves, and one region of host memory. On the device each
storage has its own memory, which is freed as soon as it is no longer needed, independent of its group.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from ebbtide.store.arena import Place
from ebbtide.store.counters import TierCounters
from ebbtide.store.device import Device, EventHandle, StreamHandle
from ebbtide.store.hostslot import HostCopyIn, HostSlot

_MOST_SPANS = 4096

Out = tuple[HostSlot, Place, torch.Tensor]
"""A slot, its place, and its source."""

_T = TypeVar("_T")

_Span = tuple[Callable[[float], None], EventHandle, EventHandle]
"""Called with the seconds between two events once both have completed."""


class HostCopies:
    """Queues copies and times them. See [Note: groups] and [Note: ordering].

    Args:
        device: Its streams copy.
        counters: Receives the counts.
        synchronous: Copy in order with compute, and wait.
    """

    def __init__(self, device: Device, counters: TierCounters, *, synchronous: bool) -> None:
        self.device, self.synchronous = device, synchronous
        self._counters = counters
        self._lock = threading.Lock()
        self._sides: dict[torch.device, tuple[StreamHandle, StreamHandle]] = {}
        self._computes: dict[torch.device, list[StreamHandle]] = {}  # each device's default stream, and another
        self.waited: tuple[EventHandle, StreamHandle] = None, None  # the latest wait: copies of a group share one
        self._completed: EventHandle = None
        self._spans: dict[str, deque[_Span]] = {purpose: deque() for purpose in ("out", "in", "stall")}

    @property
    def streams(self) -> list[StreamHandle]:
        """All streams that copy."""
        return [stream for pair in self._sides.values() for stream in pair]

    def out(self, origin: torch.device, group: Sequence[Out], compute: StreamHandle | None) -> None:
        """Copy sources to their places.

        Args:
            origin: Their device.
            group: The slots, their places, and the sources.
            compute: The stream on which they were made; None: the caller's.
        """
        device, nbytes = self.device, sum([slot.nbytes for slot, _, _ in group])
        self._counters.out_bytes += nbytes
        if len(self._spans["out"]) > _MOST_SPANS:
            self.harvest()
        if self.synchronous:
            now = device.compute_stream(origin)  # it copies, after the stream that made the sources
            if compute is not None and compute != now:
                device.wait(now, device.record(compute))
            for _, place, source in group:
                for part, piece in pieces(place, source):
                    device.copy_now(part, piece)
            return
        if compute is None:
            compute = device.compute_stream(origin)
        out, _ = self._side_streams(origin)
        several = self._has_several_computes(origin, compute)
        for slot, _, source in group:
            slot.source, slot.compute = source, compute
            if several:
                device.record_use(source, compute)  # it waits for the copy before the source is dropped
        device.wait(out, device.record(compute))
        guards = _each_once([place.region.guard for _, place, _ in group])
        for event in _each_once([event for guard in guards for event in guard.events(device)]):
            device.wait(out, event)
        begin = self._begin(out)
        for guard in guards:
            guard.claim(out)
        device.copy_all(_pairs(group), out)
        done = device.record(out, timed=begin is not None)
        for guard in guards:
            guard.finish(done)
        for slot, _, _ in group:
            slot.done = done
        self._note_span("out", functools.partial(self._counters.copied_out, nbytes), begin, done)

    def into(self, slots: Sequence[HostSlot]) -> list[HostCopyIn]:
        """Begin copies-in to one device. See [Note: an unfinished copy-in].

        Args:
            slots: Not empty.

        Returns:
            The copies that have begun: of all slots, or of the first ones if the device has no more room.

        Raises:
            TargetError: One was freed.
            torch.OutOfMemoryError: There is no room for the first.
        """
        device, origin = self.device, slots[0].origin
        group: list[Out] = []
        for slot in slots:
            if slot.ahead is not None:
                self.drop(slot)
            place = slot.place or slot.has_place()  # which raises; a call is saved where it does not
            try:
                group.append((slot, place, device.allocate(slot.nbytes, origin)))
            except torch.OutOfMemoryError:
                if not group:
                    raise
                break
        nbytes, compute = sum([slot.nbytes for slot, _, _ in group]), device.compute_stream(origin)
        _, into = self._side_streams(origin)
        device.wait(into, device.record(compute))
        for event in _each_once([slot.done for slot, _, _ in group if slot.done is not None]):
            device.wait(into, event)
        guards = _each_once([place.region.guard for _, place, _ in group])
        begin = self._begin(into)
        begun = [HostCopyIn(target, compute, into) for _, _, target in group]
        for (slot, _, _), ahead in zip(group, begun, strict=True):
            slot.ahead = ahead
        for guard in guards:
            guard.claim(into)
        device.copy_all([(piece, part) for part, piece in _pairs(group)], into)
        done = device.record(into, timed=begin is not None)
        for guard in guards:
            guard.finish(done)
        for ahead in begun:
            ahead.done = done
        self._counters.in_bytes += nbytes
        self._note_span("in", functools.partial(self._counters.copied_in, nbytes), begin, done)
        return begun

    def drop(self, slot: HostSlot) -> None:
        """Discard an unused copy-in: its memory returns to a stream that must not run before the copy."""
        if slot.ahead is not None:
            done = slot.ahead.done
            self.stall(slot.ahead.compute, self.device.record(slot.ahead.into) if done is None else done)
            slot.ahead = None

    def stall(self, stream: StreamHandle, event: EventHandle) -> None:
        """Make ``stream`` wait for ``event`` and count the stall."""
        stalls = self._counters.stalls
        if not stalls.timed or self.device.query(event) or (begin := self._begin(stream)) is None:
            self.device.wait(stream, event)
            return
        self.device.wait(stream, event)
        end = self.device.record(stream, timed=True)
        self._note_span("stall", functools.partial(stalls.add, reader=stalls.reader), begin, end)

    def is_done(self, event: EventHandle) -> bool:
        """Whether ``event`` has completed; the device is queried once for the copies of a group."""
        if self._completed is event:
            return True
        done = self.device.query(event)
        if done:
            self._completed = event
        return done

    def harvest(self) -> None:
        """Count the times of completed copies and waits."""
        with self._lock:  # groups that are queued may harvest while another thread reads the counters
            for spans in self._spans.values():
                while spans:
                    span = spans.popleft()
                    count, begin, end = span
                    if not self.device.query(end):
                        spans.appendleft(span)  # later ones on the same stream are not complete either
                        break
                    count(self.device.elapsed_seconds(begin, end))

    def _side_streams(self, origin: torch.device) -> tuple[StreamHandle, StreamHandle]:
        with self._lock:
            if origin not in self._sides:
                self._sides[origin] = self.device.side_stream(origin, "out"), self.device.side_stream(origin, "in")
            return self._sides[origin]

    def _has_several_computes(self, origin: torch.device, compute: StreamHandle) -> bool:
        """Whether sources were copied out on another compute stream than the default one. See [Note: ordering]."""
        if origin not in self._computes:
            default = self.device.default_stream(origin)
            self._computes[origin] = [compute if default is None else default]
        seen = self._computes[origin]
        if len(seen) == 1 and seen[0] != compute:
            seen.append(compute)
        return len(seen) > 1

    def _begin(self, stream: StreamHandle) -> EventHandle | None:
        timed = self._counters.stalls.timed and self.device.capabilities.timed_events
        return self.device.record(stream, timed=True) if timed else None

    def _note_span(
        self, purpose: str, count: Callable[[float], None], begin: EventHandle | None, end: EventHandle
    ) -> None:
        if begin is not None:
            self._spans[purpose].append((count, begin, end))


def _pairs(group: Sequence[Out]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of places, each with its piece of the tensor of that place."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _, place, tensor in group:
        # Mostly there is one part: then what ``pieces`` does, without a call for each storage.
        pairs += ((place.parts[0], tensor),) if len(place.parts) == 1 else pieces(place, tensor)
    return pairs


def pieces(place: Place, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of a place, each with its piece of a tensor."""
    if len(place.parts) == 1:
        return ((place.parts[0], tensor),)
    return zip(place.parts, tensor.split([part.numel() for part in place.parts]), strict=True)


def _each_once(things: Sequence[_T]) -> list[_T]:
    """Return events, or guards, without duplicates: those of a group share one."""
    return [*dict(zip(map(id, things), things, strict=True)).values()]
