"""What decides, beside its operands, what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Switches = tuple[Any, ...]

_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")


def switches_now() -> Switches:
    """Return the switches as they are now."""
    cudnn: Any = torch._C
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),
        *(getattr(cudnn, f"_get_cudnn_{name}")() for name in _CUDNN),
    )


def exactly(device_type: str, switches: Switches | None, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run operators as they ran in forward: no graph, no autocast (its casts are steps of the recipe), its switches.

    The switches are set one by one: what torch's context managers switched, an interrupt could leave switched.
    """
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    now = switches_now() if switches is not None else None
    try:
        torch._C._set_grad_enabled(False)
        if autocast:
            torch.set_autocast_enabled(device_type, False)
        if now is not None and switches is not None and now != switches:
            _switch(now, switches)
        return work()
    finally:
        try:
            torch._C._set_grad_enabled(grad)
        finally:
            if autocast:
                torch.set_autocast_enabled(device_type, True)
            if now is not None and switches is not None and now != switches:
                _switch(switches, now)


def _switch(before: Switches, after: Switches) -> None:
    cudnn: Any = torch._C
    setters: tuple[Callable[[Any], None], ...] = (
        torch.use_deterministic_algorithms,
        torch.set_float32_matmul_precision,
        torch.set_num_threads,
        torch._C._set_mkldnn_enabled,
        *(getattr(cudnn, f"_set_cudnn_{name}") for name in _CUDNN),
    )
    for old, new, setter in zip(before, after, setters, strict=True):
        if old != new:
            setter(new)
