"""A real device with streams: whatever ``torch.accelerator`` names (CUDA and ROCm, XPU, NPU).

What a device can do is tried once: streams, events, pinned memory. Constructed only where an accelerator is.
"""

from __future__ import annotations

import logging

import torch

from ebbtide.base.errors import TargetError
from ebbtide.store.device import Capabilities

_LOG = logging.getLogger("ebbtide.store")
_UNRELIABLE = frozenset({"npu"})
"""Kinds whose asynchronous copies exist and pass a trial, but are not to be relied on."""


class AcceleratorDevice:
    """The ``Device`` protocol over ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.

    Raises:
        TargetError: The machine has no accelerator.
    """

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise TargetError(
                "host target on a machine without an accelerator",
                expected="a device whose memory is scarcer than the host's",
                hint="leave the target out, or use target='disk': RAM is what is scarce here",
            )
        self.kind = found.type
        pinned = self._can_pin()
        asynchronous = pinned and self.kind not in _UNRELIABLE and self._can_order(found)
        self.capabilities = Capabilities(asynchronous_copies=asynchronous, pinned_host=pinned)
        if not asynchronous:
            _LOG.warning("copies to host memory are synchronous on %s: each one halts compute", self.kind)

    @staticmethod
    def _can_pin() -> bool:
        try:
            return torch.empty(1, dtype=torch.uint8, pin_memory=True).is_pinned()
        except RuntimeError:
            return False

    def _can_order(self, where: torch.device) -> bool:
        try:
            stream = torch.Stream(device=where)
            stream.wait_event(self.record(torch.accelerator.current_stream(where)))
            self.record(stream).synchronize()
        except (RuntimeError, NotImplementedError, TypeError):
            return False
        return True

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on such a device."""
        return tensor.device.type == self.kind

    def compute_stream(self, where: torch.device) -> torch.Stream:
        """Return the stream on which the caller's thread computes now, on that device."""
        return torch.accelerator.current_stream(where)

    def side_stream(self, where: torch.device, purpose: str) -> torch.Stream:
        """Make a stream on that device."""
        return torch.Stream(device=where)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Return an event, with its time, of all that was asked of ``stream``."""
        event = torch.Event(device=stream.device, enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> float:
        """Order ``stream`` after ``event``; the stall is known later, from events around it."""
        stream.wait_event(event)
        return 0.0

    def query(self, event: torch.Event) -> bool:
        """Whether the event has happened."""
        return event.query()

    def synchronize(self, event: torch.Event) -> None:
        """Make the host wait."""
        event.synchronize()

    def elapsed_seconds(self, begin: torch.Event, end: torch.Event) -> float:
        """Return the device's own time between two events that have happened."""
        return begin.elapsed_time(end) / 1000.0

    def allocate(self, nbytes: int, where: torch.device) -> torch.Tensor:
        """Return memory of the current stream of that device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=where)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Return host memory, pinned unless the device cannot or the system gives no more of that.

        Raises:
            RuntimeError: There is not even pageable memory.
        """
        if self.capabilities.pinned_host:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                _LOG.warning("pinned memory is refused (%s): pageable memory instead, whose copies halt compute", error)
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_host(self, buffer: torch.Tensor) -> None:
        """Do nothing: the memory goes with the last reference to it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Ask ``stream`` to copy; returns at once if the host end is pinned."""
        with stream:
            target.copy_(source, non_blocking=True)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in order with compute and return when it is done."""
        target.copy_(source, non_blocking=False)
