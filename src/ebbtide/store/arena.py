"""Host memory in large chunks, packed exactly.

[Note: the arena]
Pinning costs milliseconds per call, and torch's allocator of pinned memory rounds every request up to a power of two.
So the arena allocates few, large chunks and packs places into them without gaps, as the disk tier does in its file: the
chunks are consecutive ranges of one offset space. A place may span several chunks and is then copied in pieces; so
every free byte is usable, and only alignment is lost. A chunk is as large as the missing bytes, or a fortieth of the
arena: the arena never exceeds the most bytes offloaded at once by more than 3 %, and a step like the previous one
allocates nothing. With a forecast, the next chunk covers all of it: after the first block, the bytes of the others are
known.

Storages that are copied out together get one *region*, with a place for each: finding memory, and guarding it, costs as
much for all as for one. The region is free again when its last place is.

An interrupt may leave the bookkeeping inconsistent at any point. ``_torn`` marks this, and the next user recounts from
the live regions: an unrecorded one is free, and its guard covers its bytes. ``_lost`` has the regions that died without
being released. If neither is set the counts are right, and none is inspected.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import operator
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ebbtide.base.errors import CapError
from ebbtide.base.units import format_size
from ebbtide.store.device import Device, StreamHandle
from ebbtide.store.extents import Extents, round_up
from ebbtide.store.guards import Cooling, Guard, Span

_LOG = logging.getLogger("ebbtide.store")
PLACE_ALIGN_BYTES = 64
_LEAST_CHUNK_BYTES = 2 << 20
_SLACK = 40
_REMEMBERED = 32
"""Bytes unused in this many backwards are returned to the system. If they are needed later, pinning costs 0.1 s per GiB
or more, and the number is doubled."""
_MOST_REMEMBERED = 4096

_sharing: weakref.WeakSet[Arena] = weakref.WeakSet()
"""The arenas of the budget that a process has by default. Several models may train in it, each with an arena."""


def shared_bytes() -> int:
    """Return the bytes that the arenas of the shared budget hold."""
    return sum(arena._extents.size_bytes for arena in list(_sharing))


class Region:
    """Host memory for storages that are copied out together; free again once none of its places is in use.

    Attributes:
        spans: Its ranges in the arena.
        guard: The last copy from it or into it.
        live: Sizes of the places in use, by their number in the region.
    """

    __slots__ = ("__weakref__", "guard", "live", "spans")

    def __init__(self, sizes: Sequence[int], spans: tuple[Span, ...], guard: Guard) -> None:
        self.spans, self.guard, self.live = spans, guard, dict(enumerate(sizes))


class Place(NamedTuple):
    """Host memory for one storage, released when the last reference is dropped.

    Attributes:
        nbytes: Its size.
        region: The memory that it is a part of.
        number: Which part.
        parts: Its memory in pieces, one-dimensional ``uint8``.
    """

    nbytes: int
    region: Region
    number: int
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    begin: int
    memory: torch.Tensor
    pinned: bool


_BEGIN = operator.attrgetter("begin")


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    region: weakref.ref[Region]
    spans: tuple[Span, ...]
    guard: Guard


class Arena:
    """Places in host memory. See [Note: the arena]. Not thread-safe: callers must hold a lock.

    Args:
        device: The device that copies from and into it.
        budget_bytes: Most bytes to hold; ``None``: as much as the machine has.
        least_bytes: The budget is shared, and this much of it may be held whatever the others hold; ``None``: it is its
            own.
    """

    def __init__(self, device: Device, budget_bytes: int | None, least_bytes: int | None = None) -> None:
        self._device, self._budget_bytes, self._least_bytes = device, budget_bytes, least_bytes
        self._extents = Extents(PLACE_ALIGN_BYTES)
        if least_bytes is not None:
            _sharing.add(self)
        self._chunks: list[_Chunk] = []
        self._records: dict[int, _Record] = {}
        self._cooling = Cooling()
        self._torn = False
        self._lost: deque[weakref.ref[Region]] = deque()  # a deque's ``append`` is atomic
        self._pins = device.capabilities.pinned_host
        self._top_bytes = self._expected_bytes = 0
        self._tops: deque[int] = deque(maxlen=_REMEMBERED)
        self._gave_back = False
        self._count = self._used_bytes = self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the places in use."""
        self._audit()
        return self._used_bytes

    @property
    def budget_bytes(self) -> int | None:
        """Most bytes to hold now; ``None``: as much as the machine has."""
        if self._budget_bytes is None or self._least_bytes is None or len(_sharing) == 1:
            return self._budget_bytes
        return max(self._least_bytes, self._budget_bytes - (shared_bytes() - self._extents.size_bytes))

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the budget still allows; ``None`` without a budget."""
        self._audit()
        budget = self.budget_bytes
        return None if budget is None else self._growth_bytes(budget) + self._extents.free_bytes

    def gauges(self) -> dict[str, int]:
        """Return the figures of host memory, by name: see ``Stats.store``."""
        self._audit()
        return {
            "host_held_bytes": self._extents.size_bytes,
            "host_pinned_bytes": sum(chunk.memory.numel() for chunk in self._chunks if chunk.pinned),
            "host_used_bytes": self._used_bytes,
            "host_most_used_bytes": self._peak_bytes,
            "host_chunks": self._count,  # that were ever allocated; each costs milliseconds
        }

    def expect(self, nbytes: int) -> None:
        """Expect this many further bytes: the next chunk holds them, if the device can allocate it."""
        self._expected_bytes = nbytes

    def take(self, nbytes: int, *, spare_bytes: int = 0) -> Place:
        """Return one place: see ``take_all``."""
        (place,) = self.take_all([nbytes], spare_bytes=spare_bytes)
        return place

    def take_all(self, sizes: Sequence[int], *, spare_bytes: int = 0) -> list[Place]:
        """Return places in one region; copies into it must wait for the events of its guard.

        Args:
            sizes: Their sizes, not empty.
            spare_bytes: Bytes of the budget that must remain free.

        Raises:
            CapError: The budget or the machine's memory is exceeded.
        """
        self._audit()
        self._cooling.prune(self._device)
        nbytes, rounded = sum(sizes), [-(-n // PLACE_ALIGN_BYTES) * PLACE_ALIGN_BYTES for n in sizes]
        need = sum(rounded)
        budget = self.budget_bytes
        if spare_bytes and budget is not None and budget - self._extents.used_bytes < need + spare_bytes:
            raise self._full(nbytes)
        self._torn = True
        spans = self._find(need)
        if spans is None:
            self._grow(nbytes, need)
            spans = self._find(need) or []
        region = Region(sizes, tuple(spans), Guard(self._cooling.over(spans)))
        pieces = self._parts(spans, 0, need)
        if len(pieces) == 1:
            memory = pieces[0].split_with_sizes(rounded)
            parts = [(m if n == r else m[:n],) for m, n, r in zip(memory, sizes, rounded, strict=True)]
        else:
            starts = itertools.accumulate(rounded, initial=0)
            parts = [self._parts(spans, start, size) for size, start in zip(sizes, starts, strict=False)]
        places = [Place(n, region, i, p) for i, (n, p) in enumerate(zip(sizes, parts, strict=True))]
        self._records[spans[0][0]] = _Record(weakref.ref(region, self._lost.append), region.spans, region.guard)
        self._used_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        for first, length in spans:
            self._top_bytes = max(self._top_bytes, first + length)
        self._torn = False
        return places

    def give(self, *places: Place) -> None:
        """Release places, in which copies may still run. May be called repeatedly."""
        for place in places:
            region = place.region
            record = self._records.get(region.spans[0][0])
            if record is None or record.region() is not region or place.number not in region.live:
                continue
            if self._torn:
                self._audit()  # before the counts are marked consistent
            self._torn = True
            del region.live[place.number]
            if not region.live:
                self._cool(record)
                for first, length in record.spans:
                    self._extents.release(first, length)
            self._used_bytes -= place.nbytes
            self._torn = False

    def trim(self, streams: Iterable[StreamHandle] = ()) -> None:
        """Free chunks that none of the last backwards needed and in which no copy runs.

        Args:
            streams: All streams that copy from or into its places.
        """
        self._audit()
        self._cooling.prune(self._device)
        self._cooling.mark(self._device, streams)
        self._tops.append(self._top_bytes)
        self._top_bytes = self._extents.size_bytes - self._extents.free_end_bytes
        chunks = len(self._chunks)
        self._shrink(max(self._tops), wait=False)
        self._gave_back = self._gave_back or len(self._chunks) < chunks

    def clear(self) -> None:
        """Free every chunk after the last place, once its copies are done."""
        self._audit()
        self._shrink(0, wait=True)

    def _find(self, need: int) -> list[Span] | None:
        first = self._extents.reserve(need)
        return self._extents.gather(need) if first is None else [(first, need)]

    def _parts(self, spans: list[Span], start: int, nbytes: int) -> tuple[torch.Tensor, ...]:
        """Return the memory of ``nbytes`` that begin ``start`` bytes after the beginning of some spans."""
        parts: list[torch.Tensor] = []
        for begin, length in spans:
            if start >= length:
                start -= length
                continue
            first = begin + start
            end = first + min(length - start, nbytes)
            nbytes, start = nbytes - (end - first), 0
            index = bisect.bisect_right(self._chunks, first, key=_BEGIN) - 1
            while first < end:
                chunk = self._chunks[index]
                part = chunk.memory[first - chunk.begin : end - chunk.begin]
                parts.append(part)
                first, index = first + part.numel(), index + 1
        return tuple(parts)

    def _cool(self, record: _Record) -> None:
        # The guard first: after an interrupt, it or the record must exist.
        for span in record.spans:
            self._cooling.add(span, record.guard)
        self._records.pop(record.spans[0][0], None)

    def _audit(self) -> None:
        """Recount from the live places, if the counts may be wrong."""
        if not self._torn and not self._lost:
            return
        self._torn = True
        self._lost.clear()
        used_bytes = 0
        for record in list(self._records.values()):
            region = record.region()
            if region is None or not region.live:
                self._cool(record)
            else:
                used_bytes += sum(region.live.values())
        records = self._records.values()
        self._extents.size_bytes = sum(chunk.memory.numel() for chunk in self._chunks)
        self._extents.keep(span for record in records for span in record.spans)
        self._used_bytes = used_bytes
        self._torn = False

    def _growth_bytes(self, budget_bytes: int) -> int:
        return max(0, budget_bytes - self._extents.size_bytes) // PLACE_ALIGN_BYTES * PLACE_ALIGN_BYTES

    def _grow(self, nbytes: int, need: int) -> None:
        if self._gave_back:
            self._tops = deque(self._tops, maxlen=min(2 * (self._tops.maxlen or _REMEMBERED), _MOST_REMEMBERED))
            self._gave_back = False
        pinned_first = (True, False) if self._pins else (False,)
        cause: RuntimeError | None = None
        for pinned, generous in itertools.product(pinned_first, (True, False)):
            missing = need - self._extents.free_bytes
            usual = max(round_up(self._extents.size_bytes // _SLACK), _LEAST_CHUNK_BYTES)
            step = max(usual, self._expected_bytes - self._extents.free_bytes) if generous else missing
            step, self._expected_bytes = round_up(max(step, missing)), 0
            if (budget := self.budget_bytes) is not None:
                step = min(step, self._growth_bytes(budget))
            if step < missing:
                raise self._full(nbytes)
            try:
                self._add_chunks(step, missing, pinned=pinned)
            except RuntimeError as error:
                cause = cause or error.with_traceback(None)  # whose frames hold what could not be pinned
                continue
            if self._pins and not pinned:
                self._pins = False
                # As text: a log record may be kept, and an error references its frames.
                _LOG.warning(
                    "cannot pin host memory (%s): using pageable memory, whose copies stall compute", str(cause)
                )
            return
        raise CapError(
            f"cannot allocate another {format_size(nbytes)} of host memory ({format_size(self._used_bytes)} in "
            f"use): {cause}",
            expected="host memory that can be allocated",
            hint="set host_budget below the free memory: what exceeds it goes to disk; or offload less",
        ) from cause

    def _add_chunks(self, nbytes: int, least_bytes: int, *, pinned: bool) -> None:
        while least_bytes > 0:
            memory = self._device.allocate_host(nbytes, pinned=pinned)
            self._count += 1
            self._chunks.append(_Chunk(self._extents.size_bytes, memory, pinned))
            self._extents.grow(memory.numel())
            least_bytes -= memory.numel()
            nbytes -= memory.numel()
        _LOG.debug("host memory: %s now", format_size(self._extents.size_bytes))

    def _shrink(self, keep_bytes: int, *, wait: bool) -> None:
        self._torn = True
        while self._chunks and keep_bytes <= self._chunks[-1].begin:
            chunk, size = self._chunks[-1], self._extents.size_bytes
            if size - self._extents.free_end_bytes > chunk.begin:
                break
            for guard in self._cooling.over([(chunk.begin, size - chunk.begin)]):
                if wait:
                    self._device.synchronize(guard.done(self._device))
                elif not guard.quiet(self._device):
                    self._torn = False
                    return
            self._extents.cut(chunk.begin)
            self._chunks.pop()
            self._device.free_host(chunk.memory)
        self._torn = False

    def _full(self, nbytes: int) -> CapError:
        return CapError(
            f"{format_size(nbytes)} of host memory needed, {format_size(self._used_bytes)} in use",
            expected=f"no more than the host budget of {format_size(self.budget_bytes or 0)}",
            hint="raise host_budget, or offload less",
        )
