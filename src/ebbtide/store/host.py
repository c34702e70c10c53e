"""The host tier: offloaded bytes are in host memory; streams copy them while compute runs. See [Note: ordering]."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch

from ebbtide.base.errors import CapError, ConfigError
from ebbtide.store.arena import Arena, Place
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import Device, StreamHandle, capture_query
from ebbtide.store.faults import closed_error, freed_error
from ebbtide.store.headroom import Headroom
from ebbtide.store.hostcopies import HostCopies, Out, pieces
from ebbtide.store.hostslot import HostSlot


class HostTier:
    """A tier in host memory over a ``Device``.

    Args:
        device: The device whose memory is to be saved.
        budget_bytes: Most bytes of host memory; ``None``: as much as the machine has.
        synchronous: Copy in order with compute, and wait: for devices with unreliable asynchronous copies; automatic
            for devices without any.
        least_bytes: See ``Arena``.
    """

    name = "host"

    def __init__(
        self,
        device: Device,
        *,
        budget_bytes: int | None = None,
        synchronous: bool = False,
        least_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.owns, self.capturing, self.stream_of = device.owns, capture_query(), device.compute_stream
        self.synchronous = synchronous or not device.capabilities.asynchronous_copies
        self._arena, self._headroom = Arena(device, budget_bytes, least_bytes), Headroom(device)
        self._counters = TierCounters()
        self.copies = HostCopies(device, self._counters, synchronous=self.synchronous)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._dead: deque[HostSlot] = deque()
        self._leaving: deque[HostSlot] = deque()  # dead slots whose copy-out is running
        self._waits_for_device = False  # a dead slot may hold memory of the device
        self._closed = self._closes_unused = False

    @property
    def stalls(self) -> Stalls:
        """Stalls of compute, by reader."""
        return self._counters.stalls

    @property
    def counters(self) -> TierCounters:
        """Moved bytes; times are those of completed copies and waits, if the device has timed events."""
        if not self._is_forked:
            with self._lock:
                self.copies.harvest()
        return self._counters

    def gauges(self) -> dict[str, int]:
        """Return the figures of host memory, by name."""
        with self._up_to_date():
            return self._arena.gauges()

    @property
    def used_bytes(self) -> int:
        """Bytes of places in use now."""
        with self._up_to_date():
            return self._arena.used_bytes

    @property
    def budget_bytes(self) -> int | None:
        """Most bytes of host memory now; ``None``: as much as the machine has."""
        return self._arena.budget_bytes

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the budget still allows; ``None`` without a budget."""
        with self._up_to_date():
            return self._arena.free_bytes

    def follow(self, tensor: torch.Tensor, stream: StreamHandle) -> None:
        """Order the caller after another stream, on which ``tensor`` was made, and keep its memory until it was read.

        A tensor restored for one reader may have a second one on another stream, which did not wait for the copy.
        """
        now = self.stream_of(tensor.device)
        self.device.wait(now, self.device.record(stream))
        self.device.record_use(tensor, now)

    def copy_out_all(
        self, sources: Sequence[torch.Tensor], *, compute: StreamHandle | None = None, spare_bytes: int = 0
    ) -> list[HostSlot | CapError]:
        """Begin to copy out several sources; those of one device with one wait for compute and one event for all.

        Args:
            sources: See ``Tier.copy_out_all``.
            compute: See there.
            spare_bytes: Bytes of the budget that must remain free.

        Raises:
            ConfigError: A source is not such a tensor.
            TargetError: The tier is closed.
        """
        self._check(None)
        for source in sources:
            if source.dtype is not torch.uint8 or source.dim() != 1 or not source.is_contiguous() or not source.numel():
                raise ConfigError(
                    f"source is {source.dtype} of shape {tuple(source.shape)}",
                    expected="a contiguous, one-dimensional, not empty torch.uint8 tensor",
                    hint="pass tensor.contiguous().view(-1).view(torch.uint8)",
                )
        found: dict[int, HostSlot | CapError] = {}
        for origin in dict.fromkeys([source.device for source in sources]):
            numbers = [i for i, source in enumerate(sources) if source.device == origin]
            group: list[Out] = []
            for i, place in zip(numbers, self._places([sources[i].numel() for i in numbers], spare_bytes), strict=True):
                if isinstance(place, CapError):
                    found[i] = place
                else:
                    slot = found[i] = HostSlot(self, place, origin)
                    group.append((slot, place, sources[i]))
            if group:
                self.copies.out(origin, group, compute)
        return [found[i] for i in range(len(sources))]

    def fill(self, content: torch.Tensor, origin: torch.device) -> HostSlot:
        """Return a slot with bytes from pageable memory, as if they had been offloaded from ``origin``.

        The host copies them at once, after waiting for copies that still use the target memory.

        Raises:
            CapError: The host budget is reached.
            TargetError: The tier is closed.
        """
        self._check(None)
        with self._lock:
            self._release_dead()
            place = self._arena.take(content.numel())
        for event in place.region.guard.events(self.device):
            self.device.synchronize(event)
        for part, piece in pieces(place, content):
            part.copy_(piece)
        return HostSlot(self, place, origin)

    def expect(self, nbytes: int) -> None:
        """Reserve host memory for this many further bytes at the next allocation."""
        with self._lock:
            self._arena.expect(nbytes)

    def are_copied_out(self, slots: Sequence[HostSlot]) -> bool:
        """Whether the copy-outs of several slots are done."""
        latest = None  # those of a group share it
        for slot in slots:
            if slot.done is not latest and (latest := slot.done) is not None and not self.copies.is_done(latest):
                return False
        for slot in slots:
            slot.source = None
        return True

    def wait_copied_out(self, slots: Sequence[HostSlot]) -> None:
        """Make compute wait for the copy-outs of several slots: once for those that were queued together."""
        for slot in {id(slot.done): slot for slot in slots}.values():
            if slot.done is not None:
                self.copies.stall(slot.compute, slot.done)
        for slot in slots:
            slot.source = None

    def prefetch(self, slots: Sequence[HostSlot]) -> int:
        """Begin the copy-ins of several slots, unless they have begun; see ``Tier.prefetch`` and [Note: headroom].

        Raises:
            torch.OutOfMemoryError: The device has no room for the first, whose bytes are not needed yet.
            TargetError: A slot was freed, or the tier is closed.
        """
        for slot in slots:
            if self._closed or slot.freed:
                self._check(slot)
        # Each once: a second copy-in would drop the target of the first while that copy writes to it.
        fresh = [] if self.synchronous else [s for s in dict.fromkeys(slots) if s.ahead is None or s.ahead.done is None]
        begun = 0
        for origin, run in itertools.groupby(fresh, key=operator.attrgetter("origin")):
            group = list(run)
            try:
                granted = self._headroom.take([slot.nbytes for slot in group], origin)
                done = len(self.copies.into(group[:granted]))
            except torch.OutOfMemoryError:
                if not begun:
                    raise
                break
            begun += done
            if done < len(group):
                break
        return len(slots) - slots.index(fresh[begun]) if begun < len(fresh) else 0

    def discard(self, slot: HostSlot) -> None:
        """Discard an unused copy-in of ``slot``."""
        self._check(slot)
        self.copies.drop(slot)

    def take(self, slot: HostSlot) -> torch.Tensor:
        """Return the bytes of ``slot``."""
        if self._closed or slot.freed:
            self._check(slot)
        if self._waits_for_device or self._leaving:
            with self._lock:
                self._release_dead()
        if self.synchronous:
            target = self.device.allocate(slot.nbytes, slot.origin)
            for part, piece in pieces(slot.has_place(), target):
                self.device.copy_now(piece, part)
            self._counters.in_bytes += slot.nbytes
            return target
        compute, ahead = self.device.compute_stream(slot.origin), slot.ahead
        if ahead is None or ahead.done is None:
            (ahead,) = self.copies.into([slot])
        elif ahead.compute != compute:  # whose memory would be reused while this one still reads
            self.device.record_use(ahead.target, compute)
        event, stream = self.copies.waited
        if event is not ahead.done or stream != compute:
            self.copies.stall(compute, ahead.done)
            self.copies.waited = ahead.done, compute
        slot.ahead = None  # only after compute waits: the memory must not be dropped while the copy runs
        return ahead.target

    def wait_copied(self, slot: HostSlot) -> None:
        """Make the host wait for the copy-out of ``slot``, a stall. Only if the alternative is an error."""
        if slot.done is not None and not self.copies.is_done(slot.done):
            begun = time.perf_counter()
            self.device.synchronize(slot.done)
            self.stalls.add_since(begun)

    def release(self, slot: HostSlot) -> None:
        """Queue a freed slot's place for release by the next holder of the lock. Called by dying tickets in any thread.

        The garbage collector may kill a ticket while this thread holds the lock, so the lock is not taken here.
        """
        if os.getpid() != self._pid:  # as ``_is_forked``, without a call for each slot
            return
        self._dead.append(slot)
        if slot.ahead is not None or slot.source is not None:
            self._waits_for_device = True
        if (self._closed or self._closes_unused) and self._lock.acquire(blocking=False):  # there may be no next holder
            try:
                self._release_dead()
                if self._closed or not self._arena.used_bytes:
                    self._arena.clear()
                    self._release_dead()
            finally:
                self._lock.release()

    def trim(self) -> None:
        """Free host memory that the last backwards did not need."""
        if self._is_forked:
            return
        self._headroom.forget()
        with self._lock:
            self.copies.harvest()
            self._release_dead()
            self._arena.trim(self.copies.streams)

    def close_unused(self, in_use: Callable[[], object]) -> None:
        """Free host memory when no slot is alive; see ``Tier.close_unused``."""
        self._closes_unused = True

    def close(self) -> None:
        """Wait for copies and free host memory; does nothing in a forked child. May be called repeatedly."""
        if self._closed or self._is_forked:
            return
        with self._lock:
            self._release_dead()
            self._closed = True
            self._arena.clear()
            self._release_dead()

    def _places(self, sizes: list[int], spare_bytes: int) -> list[Place | CapError]:
        """Return a place, or the error that prevents it, for each size: in one region, if there is one for all."""
        with self._lock:
            self._release_dead()
            with contextlib.suppress(CapError):
                return [*self._arena.take_all(sizes, spare_bytes=spare_bytes)]
            places: list[Place | CapError] = []
            for nbytes in sizes:
                try:
                    places.append(self._arena.take(nbytes, spare_bytes=spare_bytes))
                except CapError as error:
                    places.append(error.with_traceback(None))  # whose frames would keep this list alive
            return places

    def _check(self, slot: HostSlot | None) -> None:
        if self._closed:
            raise closed_error("host")
        if slot is not None and slot.freed:
            raise freed_error()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child, which may not use the device."""
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def _up_to_date(self) -> Generator[None]:
        """Release the dead, and hold the lock; not in a forked child: at the fork, another thread may have held it."""
        with contextlib.nullcontext() if self._is_forked else self._lock:
            self._release_dead()
            yield

    def _release_dead(self) -> None:
        if self._is_forked:
            return
        self._waits_for_device = False
        # An interrupted step is repeated, so references are dropped last. More slots may die meanwhile.
        while dead := [*self._dead]:
            for slot in dead:
                if slot.ahead is not None:
                    self.copies.drop(slot)
                if slot.source is not None:
                    if slot.done is None and slot.place is not None and slot.place.region.guard.claimed:  # interrupted
                        slot.done = slot.place.region.guard.done(self.device)
                    self._leaving.append(slot)
            self._arena.give(*[slot.place for slot in dead if slot.place is not None])
            for slot in dead:
                slot.place = None
                self._dead.popleft()
        while self._leaving and ((done := self._leaving[0].done) is None or self.copies.is_done(done)):
            self._leaving.popleft()
