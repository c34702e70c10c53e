"""The device interface of a tier: streams, events, memory and copies. Capabilities decide, never names.

[Note: ordering]
A copy-out runs on its own stream after an event of the compute stream; a copy-in runs on another, into memory allocated
on the compute stream, after that stream's position at the time; compute waits for each slot's event. All waits are
between streams: the host waits for nothing in a step. With one compute stream, ``record_stream`` is not needed, because
memory is dropped only after that stream waited for its users. With several, a source may be in memory of one compute
stream and be saved on another: the wait is on the latter, but the allocator returns the memory to the former. So once
one is saved on a stream other than the default one, sources are recorded on the stream that saved them. A stream that
only makes tensors, which others save, is not noticed: such tensors need the program's own ``record_stream``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

StreamHandle = Any
"""A device's stream, opaque to others."""
EventHandle = Any
"""A device's event, opaque to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a device.

    Attributes:
        asynchronous_copies: Copies overlap compute, and events order them.
        pinned_host: Host memory can be pinned, which makes copies fast.
        timed_events: Events have the device's time; without it, times of copies and stalls are unknown.
    """

    asynchronous_copies: bool
    pinned_host: bool
    timed_events: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The free memory of a device's allocator.

    Attributes:
        free_bytes: Bytes available without flushing its cache: cached bytes and the device's free bytes.
        flushes: How often it flushed its cache because memory ran out.
    """

    free_bytes: int
    flushes: int


class Device(Protocol):
    """A kind of device; a ``torch.device`` selects one of several."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on such a device."""
        ...

    def compute_stream(self, device: torch.device) -> StreamHandle:
        """Return the calling thread's compute stream. Never called inside ``copy_all``."""
        ...

    def default_stream(self, device: torch.device) -> StreamHandle | None:
        """Return the stream that computes unless another is entered; ``None``: unknown for this kind of device."""
        ...

    def side_stream(self, device: torch.device, purpose: str) -> StreamHandle:
        """Make a side stream; ``purpose`` (``"out"``, ``"in"``) names it in traces."""
        ...

    def record(self, stream: StreamHandle, *, timed: bool = False) -> EventHandle:
        """Return an event after all work queued on ``stream`` so far.

        Args:
            stream: The stream.
            timed: Whether the event will be passed to ``elapsed_seconds``; such an event costs more. Without effect on
                a device that cannot time events.
        """
        ...

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        """Make ``stream`` wait for ``event``."""

    def query(self, event: EventHandle) -> bool:
        """Whether the event has completed."""
        ...

    def synchronize(self, event: EventHandle) -> None:
        """Make the host wait for the event. Only outside a step, or if the alternative is an error."""

    def elapsed_seconds(self, begin: EventHandle, end: EventHandle) -> float:
        """Return the time between two completed timed events. Only for a device that can time events."""
        ...

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return new ``uint8`` memory of the compute stream, with a storage of exactly ``nbytes``.

        Raises:
            torch.OutOfMemoryError: The device has no more.
        """
        ...

    def free_memory(self, device: torch.device) -> FreeMemory | None:
        """Return the free memory of the device's allocator; ``None``: not known."""
        ...

    def record_use(self, tensor: torch.Tensor, stream: StreamHandle) -> None:
        """Keep a dropped tensor's memory until ``stream`` has finished the work queued by then."""

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return new ``uint8`` host memory: at most ``nbytes``, at least half of that.

        It is less if the device's allocator would round up; the caller requests the rest separately. It is freed with
        its last reference.

        Args:
            nbytes: Bytes to allocate, a multiple of 64.
            pinned: Whether it must be pinned; only for a device that can.

        Raises:
            RuntimeError: There is none, or it cannot be pinned.
        """
        ...

    def free_host(self, buffer: torch.Tensor) -> None:
        """Note that no copy uses this host memory anymore."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: StreamHandle) -> None:
        """Queue several copies, each a target and a source, on ``stream``; returns at once."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in order with compute, and return when done."""


def capture_query() -> Callable[[], bool]:
    """Return a function that returns whether the current stream is captured in a graph (``torch.cuda.graph``)."""
    if not torch.accelerator.is_available():
        return lambda: False
    return getattr(torch.get_device_module(), "is_current_stream_capturing", _is_capturing)


def _is_capturing() -> bool:
    stream: Any = torch.accelerator.current_stream()  # torch before 2.12 has no such method
    return hasattr(stream, "is_capturing") and stream.is_capturing()
