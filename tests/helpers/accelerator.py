"""What tests of a real device need beyond ``torch.accelerator``: late streams, less memory. By capability."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.models import Tiny


def has(name: str) -> bool:
    """Whether the accelerator's module, such as ``torch.cuda``, has this function."""
    return torch.accelerator.is_available() and hasattr(torch.get_device_module(), name)


needs_sleep = pytest.mark.skipif(not has("_sleep"), reason="needs a device whose streams can be delayed")
needs_limit = pytest.mark.skipif(
    not has("set_per_process_memory_fraction"), reason="needs a device whose memory can be limited"
)


def delay() -> None:
    """Delay the current stream by some ms: the host and the copy streams run ahead of it."""
    device: Any = torch.get_device_module()
    device._sleep(20_000_000)


def on_device(tiny: Tiny) -> Tiny:
    """Move a model and its inputs to the accelerator."""
    device = torch.accelerator.current_accelerator()
    tiny.model.to(device)
    for name, value in tiny.inputs.items():
        if isinstance(value, torch.Tensor):
            tiny.inputs[name] = value.detach().to(device).requires_grad_(value.requires_grad)
    return tiny


@contextmanager
def memory_limited_to(nbytes: int) -> Iterator[None]:
    """Limit the allocator's reserved memory to this total."""
    device: Any = torch.get_device_module()
    device.set_per_process_memory_fraction(min(1.0, nbytes / device.mem_get_info()[1]))
    try:
        yield
    finally:
        device.set_per_process_memory_fraction(1.0)
