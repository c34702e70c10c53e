"""The host tier: offloaded bytes wait in host memory; streams copy them beside compute. See [Note: ordering]."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from ebbtide.base.errors import ConfigError, TargetError
from ebbtide.store.counters import TierCounters
from ebbtide.store.device import Device, EventHandle, StreamHandle
from ebbtide.store.hostbuffers import HostBuffer, HostBuffers

_MOST_SPANS = 4096


@dataclass(slots=True, eq=False)
class _CopyIn:
    """A copy-in under way: its target, the stream that owns the target's memory, and its event."""

    target: torch.Tensor
    compute: StreamHandle
    done: EventHandle


class HostSlot:
    """One storage in host memory. See [Note: a slot's life]; made by ``HostTier.park``, who owns its fields."""

    __slots__ = ("__weakref__", "ahead", "buffer", "compute", "done", "freed", "_nbytes", "_tier", "where")

    def __init__(self, tier: HostTier, buffer: HostBuffer, where: torch.device) -> None:
        self._tier, self.where, self._nbytes = tier, where, buffer.nbytes
        self.buffer: HostBuffer | None = buffer
        self.compute: StreamHandle = None
        self.done: EventHandle | None = None
        self.ahead: _CopyIn | None = None
        self.freed = False

    def __del__(self) -> None:
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes parked."""
        return self._nbytes

    @property
    def parked(self) -> bool:
        """Whether the copy-out is done."""
        return self.done is None or self._tier.device.query(self.done)

    def wait_parked(self) -> float:
        """Make compute wait for the copy-out; returns the stall in seconds where the device knows it at once."""
        return 0.0 if self.done is None else self._tier.stall(self.compute, self.done)

    def cancel(self) -> bool:
        """Return False: what was asked of a stream cannot be withdrawn."""
        return False

    def prefetch(self) -> None:
        """Begin the copy-in now.

        Raises:
            TargetError: The slot was freed, or the tier is closed.
        """
        self._tier.prefetch(self)

    def take(self) -> tuple[torch.Tensor, float]:
        """Return the bytes on the device they came from, and the stall in seconds.

        Raises:
            TargetError: The slot was freed, or the tier is closed.
        """
        return self._tier.take(self)

    def free(self) -> None:
        """Give the buffer back; a copy that still uses it is waited for by the buffer's next user."""
        if not self.freed:
            self._tier.bury(self)
            self.freed = True


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
        self._buffers = HostBuffers(device, budget_bytes)
        self._counters = TierCounters()
        self._lock = threading.Lock()
        self._sides: dict[torch.device, tuple[StreamHandle, StreamHandle]] = {}
        self._dead: deque[HostSlot] = deque()
        self._spans: deque[tuple[str, EventHandle, EventHandle]] = deque()
        self._closed = False

    @property
    def name(self) -> str:
        """``"host"``."""
        return "host"

    @property
    def counters(self) -> TierCounters:
        """What was moved; times are those of copies that are known to be done."""
        self._harvest()
        return self._counters

    @property
    def used_bytes(self) -> int:
        """Bytes of buffers in use now."""
        with self._lock:
            self._settle()
            return self._buffers.used_bytes

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the budget still allows; ``None`` without a budget."""
        with self._lock:
            self._settle()
            return self._buffers.free_bytes

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on the device."""
        return self.device.owns(tensor)

    def park(self, source: torch.Tensor) -> HostSlot:
        """Begin to copy out ``source``; its memory must stay until the slot is parked.

        Args:
            source: One-dimensional contiguous ``uint8`` view on the device; not empty.

        Raises:
            CapError: The host budget is reached.
            ConfigError: The source is not such a tensor.
            TargetError: The tier is closed.
        """
        self._check(None)
        if len(self._spans) > _MOST_SPANS:
            self._harvest()
        if source.dtype is not torch.uint8 or source.dim() != 1 or not source.is_contiguous() or not source.numel():
            raise ConfigError(
                f"source is {source.dtype} of shape {tuple(source.shape)}",
                expected="a contiguous, one-dimensional, not empty torch.uint8 tensor",
            )
        with self._lock:
            self._settle()
            buffer = self._buffers.take(source.numel())
        slot = HostSlot(self, buffer, source.device)
        device = self.device
        self._counters.out_bytes += slot.nbytes
        if self.synchronous:
            device.copy_now(buffer.memory, source)
            return slot
        slot.compute = device.compute_stream(source.device)
        out, _ = self._side_streams(source.device)
        device.wait(out, device.record(slot.compute))
        if buffer.last is not None:
            device.wait(out, buffer.last)
        begin = device.record(out)
        try:
            device.copy(buffer.memory, source, out)
        finally:  # interrupted in between, the copy runs: the buffer's next user must wait for it
            slot.done = buffer.last = device.record(out)
        self._spans.append(("out_seconds", begin, slot.done))
        return slot

    def prefetch(self, slot: HostSlot) -> None:
        """Begin the copy-in of ``slot``, unless it has begun."""
        self._check(slot)
        if slot.ahead is None and not self.synchronous:
            slot.ahead = self._copy_in(slot)

    def take(self, slot: HostSlot) -> tuple[torch.Tensor, float]:
        """Return the bytes of ``slot`` and the stall in seconds."""
        self._check(slot)
        with self._lock:
            self._settle()
        if self.synchronous:
            target = self.device.allocate(slot.nbytes, slot.where)
            self.device.copy_now(target, self._buffer_of(slot).memory)
            self._counters.in_bytes += slot.nbytes
            return target, 0.0
        compute = self.device.compute_stream(slot.where)
        ahead = slot.ahead
        if ahead is not None and ahead.compute != compute:
            # Its memory belongs to another stream, which would reuse it while this one still reads.
            self.device.wait(ahead.compute, ahead.done)
            ahead = None
        if ahead is None:
            ahead = slot.ahead = self._copy_in(slot)
        stall = self.stall(compute, ahead.done)
        slot.ahead = None  # not before compute waits: its memory must not be dropped while the copy runs
        return ahead.target, stall

    def stall(self, stream: StreamHandle, event: EventHandle) -> float:
        """Make ``stream`` wait for ``event`` and count the stall."""
        if self.device.query(event):
            return self.device.wait(stream, event)
        begin = self.device.record(stream)
        seconds = self.device.wait(stream, event)
        self._spans.append(("stall_seconds", begin, self.device.record(stream)))
        return seconds

    def bury(self, slot: HostSlot) -> None:
        """Take back a freed slot's buffer, when the lock is taken next. Called by dying tickets in any thread.

        A ticket may die through the collector while this very thread holds the lock: so it is not asked for here.
        """
        self._dead.append(slot)
        if self._closed and self._lock.acquire(blocking=False):  # nobody may come any more
            try:
                self._settle()
                self._buffers.trim(wait=True)
            finally:
                self._lock.release()

    def trim(self) -> None:
        """Give back spare buffers that no copy uses."""
        self._harvest()
        with self._lock:
            self._settle()
            self._buffers.trim()

    def close(self) -> None:
        """Wait for copies and give host memory back. Harmless when repeated."""
        if self._closed:
            return
        with self._lock:
            self._settle()
            self._closed = True
            self._buffers.trim(wait=True)

    def _copy_in(self, slot: HostSlot) -> _CopyIn:
        device, buffer = self.device, self._buffer_of(slot)
        compute = device.compute_stream(slot.where)
        _, into = self._side_streams(slot.where)
        target = device.allocate(slot.nbytes, slot.where)
        device.wait(into, device.record(compute))
        device.wait(into, slot.done)
        begin = device.record(into)
        try:
            device.copy(target, buffer.memory, into)
        except (
            BaseException
        ):  # an interrupt after the copy began: it must be done before the target's memory is dropped
            device.wait(compute, device.record(into))
            raise
        finally:
            done = buffer.last = device.record(into)
        self._counters.in_bytes += slot.nbytes
        self._spans.append(("in_seconds", begin, done))
        return _CopyIn(target, compute, done)

    def _side_streams(self, where: torch.device) -> tuple[StreamHandle, StreamHandle]:
        with self._lock:
            if where not in self._sides:
                self._sides[where] = self.device.side_stream(where, "out"), self.device.side_stream(where, "in")
            return self._sides[where]

    def _buffer_of(self, slot: HostSlot) -> HostBuffer:
        if slot.buffer is None:
            raise TargetError("a slot is used after it was freed", hint="keep its ticket alive")
        return slot.buffer

    def _check(self, slot: HostSlot | None) -> None:
        if self._closed:
            raise TargetError("the host tier is closed", hint="keep it open until the last backward is done")
        if slot is not None and slot.freed:
            raise TargetError("a slot is used after it was freed", hint="keep its ticket alive")

    def _settle(self) -> None:
        # Each step may be interrupted and is then done again: what is dropped or forgotten comes last.
        while self._dead:
            slot = self._dead[0]
            if slot.ahead is not None:  # the target's memory goes back to a stream that must not run before the copy
                self.stall(slot.ahead.compute, slot.ahead.done)
                slot.ahead = None
            buffer, slot.buffer = slot.buffer, None
            if buffer is not None:
                self._buffers.give(buffer)
            self._dead.popleft()

    def _harvest(self) -> None:
        for _ in range(len(self._spans)):
            field, begin, end = span = self._spans.popleft()
            if not self.device.query(end):
                self._spans.append(span)
                continue
            seconds = self.device.elapsed_seconds(begin, end)
            setattr(self._counters, field, getattr(self._counters, field) + seconds)
