"""Rates of this machine (compute, memory, links), measured in a few seconds.

[Note: long enough to be timed]
A machine may multiply matrices at 5 or at 500 000 GFLOP/s. So work starts small and grows until one round takes long
enough to be timed and a larger one has no better rate: on a busy machine even the smallest work takes 20 ms, because
its threads wait for each other. A limit on time or memory ends it earlier. The result is the median of several rounds.
A dtype that the device does not support is replaced by the next one.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ebbtide.base.errors import TargetError
from ebbtide.planner.machines import Machine
from ebbtide.store import open_tier
from ebbtide.store.device_memory import free_and_total_bytes
from ebbtide.store.meter import synchronize
from ebbtide.store.share import fair_share_bytes, memory_limit_bytes
from ebbtide.store.speed import Speed, incompressible, measure_speed

_MIB = 1024**2
_TIMED_SECONDS = 0.02
_ROUNDS_SECONDS = 0.2
_GROWING_SECONDS = 0.5
_BETTER = 1.25
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_LEAST_BYTES = 64 * _MIB

Work = Callable[[], object]


def measured_machine() -> Machine:
    """Measure this machine: one of its devices, and the link to the store.

    Raises:
        TargetError: The device computes nothing or has no memory left; DiskError: no disk is usable, or it is full.
        CapError: Host memory is full.
    """
    return machine_with(measured_speed("auto", None))


def measured_speed(target: str, disk_path: str | None) -> Speed:
    """Measure the link to the store: out, in, and both at once.

    Args:
        target: ``"host"``, ``"disk"``, or ``"auto"``.
        disk_path: Directory for the disk tier.

    Raises:
        TargetError: No such target on this machine; DiskError: the path is unusable or full.
        CapError: Host memory is full.
    """
    tier = open_tier(target, disk_path=disk_path)
    try:
        device = torch.device("cpu") if tier.name == "disk" else device_here()
        most = min(_spare_bytes(device), _spare_bytes(torch.device("cpu")))
        return measure_speed(tier, device, most_bytes=max(most, _LEAST_BYTES))
    finally:
        tier.close()


def machine_with(speed: Speed) -> Machine:
    """Measure everything except the link to the store.

    Raises:
        TargetError: The device computes nothing, or has no memory left.
    """
    device = device_here()
    accelerated = device.type != "cpu"
    return Machine(
        name=device_name(device),
        devices=torch.accelerator.device_count() if accelerated else 1,
        memory_bytes=device_bytes(device),
        flop_per_second=_products(device, _half_dtypes(device)),
        flop32_per_second=_products(device, (torch.float32,)),
        attention_flop_per_second=_attention(device),
        memory_bytes_per_second=_copies(device),
        out_bytes_per_second=speed.out_bytes_per_second,
        in_bytes_per_second=speed.in_bytes_per_second,
        host_memory_bytes=memory_limit_bytes(),
        host_bytes_per_second=_copies(torch.device("cpu")),
        stores_on_disk=not accelerated,
    )


def device_here() -> torch.device:
    """Return the device whose memory is to be saved: the accelerator, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def device_bytes(device: torch.device) -> int:
    """Return the size of the memory to be saved: the device's, or the host's if there is no other."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return memory_limit_bytes()


def free_bytes(device: torch.device) -> int:
    """Return a device's free memory; half of its memory if the device does not report it."""
    if device.type == "cpu":
        return fair_share_bytes(ranks=1)
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        if (known := free_and_total_bytes(device)) is not None:
            return known[0]
    return device_bytes(device) // 2


def _spare_bytes(device: torch.device) -> int:
    return max(free_bytes(device) // 4, _LEAST_BYTES)


def _half_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes for matrix products, half precision first; the last is float32, which always works."""
    first = torch.bfloat16
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        first = torch.float16
    return first, torch.float16, torch.float32


def _products(device: torch.device, dtypes: Sequence[torch.dtype]) -> float:
    def prepare(side: int, dtype: torch.dtype) -> Work:
        one = _numbers(side * side, device, dtype).view(side, side)
        return lambda: one @ one

    sides = _sizes(256, 2048) if device.type == "cpu" else _sizes(1024, 8192)
    most = math.isqrt(_spare_bytes(device) // (3 * 4))
    return _rate(device, dtypes, _fitting(sides, most), lambda side: 2.0 * side**3, prepare)


def _attention(device: torch.device) -> float:
    attend = torch.nn.functional.scaled_dot_product_attention
    heads, width = (8, 64) if device.type == "cpu" else (32, 128)  # of large models: small ones fill no accelerator

    def prepare(tokens: int, dtype: torch.dtype) -> Work:
        one = _numbers(heads * tokens * width, device, dtype).view(1, heads, tokens, width)
        return lambda: attend(one, one, one, is_causal=True)

    sizes = _sizes(256, 2048) if device.type == "cpu" else _sizes(1024, 8192)
    most = math.isqrt(_spare_bytes(device) // (heads * 3 * 4))  # as much as unfused attention takes
    work = 2.0 * heads * width  # two products, half of the pairs
    return _rate(device, _half_dtypes(device), _fitting(sizes, most), lambda n: work * n * n, prepare)


def _copies(device: torch.device) -> float:
    """Return the memory's rate: a copy reads and writes."""

    def prepare(nbytes: int, dtype: torch.dtype) -> Work:
        one, other = (torch.zeros(nbytes, dtype=dtype, device=device) for _ in range(2))
        return lambda: other.copy_(one)

    most = min(_spare_bytes(device) // 2, (1024 if device.type != "cpu" else 128) * _MIB)
    sizes = [most // 8, most // 4, most // 2, most]
    return _rate(device, (torch.uint8,), sizes, lambda nbytes: 2.0 * nbytes, prepare)


def _sizes(first: int, last: int) -> list[int]:
    """Return 2, 3, 4, 6, 8, 12, ... times half of ``first``: cubed, each is at most 3.4 times the one before."""
    found: list[int] = []
    while first <= last:
        found += [first, first * 3 // 2]
        first *= 2
    return [size for size in found if size <= last]


def _fitting(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes that memory allows; the first always."""
    return [size for size in sizes if size <= most] or [sizes[0]]


def _numbers(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers: on zeros a device may take less power and be faster."""
    return incompressible(count, device).to(torch.float32).sub_(128).div_(128).to(dtype)


def _rate(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[int],
    amount: Callable[[int], float],
    prepare: Callable[[int, torch.dtype], Work],
) -> float:
    """Return the work done per second, with the first dtype that the device supports.

    See [Note: long enough to be timed]: ``prepare`` builds the work of a size, and ``amount`` says how much that is.
    """
    refused: Exception | None = None
    for dtype in dtypes:
        found, spent = 0.0, 0.0
        for size in sizes:
            try:
                work = prepare(size, dtype)
                rounds = [_seconds(device, work) for _ in range(1 + _LEAST_ROUNDS)]
                rounds = rounds[1:]  # the first warms up, which may take longer than all others
                spent += sum(rounds)
                before, found = found, amount(size) / statistics.median(rounds)
                timed = min(rounds) >= _TIMED_SECONDS and found < _BETTER * before
                if timed or spent > _GROWING_SECONDS or size == sizes[-1]:
                    found = amount(size) / _median(device, work, rounds)
                    break
            except (RuntimeError, TypeError, NotImplementedError) as error:  # includes out of memory
                refused = error
                break
        if found:
            return found
    raise TargetError(
        f"{device} cannot be measured ({str(refused)[:200]})",
        expected="a device that multiplies matrices and has some memory left",
        hint="stop other programs on it, and check that a small torch program runs there",
    ) from refused


def _median(device: torch.device, work: Work, rounds: Sequence[float]) -> float:
    """Return the median time of some rounds of work, including those already timed."""
    found = list(rounds)
    while len(found) < _MOST_ROUNDS and sum(found) < _ROUNDS_SECONDS:
        found.append(_seconds(device, work))
    return statistics.median(found)


def _seconds(device: torch.device, work: Work) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return max(time.perf_counter() - began, 1e-9)


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device, else its type."""
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type
