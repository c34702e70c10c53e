"""The host tier: offloaded bytes wait in host memory; streams copy them beside compute. See [Note: ordering]."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable

import torch

from ebbtide.base.errors import ConfigError, TargetError
from ebbtide.store.arena import Arena, ArenaState, Place
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import Device, EventHandle, StreamHandle
from ebbtide.store.headroom import Headroom
from ebbtide.store.hostslot import HostCopyIn, HostSlot

_MOST_SPANS = 4096

_Span = tuple[Callable[[float], None], EventHandle, EventHandle]
"""Told of the seconds between two events, when both have happened."""


class HostTier:
    """A tier in host memory over a ``Device``.

    Args:
        device: Where the scarce memory is.
        budget_bytes: Most bytes of host memory; ``None``: what the machine gives.
        synchronous: Copy in order with compute, and wait: for devices whose asynchronous copies are not to be trusted.
            Chosen by itself where the device has none.
    """

    def __init__(self, device: Device, *, budget_bytes: int | None = None, synchronous: bool = False) -> None:
        if budget_bytes is not None and budget_bytes <= 0:
            raise ConfigError(f"budget_bytes is {budget_bytes}", expected="a number of bytes above zero")
        self.device = device
        self.synchronous = synchronous or not device.capabilities.asynchronous_copies
        self._arena, self._headroom = Arena(device, budget_bytes), Headroom(device)
        self._counters = TierCounters()
        self._lock = threading.Lock()
        self._sides: dict[torch.device, tuple[StreamHandle, StreamHandle]] = {}
        self._computes: dict[torch.device, list[StreamHandle]] = {}  # the first two compute streams of each device
        self._dead: deque[HostSlot] = deque()
        self._leaving: deque[HostSlot] = deque()  # dead, and their copy-out still runs
        self._spans: dict[str, deque[_Span]] = {kind: deque() for kind in ("out", "in", "stall")}
        self._closed = False

    @property
    def name(self) -> str:
        """``"host"``."""
        return "host"

    @property
    def can_cancel(self) -> bool:
        """False: what was asked of a stream is done."""
        return False

    @property
    def stalls(self) -> Stalls:
        """For whom compute waited."""
        return self._counters.stalls

    @property
    def counters(self) -> TierCounters:
        """What was moved; times are those of copies and waits that are known to be over, if the device keeps time."""
        with self._lock:
            self._harvest()
        return self._counters

    def gauges(self) -> dict[str, int]:
        """Return what host memory is held, by name."""
        state = self.arena
        return {
            "host_held_bytes": state.held_bytes,
            "host_pinned_bytes": state.held_bytes - state.pageable_bytes if self.device.capabilities.pinned_host else 0,
            "host_parked_bytes": state.used_bytes,
            "host_most_parked_bytes": state.peak_used_bytes,
            "host_chunks": state.chunks,
        }

    @property
    def used_bytes(self) -> int:
        """Bytes of places in use now."""
        with self._lock:
            self._settle()
            return self._arena.used_bytes

    @property
    def arena(self) -> ArenaState:
        """What host memory is held for them."""
        with self._lock:
            self._settle()
            return self._arena.state

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the budget still allows; ``None`` without a budget."""
        with self._lock:
            self._settle()
            return self._arena.free_bytes

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on the device."""
        return self.device.owns(tensor)

    def capturing(self) -> bool:
        """Whether the device records what the caller asks of it in a graph."""
        return self.device.capturing()

    def stream_of(self, tensor: torch.Tensor) -> StreamHandle:
        """Return the stream on which the caller computes now, where a tensor lies."""
        return self.device.compute_stream(tensor.device)

    def follow(self, tensor: torch.Tensor, stream: StreamHandle | None) -> None:
        """Order the caller after another stream, if ``tensor`` was made there, and keep its memory until it was read.

        A tensor that was restored for one reader may have a second one on another stream, who waited for no copy.
        """
        now = self.stream_of(tensor)
        if stream is not None and now != stream:
            self.device.wait(now, self.device.record(stream))
            self.device.record_use(tensor, now)

    def park(self, source: torch.Tensor, *, spare_bytes: int = 0) -> HostSlot:
        """Begin to copy out ``source``; its memory must stay until the slot is parked.

        Args:
            source: One-dimensional contiguous ``uint8`` view on the device; not empty.
            spare_bytes: How much of the budget must be left free.

        Raises:
            CapError: The host budget is reached.
            ConfigError: The source is not such a tensor.
            TargetError: The tier is closed.
        """
        self._check(None)
        if len(self._spans["out"]) > _MOST_SPANS:
            self._harvest()
        if source.dtype is not torch.uint8 or source.dim() != 1 or not source.is_contiguous() or not source.numel():
            raise ConfigError(
                f"source is {source.dtype} of shape {tuple(source.shape)}",
                expected="a contiguous, one-dimensional, not empty torch.uint8 tensor",
            )
        place, device = self._take(source.numel(), spare_bytes), self.device
        slot = HostSlot(self, place, source.device)
        self._counters.out_bytes += slot.nbytes
        if self.synchronous:
            for part, piece in zip(place.parts, source.split([part.numel() for part in place.parts]), strict=True):
                device.copy_now(part, piece)
            return slot
        slot.source, slot.compute = source, device.compute_stream(source.device)
        out, _ = self._side_streams(source.device)
        if self._has_several_computes(source.device, slot.compute):
            device.record_use(source, slot.compute)  # which waits for the copy before the source is dropped
        device.wait(out, device.record(slot.compute))
        for event in place.guard.events(device):
            device.wait(out, event)
        begin = self._begin(out)
        place.guard.claim(out)
        for part, piece in zip(place.parts, source.split([part.numel() for part in place.parts]), strict=True):
            device.copy(part, piece, out)
        slot.done = place.guard.done(device, timed=begin is not None)
        self._note_span("out", functools.partial(self._counters.copied_out, slot.nbytes), begin, slot.done)
        return slot

    def fill(self, content: torch.Tensor, where: torch.device) -> HostSlot:
        """Return a slot with bytes that lie in pageable memory, as if they had been parked from ``where``.

        The host copies them at once, and waits before that for copies that still use the memory it copies into.

        Raises:
            CapError: The host budget is reached.
            TargetError: The tier is closed.
        """
        self._check(None)
        place = self._take(content.numel(), 0)
        for event in place.guard.events(self.device):
            self.device.synchronize(event)
        for part, piece in zip(place.parts, content.split([part.numel() for part in place.parts]), strict=True):
            part.copy_(piece)
        return HostSlot(self, place, where)

    def expect(self, nbytes: int) -> None:
        """Take host memory for so many further bytes at once, when some is taken next."""
        with self._lock:
            self._arena.expect(nbytes)

    def prefetch(self, slot: HostSlot) -> None:
        """Begin the copy-in of ``slot``, unless it has begun.

        Raises:
            torch.OutOfMemoryError: The device has no room for bytes that nobody needs yet. See [Note: headroom].
        """
        self._check(slot)
        if not self.synchronous and (slot.ahead is None or slot.ahead.done is None):
            self._headroom.take(slot.nbytes, slot.where)
            self._copy_in(slot)

    def put_back(self, slot: HostSlot) -> None:
        """Drop the copy-in of ``slot`` that nobody took."""
        self._check(slot)
        self._drop_ahead(slot)

    def take(self, slot: HostSlot) -> torch.Tensor:
        """Return the bytes of ``slot``."""
        self._check(slot)
        with self._lock:
            self._settle()
        if self.synchronous:
            target = self.device.allocate(slot.nbytes, slot.where)
            parts = self.place_of(slot).parts
            for part, piece in zip(parts, target.split([part.numel() for part in parts]), strict=True):
                self.device.copy_now(piece, part)
            self._counters.in_bytes += slot.nbytes
            return target
        compute, ahead = self.device.compute_stream(slot.where), slot.ahead
        if ahead is None or ahead.done is None:
            ahead = self._copy_in(slot)
        elif ahead.compute != compute:  # whose memory would be used again while this one still reads
            self.device.record_use(ahead.target, compute)
        self.stall(compute, ahead.done)
        slot.ahead = None  # not before compute waits: its memory must not be dropped while the copy runs
        return ahead.target

    def place_of(self, slot: HostSlot) -> Place:
        """Return where the bytes of ``slot`` lie.

        Raises:
            TargetError: It was freed.
        """
        if slot.place is None:
            raise TargetError("a slot is used after it was freed", hint="keep its ticket alive")
        return slot.place

    def wait_copied(self, slot: HostSlot) -> None:
        """Make the host wait for the copy-out of ``slot``. Only where the alternative is an error."""
        if slot.done is not None:
            self.device.synchronize(slot.done)

    def stall(self, stream: StreamHandle, event: EventHandle) -> None:
        """Make ``stream`` wait for ``event`` and count the stall."""
        stalls = self._counters.stalls
        if not stalls.timed or self.device.query(event) or (begin := self._begin(stream)) is None:
            self.device.wait(stream, event)
            return
        self.device.wait(stream, event)
        end = self.device.record(stream, timed=True)
        self._note_span("stall", functools.partial(stalls.add, reader=stalls.reader), begin, end)

    def release(self, slot: HostSlot) -> None:
        """Take back a freed slot's place, when the lock is taken next. Called by dying tickets in any thread.

        A ticket may die through the collector while this very thread holds the lock: so it is not asked for here.
        """
        self._dead.append(slot)
        if self._closed and self._lock.acquire(blocking=False):  # nobody may come any more
            try:
                self._settle()
                self._arena.clear()
            finally:
                self._lock.release()

    def trim(self) -> None:
        """Give back host memory that the last backwards did not need."""
        self._headroom.forget()
        with self._lock:
            self._harvest()
            self._settle()
            self._arena.trim([stream for pair in self._sides.values() for stream in pair])

    def close(self) -> None:
        """Wait for copies and give host memory back. Harmless when repeated."""
        if self._closed:
            return
        with self._lock:
            self._settle()
            self._closed = True
            self._arena.clear()
            self._settle()

    def _take(self, nbytes: int, spare_bytes: int) -> Place:
        with self._lock:
            self._settle()
            return self._arena.take(nbytes, spare_bytes=spare_bytes)

    def _copy_in(self, slot: HostSlot) -> HostCopyIn:
        """Begin a copy-in. See [Note: an unfinished copy-in]."""
        self._drop_ahead(slot)
        device, place = self.device, self.place_of(slot)
        compute = device.compute_stream(slot.where)
        _, into = self._side_streams(slot.where)
        target = device.allocate(slot.nbytes, slot.where)
        device.wait(into, device.record(compute))
        if slot.done is not None:
            device.wait(into, slot.done)
        begin = self._begin(into)
        ahead = slot.ahead = HostCopyIn(target, compute, into)
        place.guard.claim(into)
        pieces = target.split([part.numel() for part in place.parts])
        for part, piece in zip(place.parts, pieces, strict=True):
            device.copy(piece, part, into)
        ahead.done = place.guard.done(device, timed=begin is not None)
        self._counters.in_bytes += slot.nbytes
        self._note_span("in", functools.partial(self._counters.copied_in, slot.nbytes), begin, ahead.done)
        return ahead

    def _drop_ahead(self, slot: HostSlot) -> None:
        """Drop a copy-in that nobody took: its memory goes back to a stream that must not run before the copy."""
        if slot.ahead is not None:
            done = slot.ahead.done
            self.stall(slot.ahead.compute, self.device.record(slot.ahead.into) if done is None else done)
            slot.ahead = None

    def _side_streams(self, where: torch.device) -> tuple[StreamHandle, StreamHandle]:
        with self._lock:
            if where not in self._sides:
                self._sides[where] = self.device.side_stream(where, "out"), self.device.side_stream(where, "in")
            return self._sides[where]

    def _has_several_computes(self, where: torch.device, compute: StreamHandle) -> bool:
        """Whether sources were parked on more than one compute stream of this device. See [Note: ordering]."""
        seen = self._computes.setdefault(where, [compute])
        if len(seen) == 1 and seen[0] != compute:
            seen.append(compute)
        return len(seen) > 1

    def _check(self, slot: HostSlot | None) -> None:
        if self._closed:
            raise TargetError("the host tier is closed", hint="keep it open until the last backward is done")
        if slot is not None and slot.freed:
            raise TargetError("a slot is used after it was freed", hint="keep its ticket alive")

    def _settle(self) -> None:
        # Each step may be interrupted and is then done again: what is dropped or forgotten comes last.
        while self._dead:
            slot = self._dead[0]
            self._drop_ahead(slot)
            if slot.source is not None:
                if slot.done is None and slot.place is not None and slot.place.guard.claimed:  # asked, and interrupted
                    slot.done = slot.place.guard.done(self.device)
                self._leaving.append(slot)
            if slot.place is not None:
                self._arena.give(slot.place)
                slot.place = None
            self._dead.popleft()
        while self._leaving and self._leaving[0].parked:
            self._leaving.popleft()

    def _begin(self, stream: StreamHandle) -> EventHandle | None:
        timed = self._counters.stalls.timed and self.device.capabilities.timed_events
        return self.device.record(stream, timed=True) if timed else None

    def _note_span(
        self, kind: str, count: Callable[[float], None], begin: EventHandle | None, end: EventHandle
    ) -> None:
        if begin is not None:
            self._spans[kind].append((count, begin, end))

    def _harvest(self) -> None:
        for spans in self._spans.values():
            while spans:
                span = spans.popleft()
                count, begin, end = span
                if not self.device.query(end):
                    spans.appendleft(span)  # those that come after it, on the same stream, are not over either
                    break
                count(self.device.elapsed_seconds(begin, end))
