"""The memory of the device: figures of torch's allocator, in every tested torch.

``torch.accelerator`` has the allocator's figures since torch 2.9 and the free memory since 2.10. The module of the
device (``torch.cuda``, ``torch.xpu``) has had both for longer, under the same names but for ``mem_get_info``.
"""

from __future__ import annotations

from typing import Any

import torch

_highest: dict[int, int] = {}
"""By device, the most bytes before torch's peak was reset here."""


def device_memory() -> Any:
    """Return the module with ``memory_allocated``, ``memory_reserved`` and ``max_memory_allocated``."""
    accelerator: Any = torch.accelerator
    return accelerator if hasattr(accelerator, "memory_allocated") else _module(None)


def peak_bytes(where: torch.device | int | None = None) -> int:
    """Return the most bytes that torch had allocated on a device, also before ``take_peak_bytes``."""
    return max(int(device_memory().max_memory_allocated(where)), _highest.get(index_of(where), 0))


def take_peak_bytes(where: torch.device | int | None = None) -> int:
    """Return the most bytes allocated since the last call, and reset torch's peak."""
    memory, index = device_memory(), index_of(where)
    peak = int(memory.max_memory_allocated(where))
    _highest[index] = max(peak, _highest.get(index, 0))
    memory.reset_peak_memory_stats(where)
    return peak


def allowed_bytes(where: torch.device | None = None) -> int | None:
    """Return the memory that torch's allocator may still take from a device; None where torch does not know it.

    That is the free memory, or what is left of the process's share (``torch.cuda.set_per_process_memory_fraction``).

    Args:
        where: The device; None: the current one.
    """
    known, share = free_and_total_bytes(where), getattr(_module(where), "get_per_process_memory_fraction", None)
    if known is None or share is None:
        return None if known is None else known[0]
    free, total = known
    return max(0, min(free, int(share(where) * total) - int(device_memory().memory_reserved(where))))


def free_and_total_bytes(where: torch.device | None = None) -> tuple[int, int] | None:
    """Return a device's free memory and all of its memory; None where torch does not know them.

    Args:
        where: The device; None: the current one.
    """
    info: Any = getattr(torch.accelerator, "get_memory_info", None)
    if info is None:
        info = getattr(_module(where), "mem_get_info", None)
    return None if info is None else info(where)


def index_of(where: torch.device | int | None) -> int:
    """Return the index of a device; None, and a device without one: the current one."""
    index = where.index if isinstance(where, torch.device) else where
    return torch.accelerator.current_device_index() if index is None else index


def _module(where: torch.device | None) -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator() if where is None else where)
