"""A simulated device: virtual time, and poison where a real device would return garbage.

[Note: virtual time] Each stream has a clock: the end of all work queued on it. A copy begins as early as its stream and
its waits allow (the host runs far ahead), and takes bytes ÷ rate. The current time is the compute stream's clock; only
``compute(seconds)``, a wait of compute, or ``synchronize`` advances it. A copy is performed when the clock reaches its
end, in order of ends; a copy-in's bytes stay ``0xFF`` in the target until compute has waited for it.

[Note: poison] Each stream also records the last operation of every other stream that it is ordered after (a vector
clock). A copy that is not ordered after the producer of its source, or after the last use of its target, delivers
``0xFF``: as floating point, NaN. So does one whose source's storage died before its end, or whose host buffer was
freed. This holds for any rates: lucky timing cannot hide a missing wait. Every such error is also a line in
``violations``.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.engine.untraced import leave_untraced
from ebbtide.store.device import Capabilities, FreeMemory
from tests.helpers.fakeuses import Uses

_POISON = 0xFF
Vector = dict[str, int]


class FakeStream:
    """A stream of the fake device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock_seconds = 0.0
        self.sequence = 0
        self.seen: Vector = {}

    def step(self) -> int:
        """Count an operation and return its number."""
        self.sequence += 1
        self.seen[self.name] = self.sequence
        return self.sequence


@dataclass(frozen=True, slots=True, eq=False)
class FakeEvent:
    """The work queued on a stream up to some point."""

    stream: FakeStream
    seconds: float
    seen: Vector


@dataclass(slots=True, eq=False)
class _Copy:
    """A queued copy. Like a device, it keeps neither side alive."""

    begin_seconds: float
    end_seconds: float
    stream: FakeStream
    number: int
    source: weakref.ref[torch.UntypedStorage]
    source_offset: int
    target: weakref.ref[torch.UntypedStorage]
    target_offset: int
    nbytes: int
    inward: bool
    fault: str = ""
    payload: torch.Tensor | None = None


def _bytes(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (nbytes,), (1,))


class FakeDevice:
    """The ``Device`` protocol in virtual time; every CPU tensor except host buffers counts as on the device.

    Args:
        copy_out_bytes_per_second: Rate of copies to host buffers.
        copy_in_bytes_per_second: Rate of copies from them.
        asynchronous_copies: ``False`` makes a device without side streams.
        device_limit_bytes: Device memory; ``None``: unlimited.
        host_limit_bytes: Host memory; ``None``: unlimited.
        pinned_limit_bytes: Limit of pinned memory; ``None``: all of it.

    Attributes:
        out_bytes: Bytes copied out so far.
        in_bytes: Bytes copied in so far.
        live_bytes: Bytes allocated on the device and still alive.
        peak_bytes: Their maximum.
        host_bytes: Allocated host memory.
        host_calls: Number of allocations of host memory.
        flushes: Flushes that ``free_memory`` reports.
        violations: One line for each mistake. See [Note: poison].
    """

    def __init__(
        self,
        copy_out_bytes_per_second: float,
        copy_in_bytes_per_second: float,
        *,
        asynchronous_copies: bool = True,
        device_limit_bytes: int | None = None,
        host_limit_bytes: int | None = None,
        pinned_limit_bytes: int | None = None,
    ) -> None:
        leave_untraced(__name__, Uses.__module__)
        self.capabilities = Capabilities(asynchronous_copies=asynchronous_copies, pinned_host=True, timed_events=True)
        self._rates = {True: copy_in_bytes_per_second, False: copy_out_bytes_per_second}
        self._device_limit_bytes = device_limit_bytes
        self._host_limit_bytes, self._pinned_limit_bytes = host_limit_bytes, pinned_limit_bytes
        self._compute = FakeStream("compute")
        self._streams: dict[str, FakeStream] = {"compute": self._compute}
        self._hosts: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._uses: weakref.WeakKeyDictionary[torch.UntypedStorage, Uses] = weakref.WeakKeyDictionary()
        self._pending: list[tuple[float, int, _Copy]] = []
        self._arrived: list[_Copy] = []
        self._count = 0
        self._observed: Vector = {}  # operations that the host has seen finish
        self.out_bytes = self.in_bytes = self.live_bytes = self.peak_bytes = self.host_bytes = 0
        self._pinned_bytes = self.host_calls = self.flushes = 0
        self.violations: list[str] = []

    @property
    def now_seconds(self) -> float:
        """Virtual time."""
        return self._compute.clock_seconds

    def compute(self, seconds: float, *, writes: torch.Tensor | None = None) -> None:
        """Let compute run for ``seconds`` and write ``writes``."""
        number = self._compute.step()
        if writes is not None:
            storage = writes.untyped_storage()
            self._uses_of(storage).write("compute", number, 0, storage.nbytes())
        self._advance(self.now_seconds + seconds)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor counts as on the device."""
        return tensor.device.type == "cpu" and tensor.untyped_storage() not in self._hosts

    def compute_stream(self, device: torch.device) -> FakeStream:
        """Return the one compute stream."""
        return self._compute

    def default_stream(self, device: torch.device) -> FakeStream:
        """Return the one compute stream."""
        return self._compute

    def side_stream(self, device: torch.device, purpose: str) -> FakeStream:
        """Make a stream."""
        stream = FakeStream(f"{purpose}{len(self._streams)}")
        self._streams[stream.name] = stream
        return stream

    def record(self, stream: FakeStream, *, timed: bool = False) -> FakeEvent:
        """Return an event after all work queued on ``stream``."""
        return FakeEvent(stream, stream.clock_seconds, dict(stream.seen))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Order ``stream`` after ``event``: it waits until then."""
        for name, number in event.seen.items():
            stream.seen[name] = max(stream.seen.get(name, 0), number)
        # Not by adding the stall: rounding could stop the clock just before the event.
        if stream is self._compute:
            self._advance(max(self.now_seconds, event.seconds))
        else:
            stream.clock_seconds = max(stream.clock_seconds, event.seconds)

    def query(self, event: FakeEvent) -> bool:
        """Whether the event is in the past; if so, everything queued later is ordered after it."""
        past = event.seconds <= self.now_seconds
        if past:
            self._observe(event)
        return past

    def synchronize(self, event: FakeEvent) -> None:
        """Make the host, and so everything queued later, wait for the event."""
        self._advance(max(self.now_seconds, event.seconds))
        self._observe(event)

    def _observe(self, event: FakeEvent) -> None:
        for name, number in event.seen.items():
            self._observed[name] = max(self._observed.get(name, 0), number)

    def elapsed_seconds(self, begin: FakeEvent, end: FakeEvent) -> float:
        """Return the virtual time between two events."""
        return end.seconds - begin.seconds

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return poisoned device memory, counted while it is alive.

        Raises:
            torch.OutOfMemoryError: There is no more.
        """
        if self._device_limit_bytes is not None and self.live_bytes + nbytes > self._device_limit_bytes:
            raise torch.OutOfMemoryError(f"fake device: out of memory, {nbytes} bytes wanted")
        tensor = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self._uses_of(tensor.untyped_storage()).write("compute", self._compute.step(), 0, nbytes)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(tensor.untyped_storage(), self._died, nbytes).atexit = False
        return tensor

    def free_memory(self, device: torch.device) -> FreeMemory | None:
        """Return the free part of the limit."""
        limit = self._device_limit_bytes
        return None if limit is None else FreeMemory(free_bytes=limit - self.live_bytes, flushes=self.flushes)

    def record_use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Do nothing: there is one compute stream."""

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return poisoned host memory.

        Raises:
            RuntimeError: The host has no more, or cannot pin more.
        """
        if self._host_limit_bytes is not None and self.host_bytes + nbytes > self._host_limit_bytes:
            raise RuntimeError("fake host: out of memory")
        if pinned and self._pinned_limit_bytes is not None and self._pinned_bytes + nbytes > self._pinned_limit_bytes:
            raise RuntimeError("fake host: no more can be pinned")
        tensor = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self._hosts.add(tensor.untyped_storage())
        self.host_calls += 1
        self._count_host(nbytes, pinned)
        weakref.finalize(tensor.untyped_storage(), self._count_host, -nbytes, pinned).atexit = False
        return tensor

    def free_host(self, buffer: torch.Tensor) -> None:
        """Poison the buffer: a copy that still uses it delivers NaN."""
        for _, _, copy in self._pending:
            if buffer.untyped_storage() in (copy.source(), copy.target()):
                copy.fault = copy.fault or "its host buffer was freed before its end"
        buffer.fill_(_POISON)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        """Queue a copy on ``stream``; the side that is a host buffer determines the direction."""
        inward = target.untyped_storage() not in self._hosts
        begin = stream.clock_seconds
        stream.clock_seconds = begin + source.numel() / self._rates[inward]
        number = stream.step()
        copy = _Copy(
            begin_seconds=begin,
            end_seconds=stream.clock_seconds,
            stream=stream,
            number=number,
            source=weakref.ref(source.untyped_storage()),
            source_offset=int(source.storage_offset()),
            target=weakref.ref(target.untyped_storage()),
            target_offset=int(target.storage_offset()),
            nbytes=source.numel(),
            inward=inward,
        )
        self._check_order(copy, source.untyped_storage(), target.untyped_storage())
        self._count += 1
        heapq.heappush(self._pending, (copy.end_seconds, self._count, copy))
        if inward:
            self.in_bytes += copy.nbytes
            target.fill_(_POISON)
        else:
            self.out_bytes += copy.nbytes
        self._advance(self.now_seconds)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: FakeStream) -> None:
        """Queue several copies on ``stream``."""
        for target, source in pairs:
            self.copy(target, source, stream)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the compute stream and wait."""
        self.copy(target, source, self._compute)
        self._advance(self._compute.clock_seconds)

    def _check_order(self, copy: _Copy, source: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
        read, written, seen = self._uses_of(source), self._uses_of(target), copy.stream.seen
        out_of = copy.source_offset, copy.source_offset + copy.nbytes
        into = copy.target_offset, copy.target_offset + copy.nbytes
        if not copy.inward and not read.written(*out_of):
            # Producer unknown: assume now, the latest possible time.
            read.write("compute", self._compute.sequence, 0, source.nbytes())
        for name, number in (*read.before_read(*out_of), *written.before_write(*into)):
            if max(seen.get(name, 0), self._observed.get(name, 0)) < number:
                copy.fault = copy.fault or f"it is not ordered after operation {number} of stream {name!r}"
        read.read(copy.stream.name, copy.number, *out_of)
        written.write(copy.stream.name, copy.number, *into)

    def _advance(self, seconds: float) -> None:
        self._compute.clock_seconds = max(self._compute.clock_seconds, seconds)
        while self._pending and self._pending[0][0] <= self.now_seconds:
            self._perform(heapq.heappop(self._pending)[2])
        waiting: list[_Copy] = []
        for copy in self._arrived:
            if self._compute.seen.get(copy.stream.name, 0) < copy.number and copy.target() is not None:
                waiting.append(copy)
            else:
                self._deliver(copy)
        self._arrived = waiting

    def _perform(self, copy: _Copy) -> None:
        source = copy.source()
        if source is None:
            copy.fault = copy.fault or "its source died before its end"
        if source is None or copy.fault:
            copy.payload = torch.full((copy.nbytes,), _POISON, dtype=torch.uint8)
        else:
            copy.payload = _bytes(source, copy.source_offset, copy.nbytes).clone()
        if copy.inward:
            self._arrived.append(copy)
        else:
            self._deliver(copy)

    def _deliver(self, copy: _Copy) -> None:
        target = copy.target()
        if target is None:
            copy.fault = copy.fault or "its target died before compute had waited for it"
        elif copy.payload is not None:
            _bytes(target, copy.target_offset, copy.nbytes).copy_(copy.payload)
        if copy.fault:
            way = "in" if copy.inward else "out"
            self.violations.append(f"copy-{way} of {copy.nbytes} bytes at {copy.begin_seconds:g} s: {copy.fault}")

    def _uses_of(self, storage: torch.UntypedStorage) -> Uses:
        uses = self._uses.get(storage)
        if uses is None:
            uses = self._uses[storage] = Uses()
        return uses

    def _died(self, nbytes: int) -> None:
        self.live_bytes -= nbytes

    def _count_host(self, nbytes: int, pinned: bool) -> None:
        self.host_bytes += nbytes
        self._pinned_bytes += nbytes if pinned else 0
