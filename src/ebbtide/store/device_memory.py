"""The memory of the device: figures of torch's allocator, in every tested torch.

``torch.accelerator`` has the allocator's figures since torch 2.9 and the free memory since 2.10. The module of the
device (``torch.cuda``, ``torch.xpu``) has had both for longer, under the same names but for ``mem_get_info``. Of
arguments ``device``, None is the current device.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch

_FIGURES = (
    ("allocated_bytes", "all", "current"), ("allocated_bytes", "all", "peak"), ("active_bytes", "all", "current"),
    ("reserved_bytes", "all", "current"), ("num_alloc_retries",),
)  # fmt: skip
"""Where the allocator's statistics have the fields of ``AllocatorFigures``."""

_highest: dict[int, int] = {}
"""By device, the most bytes before torch's peak was reset here."""


def device_memory() -> Any:
    """Return the module with ``memory_stats`` and ``reset_peak_memory_stats``."""
    accelerator: Any = torch.accelerator
    return accelerator if hasattr(accelerator, "memory_allocated") else _module(None)


class AllocatorFigures(NamedTuple):
    """Figures of torch's allocator for one device.

    Attributes:
        allocated_bytes: Of tensors.
        peak_bytes: The most of these since the last reset.
        active_bytes: Of these and of what streams still use; cudaMallocAsync counts none.
        reserved_bytes: Taken from the device.
        flushes: How often the allocator freed its cache for want of memory.
    """

    allocated_bytes: int
    peak_bytes: int
    active_bytes: int
    reserved_bytes: int
    flushes: int


def allocator_figures(device: torch.device | int | None = None) -> AllocatorFigures:
    """Return the allocator's figures of a device.

    ``torch.accelerator.memory_stats``, which every public getter calls, sorts a hundred figures in Python: 0.4 ms. So
    they are read from where it has them.
    """
    read: Any = getattr(torch._C, "_accelerator_getDeviceStats", None)
    if read is None or device_memory() is not torch.accelerator:
        flat = device_memory().memory_stats(device)
        return AllocatorFigures(*(flat.get(".".join(name), 0) for name in _FIGURES))
    if not torch._C._accelerator_isAllocatorInitialized():
        return AllocatorFigures(0, 0, 0, 0, 0)
    nested = read(index_of(device))
    return AllocatorFigures(*(functools.reduce(operator.getitem, name, nested) for name in _FIGURES))


def peak_bytes(device: torch.device | int | None = None) -> int:
    """Return the most bytes that torch had allocated on a device, also before ``take_peak_bytes``."""
    return max(allocator_figures(device).peak_bytes, _highest.get(index_of(device), 0))


def take_peak_bytes(device: torch.device | int | None = None) -> int:
    """Return the most bytes allocated since the last call, and reset torch's peak."""
    index, peak = index_of(device), allocator_figures(device).peak_bytes
    _highest[index] = max(peak, _highest.get(index, 0))
    device_memory().reset_peak_memory_stats(device)
    return peak


def allowed_bytes(device: torch.device | None = None) -> int | None:
    """Return the memory that torch's allocator may still take from a device; None where torch does not know it.

    That is the free memory, or what is left of the process's share (``torch.cuda.set_per_process_memory_fraction``).
    """
    known, share = free_and_total_bytes(device), getattr(_module(device), "get_per_process_memory_fraction", None)
    if known is None or share is None:
        return None if known is None else known[0]
    free, total = known
    return max(0, min(free, int(share(device) * total) - allocator_figures(device).reserved_bytes))


def free_and_total_bytes(device: torch.device | None = None) -> tuple[int, int] | None:
    """Return a device's free memory and all of its memory; None where torch does not know them."""
    info: Any = getattr(torch.accelerator, "get_memory_info", None)
    if info is None:
        info = getattr(_module(device), "mem_get_info", None)
    return None if info is None else info(device)


def index_of(device: torch.device | int | None) -> int:
    """Return the index of a device; None, and a device without one: the current one."""
    index = device.index if isinstance(device, torch.device) else device
    return torch.accelerator.current_device_index() if index is None else index


def _module(device: torch.device | None) -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator() if device is None else device)
