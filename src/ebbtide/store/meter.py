"""Measure a step: times on the compute stream, and the peak memory between them.

On a device a timestamp is an event of its compute stream, which has the device's time and not the host's; on a machine
without one it is the host's clock.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ebbtide.store.device import Device
from ebbtide.store.device_memory import allocator_figures, allowed_bytes, index_of, take_peak_bytes
from ebbtide.store.host import HostTier
from ebbtide.store.protocol import Tier
from ebbtide.store.share import free_memory_bytes, ranks_of
from ebbtide.store.spill import SpillTier

Timestamp = Any
"""A meter's timestamp, opaque to others."""

Edges = tuple[Timestamp, Timestamp]
"""When a stretch of time began and ended."""

_STATUS, _CLEAR, _STATM = (Path("/proc/self") / name for name in ("status", "clear_refs", "statm"))
_FORGET_PEAK = "5"
"""Makes Linux reset a process's peak resident size (proc_pid_clear_refs(5))."""


class Meter(Protocol):
    """The meter of a step. Of arguments ``device``, None is the current device."""

    def timestamp(self, device: torch.device | None) -> Timestamp:
        """Return a timestamp after all work queued on the device so far."""
        ...

    def seconds(self, begin: Timestamp, end: Timestamp) -> float:
        """Return the time between two timestamps; waits for both."""
        ...

    def reached(self, timestamp: Timestamp) -> bool:
        """Whether a timestamp is reached, so that reading it does not wait."""
        ...

    def take_peak_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the peak memory since the last call, and reset it; None if unknown."""
        ...

    def in_use_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the memory that is allocated now; None where that is of no interest."""
        ...

    def system_seconds(self) -> float | None:
        """Return the kernel's time for this process so far, in seconds of one core; None if it is of no interest."""
        ...


_unread: weakref.WeakKeyDictionary[Any, dict[int | None, int]] = weakref.WeakKeyDictionary()
"""For each meter, the highest peaks that others have read since its own call: reading resets the process's peak."""


def _shared(meter: object, index: int | None, peak_bytes: int) -> int:
    """Return a meter's peak, given the process's since any meter read it."""
    for peaks in list(_unread.values()):
        peaks[index] = max(peaks.get(index, 0), peak_bytes)
    return _unread[meter].pop(index, peak_bytes)  # another thread may have read it


class DevicePeak:
    """The peak of what torch allocated on a device, for one reader of several."""

    def __init__(self) -> None:
        _unread[self] = {}

    def take_bytes(self, device: torch.device | int | None) -> int:
        """Return the peak since the last call, and reset torch's; None: of the current device."""
        return _shared(self, index_of(device), take_peak_bytes(device))


class Clock:
    """What meters without a device do alike: timestamps are seconds, which are known at once."""

    def seconds(self, begin: float, end: float) -> float:
        """Return the time between two timestamps."""
        return end - begin

    def reached(self, timestamp: float) -> bool:
        """Return True."""
        return True

    def in_use_bytes(self, device: torch.device | None = None) -> None:
        """Return None: a heap keeps what was freed."""
        return None


class HostMeter(Clock):
    """The host's clock, and the resident size of the process."""

    def __init__(self) -> None:
        _unread[self] = {}

    def timestamp(self, device: torch.device | None) -> float:
        """Return the clock's time: a CPU runs synchronously."""
        return time.perf_counter()

    def take_peak_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the largest resident size since the last call."""
        try:
            found = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            _CLEAR.write_text(_FORGET_PEAK)
        except (OSError, StopIteration):  # no Linux, or a container that forbids it
            return None
        return _shared(self, None, int(found.split()[1]) * 1024)

    def system_seconds(self) -> float:
        """Return the kernel's time for this process so far: for reads, writes and fresh pages."""
        return os.times().system


class _Recorded(NamedTuple):
    event: Any
    device: torch.device | None
    host_seconds: float


class DeviceMeter:
    """Events of the compute stream, and memory allocated by torch.

    If events have no time, a timestamp waits for the device and reads the host's clock: slower, and as accurate.
    Events of two devices have no common time: the host's clock is used from one to the other.

    Args:
        device: Provides streams and events.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._peak = device, DevicePeak()

    def timestamp(self, device: torch.device | None) -> Timestamp:
        """Return an event of the compute stream of that device."""
        device = torch.accelerator.current_accelerator() if device is None else device
        if device is None:
            raise RuntimeError("a timestamp needs a device")
        stream = self._device.compute_stream(device)
        event = self._device.record(stream, timed=True)
        if self._device.capabilities.timed_events:
            return _Recorded(event, getattr(stream, "device", None), time.perf_counter())
        self._device.synchronize(event)
        return time.perf_counter()

    def seconds(self, begin: Timestamp, end: Timestamp) -> float:
        """Return the device's time between two timestamps."""
        if not self._device.capabilities.timed_events:
            return end - begin
        for each in (begin, end):
            self._device.synchronize(each.event)
        if begin.device != end.device:
            return end.host_seconds - begin.host_seconds
        return self._device.elapsed_seconds(begin.event, end.event)

    def reached(self, timestamp: Timestamp) -> bool:
        """Whether the device has reached a timestamp."""
        return not self._device.capabilities.timed_events or self._device.query(timestamp.event)

    def take_peak_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the peak allocation since the last call, and reset torch's; None: of tensors of no accelerator."""
        return self._peak.take_bytes(device) if _has_figures(device) else None

    def in_use_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the bytes that torch has allocated; None: of tensors of no accelerator."""
        return allocator_figures(device).allocated_bytes if _has_figures(device) else None

    def system_seconds(self) -> None:
        """Return None: a device's allocator keeps what is freed."""
        return None


def _has_figures(device: torch.device | None) -> bool:
    """Whether torch's allocator has figures of a device: not of the host."""
    return torch.accelerator.is_available() and (device is None or device.type != "cpu")


def meter_for(tier: Tier) -> Meter:
    """Return the meter for steps whose offloaded bytes go to this tier."""
    device = _device_of(tier)
    return HostMeter() if device is None else DeviceMeter(device)


def home_of(tier: Tier) -> torch.device | None:
    """Return the device whose memory the tier saves, which need not be the current one; None if it knows none."""
    return getattr(_device_of(tier), "home", None)


def room_bytes(tier: Tier) -> int | None:
    """Return the memory that a step may still take; None if unknown.

    On a device: what torch's allocator may still take, and what it caches; without one: this rank's share of the host
    memory that is free.
    """
    if not _saves_device(tier):
        return free_memory_bytes() // ranks_of(os.environ)
    allocatable = allocatable_bytes(tier)
    return None if allocatable is None else allocatable - allocator_figures(home_of(tier)).allocated_bytes


def allocatable_bytes(tier: Tier) -> int | None:
    """Return all memory that torch may allocate on the device, including memory in use; None without a device."""
    if not _saves_device(tier) or (allowed := allowed_bytes(home_of(tier))) is None:
        return None
    return allowed + allocator_figures(home_of(tier)).reserved_bytes


def store_bytes(tier: Tier) -> int | None:
    """Return the bytes that host memory holds before the rest goes to disk, which is slower; None: only one is used."""
    return tier.unspilled_bytes if isinstance(tier, SpillTier) else None


def resident_bytes() -> int | None:
    """Return the resident size of the process; None if the system does not report it."""
    try:
        return int(_STATM.read_bytes().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return None


def reserved_bytes(tier: Tier) -> int | None:
    """Return the memory that torch has reserved on the device, fragments included; None without a device."""
    return allocator_figures(home_of(tier)).reserved_bytes if _saves_device(tier) else None


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what was queued; a CPU runs synchronously."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def keeps_time(tier: Tier) -> bool:
    """Whether the counters of ``tier`` include times of copies."""
    device = _device_of(tier)
    return device is None or device.capabilities.timed_events


def _saves_device(tier: Tier) -> bool:
    """Whether a tier saves memory of an accelerator."""
    return _device_of(tier) is not None and torch.accelerator.is_available()


def _device_of(tier: Tier) -> Device | None:
    host = tier.host if isinstance(tier, SpillTier) else tier
    return host.device if isinstance(host, HostTier) else None
