"""What this machine computes, reads and moves in a second, measured in a few seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ebbtide.planner.machines import Machine
from ebbtide.store import open_tier
from ebbtide.store.protocol import Tier
from ebbtide.store.share import memory_limit_bytes

ROUNDS = 3
_MIB = 1024**2


def machine_here(target: str = "auto", disk_path: str | None = None) -> Machine:
    """Measure this machine: one of its devices alone, and the way to where offloaded bytes wait.

    Args:
        target: ``"host"``, ``"disk"``, or ``"auto"``.
        disk_path: Directory for the disk tier.

    Raises:
        TargetError: No such target on this machine; DiskError: the path cannot serve.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    accelerated = device.type != "cpu"
    tier = open_tier(target, disk_path=disk_path)
    try:
        out, into = _link(tier, device, (256 if accelerated else 32) * _MIB)
    finally:
        tier.close()
    side = 8192 if accelerated else 1024
    return Machine(
        name=_name(device),
        devices=torch.accelerator.device_count() if accelerated else 1,
        memory_bytes=_device_bytes(device),
        flop_per_second=_products(device, torch.bfloat16, side),
        flop32_per_second=_products(device, torch.float32, side // 2),
        attention_flop_per_second=_attention(device, 8192 if accelerated else 512),
        memory_bytes_per_second=_copies(device, (1024 if accelerated else 64) * _MIB),
        out_bytes_per_second=out,
        in_bytes_per_second=into,
        host_memory_bytes=memory_limit_bytes(),
        host_bytes_per_second=_copies(torch.device("cpu"), 64 * _MIB),
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the median time of some work, after one round that warms up."""
    found: list[float] = []
    for _ in range(ROUNDS + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - began)
    return max(statistics.median(found[1:]), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _products(device: torch.device, dtype: torch.dtype, side: int) -> float:
    one = torch.randn(side, side, device=device).to(dtype)
    return 2.0 * side**3 / _seconds(device, lambda: one @ one)


def _attention(device: torch.device, tokens: int) -> float:
    heads, width = 8, 64
    one = torch.randn(1, heads, tokens, width, device=device).to(torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _seconds(device, lambda: attend(one, one, one, is_causal=True))
    return 2.0 * heads * tokens * tokens * width / seconds  # two products, half of the pairs


def _copies(device: torch.device, nbytes: int) -> float:
    """Return the rate of the memory: a copy reads and writes."""
    one, other = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    one.zero_()
    return 2.0 * nbytes / _seconds(device, lambda: other.copy_(one))


def _link(tier: Tier, device: torch.device, nbytes: int) -> tuple[float, float]:
    """Return the rates out and in of a tier, as its own counters tell them."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for _ in range(ROUNDS):
        slot = tier.park(source)
        slot.wait_parked()
        slot.take()
        slot.free()
    _wait(device)
    counters = tier.counters
    return counters.out_bytes / max(counters.out_seconds, 1e-9), counters.in_bytes / max(counters.in_seconds, 1e-9)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type


def _device_bytes(device: torch.device) -> int:
    """Return the memory that is scarce: the device's, or without one the host's."""
    if device.type == "cpu":
        return memory_limit_bytes()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
