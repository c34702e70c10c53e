"""What a tier needs of a device: streams, events, memory and copies. Capabilities decide, never names.

[Note: ordering]
A copy-out runs on its own stream after an event of the compute stream; a copy-in runs on another, into memory that was
allocated on the compute stream, after that stream's position at that moment; compute waits for each slot's own event.
All waits are between streams: the host waits for nothing in a step. As long as there is one compute stream, the
allocator need not know of side streams (``record_stream``), because memory is dropped only after that stream waited for
whoever used it. With several, a source may lie in memory of one compute stream and be saved on another: the wait is on
the latter, and the allocator gives the memory back to the former. So from the second compute stream on, sources are
recorded on the stream that saved them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

StreamHandle = Any
"""A stream of some device; only that device looks inside."""
EventHandle = Any
"""An event of some device; only that device looks inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device can do.

    Attributes:
        asynchronous_copies: Copies run beside compute, and events order them.
        pinned_host: Host memory can be pinned, which is what makes them fast.
        timed_events: Events keep the device's time; without it, no time of a copy or a stall is known.
    """

    asynchronous_copies: bool
    pinned_host: bool
    timed_events: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What an allocator of device memory has left.

    Attributes:
        free_bytes: Bytes that it can give while it keeps what it has: those it keeps for reuse, and the device's own.
        flushes: How often it gave back what it keeps, because there was too little.
    """

    free_bytes: int
    flushes: int


class Device(Protocol):
    """A kind of device; where there are several, a ``torch.device`` says which one is meant."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on such a device."""
        ...

    def capturing(self) -> bool:
        """Whether what the caller's thread asks of the device now is recorded in a graph, to be replayed later."""
        ...

    def compute_stream(self, where: torch.device) -> StreamHandle:
        """Return the stream on which the caller's thread computes now. Never asked inside ``copy``."""
        ...

    def side_stream(self, where: torch.device, purpose: str) -> StreamHandle:
        """Make a stream beside it; ``purpose`` (``"out"``, ``"in"``) names it in traces."""
        ...

    def record(self, stream: StreamHandle, *, timed: bool = False) -> EventHandle:
        """Return an event that happens when all that was asked of ``stream`` so far is done.

        Args:
            stream: The stream.
            timed: Whether ``elapsed_seconds`` will be asked for; such an event costs more. Without effect on a device
                that cannot time events.
        """
        ...

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        """Make ``stream`` wait for ``event``."""
        ...

    def query(self, event: EventHandle) -> bool:
        """Whether the event has happened."""
        ...

    def synchronize(self, event: EventHandle) -> None:
        """Make the host wait for the event. Only outside a step, or where the alternative is an error."""
        ...

    def elapsed_seconds(self, begin: EventHandle, end: EventHandle) -> float:
        """Return the time between two timed events that have happened. Only of a device that can time events."""
        ...

    def allocate(self, nbytes: int, where: torch.device) -> torch.Tensor:
        """Return fresh ``uint8`` memory of the compute stream, its storage exactly ``nbytes`` long.

        Raises:
            torch.OutOfMemoryError: The device has no more.
        """
        ...

    def free_memory(self, where: torch.device) -> FreeMemory | None:
        """Return what the device's allocator has left; ``None``: not known."""
        ...

    def record_use(self, tensor: torch.Tensor, stream: StreamHandle) -> None:
        """Keep the tensor's memory, once it is dropped, until ``stream`` has done what it was asked for by then."""
        ...

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return fresh ``uint8`` host memory, at most ``nbytes`` of it and at least half of that.

        Less, where the device's own allocator would hold more than was asked for; whoever needs more asks again. It
        goes back to the system when nobody refers to it any more.

        Args:
            nbytes: Bytes wanted, a multiple of 64.
            pinned: Whether it must be pinned; only asked of a device that can.

        Raises:
            RuntimeError: There is none, or it cannot be pinned.
        """
        ...

    def free_host(self, buffer: torch.Tensor) -> None:
        """Note that no copy uses this host memory any more."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: StreamHandle) -> None:
        """Ask ``stream`` to copy; returns at once."""
        ...

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: StreamHandle) -> None:
        """Ask ``stream`` for several copies, given as target and source; returns at once."""
        ...

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in order with compute and return when it is done."""
        ...
