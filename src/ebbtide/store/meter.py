"""Measuring a step: times on the compute stream, and the peak memory between two of them.

On a device a moment is an event of its compute stream, so that what is measured is the device's time and not when the
host asked; on a machine without one it is the host's clock.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch

from ebbtide.store.device import Device
from ebbtide.store.host import HostTier
from ebbtide.store.protocol import Tier
from ebbtide.store.share import free_memory_bytes
from ebbtide.store.spill import SpillTier

Timestamp = Any
"""A moment of some meter; only that meter looks inside."""

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
"""What makes Linux forget the largest resident size it has seen (proc_pid_clear_refs(5))."""


class Meter(Protocol):
    """The meter of a step."""

    def timestamp(self, where: torch.device | None) -> Timestamp:
        """Return the moment at which all that was asked of the device so far is done; None: of the current device."""
        ...

    def seconds(self, begin: Timestamp, end: Timestamp) -> float:
        """Return the time between two moments; waits until both have come."""
        ...

    def reached(self, timestamp: Timestamp) -> bool:
        """Whether a moment has come: reading it waits for nothing."""
        ...

    def take_peak_bytes(self, where: torch.device | None = None) -> int | None:
        """Return the most memory in use since the last call, and start again; None if unknown.

        Args:
            where: The device; None: the current one.
        """
        ...


class HostMeter:
    """The host's clock, and the resident size of the process."""

    def timestamp(self, where: torch.device | None) -> float:
        """Return the clock's time: what was asked of a CPU is done."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Return the time between two moments."""
        return end - begin

    def reached(self, timestamp: float) -> bool:
        """Return True: what was asked of a CPU is done."""
        return True

    def take_peak_bytes(self, where: torch.device | None = None) -> int | None:
        """Return the largest resident size since the last call."""
        try:
            found = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            _CLEAR.write_text(_FORGET_PEAK)
        except (OSError, StopIteration):  # no Linux, or a container that forbids it
            return None
        return int(found.split()[1]) * 1024


class DeviceMeter:
    """Events of the compute stream, and what torch's allocator has handed out.

    Where events keep no time, a moment waits for the device and is the host's clock: slower, and as accurate.

    Args:
        device: Knows streams and events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def timestamp(self, where: torch.device | None) -> Timestamp:
        """Return an event of the compute stream of that device."""
        device = torch.accelerator.current_accelerator() if where is None else where
        if device is None:
            raise RuntimeError("a moment of no device")
        event = self._device.record(self._device.compute_stream(device), timed=True)
        if self._device.capabilities.timed_events:
            return event
        self._device.synchronize(event)
        return time.perf_counter()

    def seconds(self, begin: Timestamp, end: Timestamp) -> float:
        """Return the device's own time between two moments."""
        if not self._device.capabilities.timed_events:
            return end - begin
        self._device.synchronize(end)
        return self._device.elapsed_seconds(begin, end)

    def reached(self, timestamp: Timestamp) -> bool:
        """Whether the device has come to a moment."""
        return not self._device.capabilities.timed_events or self._device.query(timestamp)

    def take_peak_bytes(self, where: torch.device | None = None) -> int | None:
        """Return the most that was allocated since the last call; resets the peak that torch reports."""
        if not torch.accelerator.is_available():
            return None
        peak = torch.accelerator.max_memory_allocated(where)
        torch.accelerator.reset_peak_memory_stats(where)
        return int(peak)


def meter_for(tier: Tier) -> Meter:
    """Return what measures steps whose offloaded bytes go to ``tier``."""
    device = _device_of(tier)
    return HostMeter() if device is None else DeviceMeter(device)


def room_bytes(tier: Tier) -> int | None:
    """Return the memory that a step may still take; None if unknown.

    On a device that is what it has free and what torch's allocator holds and has not handed out; without one it is
    the host memory that is free for this process.

    Args:
        tier: Where offloaded bytes of the step go.
    """
    if _device_of(tier) is None or not torch.accelerator.is_available():
        return free_memory_bytes()
    info: Any = getattr(torch.accelerator, "get_memory_info", None)  # since torch 2.10
    if info is None:
        return None
    cached = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    return int(info()[0] + cached)


def device_bytes(tier: Tier) -> int | None:
    """Return all memory that torch may hand out on the device, what is in use included; None without a device.

    Args:
        tier: Where offloaded bytes of the step go.
    """
    room = room_bytes(tier)
    if _device_of(tier) is None or not torch.accelerator.is_available() or room is None:
        return None
    return room + int(torch.accelerator.memory_allocated())


def reserved_bytes(tier: Tier) -> int | None:
    """Return what torch's allocator holds of the device, fragments included; None without a device.

    Args:
        tier: Where offloaded bytes of the step go.
    """
    if _device_of(tier) is None or not torch.accelerator.is_available():
        return None
    return int(torch.accelerator.memory_reserved())


def keeps_time(tier: Tier) -> bool:
    """Whether the counters of ``tier`` know how long copies took."""
    device = _device_of(tier)
    return device is None or device.capabilities.timed_events


def _device_of(tier: Tier) -> Device | None:
    host = tier.host if isinstance(tier, SpillTier) else tier
    return host.device if isinstance(host, HostTier) else None
