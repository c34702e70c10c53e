"""The memory of the device: figures of torch's allocator, in every tested torch.

``torch.accelerator`` has the allocator's figures since torch 2.9 and the free memory since 2.10. The module of the
device (``torch.cuda``, ``torch.xpu``) has had both for longer, under the same names but for ``mem_get_info``.
"""

from __future__ import annotations

from typing import Any

import torch


def device_memory() -> Any:
    """Return the module with ``memory_allocated``, ``memory_reserved`` and ``max_memory_allocated``."""
    accelerator: Any = torch.accelerator
    return accelerator if hasattr(accelerator, "memory_allocated") else _module(None)


def free_and_total_bytes(where: torch.device | None = None) -> tuple[int, int] | None:
    """Return a device's free memory and all of its memory; None where torch does not know them.

    Args:
        where: The device; None: the current one.
    """
    info: Any = getattr(torch.accelerator, "get_memory_info", None)
    if info is None:
        info = getattr(_module(where), "mem_get_info", None)
    return None if info is None else info(where)


def _module(where: torch.device | None) -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator() if where is None else where)
