"""A real device with streams: any that ``torch.accelerator`` supports (CUDA and ROCm, XPU, NPU).

Capabilities are tested once: streams, events, pinned memory, and registering existing memory, which wastes none. If
that is unavailable, torch's allocator of pinned memory is used; it rounds up to powers of two, so powers of two are
requested. Constructed only if there is an accelerator.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ebbtide.base.errors import TargetError
from ebbtide.store.device import Capabilities, FreeMemory
from ebbtide.store.device_memory import allocator_figures, allowed_bytes, index_of
from ebbtide.store.pinned import RuntimeRegistrar, pinned_memory

_LOG = logging.getLogger("ebbtide.store")
_UNRELIABLE = frozenset({"npu"})
"""Types of devices whose asynchronous copies pass the test but are unreliable."""


class AcceleratorDevice:
    """The ``Device`` protocol over ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.

    Args:
        home: The device of the model; None: the current one.

    Attributes:
        home: The first device that copies; until then, that of the model. Calls without a tensor go to this one: on
            another they would take memory, or find none.

    Raises:
        TargetError: The machine has no accelerator.
    """

    def __init__(self, home: torch.device | None = None) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise TargetError(
                "target='host' needs an accelerator, and none was found",
                expected="target='auto' or 'disk'",
                hint="without a GPU, RAM is the memory to save, so activations are offloaded to disk",
            )
        self.device_type = found.type
        self.home = torch.device(self.device_type, torch.accelerator.current_device_index()) if home is None else home
        self._used: set[torch.device] = set()
        with self._at_home():
            self._registrar = self._find_registrar(self.home)
            pinned = self._registrar is not None or self._can_pin()
            asynchronous = pinned and self.device_type not in _UNRELIABLE and self._can_order(self.home)
            timed = self._can_time(self.home)
        self.capabilities = Capabilities(asynchronous_copies=asynchronous, pinned_host=pinned, timed_events=timed)
        if not asynchronous:
            _LOG.warning("copies to host memory are synchronous on %s: each one stalls compute", self.device_type)

    def _at_home(self) -> AbstractContextManager[Any]:
        # Not ``set_device_index``: going back, it would begin the device that was current, which takes memory.
        scope: Any = getattr(torch.get_device_module(self.device_type), "device", None)
        return contextlib.nullcontext() if scope is None else scope(self.home)

    def _find_registrar(self, device: torch.device) -> RuntimeRegistrar | None:
        """Return the registrar of mapped memory, if torch exposes the calls and a test succeeds."""
        find: Any = getattr(torch.get_device_module(device), "cudart", None)
        try:
            runtime = find() if find is not None else None
            if not hasattr(runtime, "cudaHostRegister") or not hasattr(runtime, "cudaHostUnregister"):
                return None
            registrar = RuntimeRegistrar(runtime, self._synchronize, self._forget_error, self._at_home)
            trial = pinned_memory(mmap.PAGESIZE, registrar)
            return registrar if trial.is_pinned() else None
        except (RuntimeError, AssertionError) as error:  # torch raises the latter without a runtime
            _LOG.debug("mapped memory cannot be pinned: %s", error)
            return None

    def _synchronize(self) -> None:
        for device in tuple(self._used):
            with contextlib.suppress(RuntimeError):  # a failed device copies nothing
                torch.accelerator.synchronize(device)

    def _forget_error(self) -> None:
        # The runtime keeps the error of a failed call until a kernel launch is checked: launch one.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.home).add_(1)  # zeroing memory may not launch a kernel

    @staticmethod
    def _can_pin() -> bool:
        try:
            return torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True).is_pinned()
        except RuntimeError:
            return False

    def _can_order(self, device: torch.device) -> bool:
        try:
            stream = self._side_stream(device, "in")
            stream.wait_event(torch.accelerator.current_stream(device).record_event())
            stream.record_event().synchronize()
        except (RuntimeError, NotImplementedError, TypeError):
            return False
        return True

    @staticmethod
    def _can_time(device: torch.device) -> bool:
        try:
            stream = torch.accelerator.current_stream(device)
            begin, end = (torch.Event(device=stream.device, enable_timing=True) for _ in range(2))
            begin.record(stream)
            end.record(stream)
            end.synchronize()
            begin.elapsed_time(end)
        except (RuntimeError, NotImplementedError, TypeError) as error:  # torch's guard for this device lacks the call
            _LOG.debug("events keep no time: %s", error)
            return False
        return True

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on such a device."""
        return tensor.device.type == self.device_type

    def compute_stream(self, device: torch.device) -> torch.Stream:
        """Return the calling thread's current stream on that device."""
        # From a device torch finds out the index on every call: 2 us more.
        return torch.accelerator.current_stream(index_of(device))

    def default_stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream of that device on which everything runs unless another is entered."""
        find: Any = getattr(torch.get_device_module(device), "default_stream", None)
        if find is None:
            return None
        found = find(device)  # of that module's own class, which equals no ``torch.Stream``
        return torch.Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)

    def side_stream(self, device: torch.device, purpose: str) -> torch.Stream:
        """Make a stream on that device; copy-ins get the higher priority, because compute waits for them."""
        if not self._used:
            self.home = device
        self._used.add(device)
        return self._side_stream(device, purpose)

    @staticmethod
    def _side_stream(device: torch.device, purpose: str) -> torch.Stream:
        try:
            return torch.Stream(device=device, priority=-1 if purpose == "in" else 0)
        except (RuntimeError, TypeError):  # a device without stream priorities
            return torch.Stream(device=device)

    def record(self, stream: torch.Stream, *, timed: bool = False) -> torch.Event:
        """Return an event after all work queued on ``stream``."""
        event = torch.Event(device=stream.device, enable_timing=timed and self.capabilities.timed_events)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Order ``stream`` after ``event``."""
        stream.wait_event(event)

    def query(self, event: torch.Event) -> bool:
        """Whether the event has completed."""
        return event.query()

    def synchronize(self, event: torch.Event) -> None:
        """Make the host wait."""
        event.synchronize()

    def elapsed_seconds(self, begin: torch.Event, end: torch.Event) -> float:
        """Return the device's time between two completed events."""
        return begin.elapsed_time(end) / 1000.0

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of the current stream of that device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def free_memory(self, device: torch.device) -> FreeMemory | None:
        """Return the free part of the memory that torch's allocator may use."""
        try:
            found, allowed = allocator_figures(device), allowed_bytes(device)
        except (RuntimeError, NotImplementedError, AttributeError, KeyError) as error:
            _LOG.debug("free device memory is not known: %s", error)
            return None
        if allowed is None:
            return None
        cached = found.reserved_bytes - max(found.active_bytes, found.allocated_bytes)
        return FreeMemory(free_bytes=cached + allowed, flushes=found.flushes)

    def record_use(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Tell torch's allocator that ``stream`` uses the tensor's memory."""
        tensor.record_stream(stream)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return host memory: all of it, or, pinned by torch's allocator, the largest power of two in it.

        Raises:
            RuntimeError: There is none, or it cannot be pinned.
        """
        if not pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._registrar is not None:
            return pinned_memory(nbytes, self._registrar)
        return torch.empty(1 << (nbytes.bit_length() - 1), dtype=torch.uint8, device="cpu", pin_memory=True)

    def free_host(self, buffer: torch.Tensor) -> None:
        """Do nothing: the memory is freed with its last reference."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: torch.Stream) -> None:
        """Queue several copies on ``stream``, entered once; a copy of memory that is not pinned is waited for."""
        with stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in order with compute, and return when done."""
        target.copy_(source, non_blocking=False)
