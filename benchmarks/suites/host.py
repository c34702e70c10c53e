"""How much of the raw link the host tier reaches, and how much host memory it wastes. Needs an accelerator.

Raw is one copy after the other between a device tensor and pinned memory of torch's own, on one side stream, timed by
events around them all. The tier moves tensors of that size: all copied out, then all prefetched and taken, timed
likewise on the compute stream, which waits for the last copy. Both alternate, and swap which goes first, so that other
load on the machine affects both. The first pair warms up (memory is pinned once) and is not counted. Waste is the
memory that the tier holds beyond the offloaded bytes; for comparison, what torch's allocator of pinned memory would
hold for the same tensors, each rounded up to a power of two.

    python -m benchmarks.suites.host [--pairs 15] [--total-mib 1024] [--out DIR]
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch

from benchmarks.cases import device_name
from benchmarks.results_folder import (
    RESULTS,
    compared_rates,
    hardware,
    interleaved,
    parser_of,
    result_folder,
    summaries,
    write_result,
)
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.host import HostTier

MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64)
GOAL = 0.95
UNEVEN = (65_536 + 1, 3 * MIB + 7, 17 * MIB + 1, 100_001, 5 * MIB + 64)
"""Sizes of the tensors whose waste is counted: none is a power of two."""


def timed(stream: torch.Stream, work: Callable[[], None]) -> float:
    """Return the seconds that ``stream`` was busy with ``work``."""
    torch.accelerator.synchronize()
    begin, end = (torch.Event(device=stream.device, enable_timing=True) for _ in range(2))
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0


def raw_rates(stream: torch.Stream, sources: list[torch.Tensor], pinned: list[torch.Tensor]) -> tuple[float, float]:
    """Return bytes per second of raw copy-outs and copy-ins."""
    total = sum(x.numel() for x in sources)

    def copy(targets: list[torch.Tensor], origins: list[torch.Tensor]) -> None:
        with stream:
            for target, origin in zip(targets, origins, strict=True):
                target.copy_(origin, non_blocking=True)

    out = timed(stream, lambda: copy(pinned, sources))
    return total / out, total / timed(stream, lambda: copy(sources, pinned))


def tier_rates(tier: HostTier, sources: list[torch.Tensor]) -> tuple[float, float]:
    """Return bytes per second of copying all sources out, and back in."""
    total, compute = sum(x.numel() for x in sources), torch.accelerator.current_stream()
    slots = []

    def out() -> None:
        for source in sources:
            slots.extend(tier.copy_out_all([source]))
        for slot in slots:
            tier.wait_copied_out([slot])

    def into() -> None:
        for slot in slots:
            tier.prefetch([slot])
        for slot in slots:
            slot.take()
            slot.free()

    rates = total / timed(compute, out), total / timed(compute, into)
    tier.trim()
    return rates


def measure(size_bytes: int, total_bytes: int, pairs: int) -> dict[str, list[float]]:
    """Return the rates of ``pairs`` alternating runs after one that warms up."""
    where = torch.accelerator.current_accelerator()
    if where is None:
        raise SystemExit("torch finds no accelerator on this machine: there is nothing to measure")
    sources = [torch.ones(size_bytes, dtype=torch.uint8, device=where) for _ in range(total_bytes // size_bytes)]
    pinned = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in sources]
    stream, tier = torch.Stream(device=where), HostTier(AcceleratorDevice())
    try:
        found = interleaved(pairs, lambda: raw_rates(stream, sources, pinned), lambda: tier_rates(tier, sources))
        held = tier.gauges()
        if held["host_pinned_bytes"] < held["host_held_bytes"]:
            raise SystemExit("the system refused to pin memory: pageable copies are no measure of the link")
        return found
    finally:
        tier.close()


def count_waste(total_bytes: int) -> dict[str, float]:
    """Return bytes held ÷ bytes offloaded, of the tier and of an allocator that rounds up to powers of two."""
    where = torch.accelerator.current_accelerator()
    tier, slots, asked, rounded = HostTier(AcceleratorDevice()), [], 0, 0
    try:
        while asked < total_bytes:
            size = UNEVEN[len(slots) % len(UNEVEN)]
            slots += tier.copy_out_all([torch.empty(size, dtype=torch.uint8, device=where)])
            tier.wait_copied_out([slots[-1]])
            asked, rounded = asked + size, rounded + (1 << (size - 1).bit_length())
        held = tier.gauges()
        torch.accelerator.synchronize()
        return {
            "tier": held["host_held_bytes"] / asked,
            "powers_of_two": rounded / asked,
            "chunks": float(held["host_chunks"]),
        }
    finally:
        slots.clear()
        tier.close()


def report(result: dict[str, object], sizes: dict[str, dict[str, dict[str, float]]], waste: dict[str, float]) -> str:
    """Return the README of a results folder."""
    lines = [
        f"# Host tier against raw pinned copies: {result['device']}, {result['hardware']}",
        "",
        f"{result['date']}, {result['total_mib']} MiB a run, {result['pairs']} alternating pairs; GB/s as median "
        "(quartiles). The ratio is that of each pair. Made by `python -m benchmarks.suites.host`; every run is in "
        "`run.json`.",
        "",
        f"| tensor size | direction | raw | tier | tier ÷ raw (goal ≥ {GOAL}) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size, directions in sizes.items():
        for direction in ("out", "in"):
            lines.append(f"| {size} | {direction} | {compared_rates(directions, direction, 1, unit=1e9)} |")
    lines += [
        "",
        f"Bytes held ÷ offloaded, tensors of uneven sizes: **{waste['tier']:.4f}** in {waste['chunks']:.0f} chunks "
        f"(goal ≤ 1.03); rounded up to powers of two they would take {waste['powers_of_two']:.2f}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write ``run.json`` and ``README.md``."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--total-mib", type=int, default=1024)
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("Nothing measured: torch finds no accelerator on this machine, and the host tier serves nothing else")
        return
    runs = {f"{size} MiB": measure(size * MIB, options.total_mib * MIB, options.pairs) for size in SIZES_MIB}
    sizes = {size: summaries(found) for size, found in runs.items()}
    waste = count_waste(options.total_mib * MIB)
    result: dict[str, object] = {
        "suite": "host",
        "hardware": hardware(RESULTS),
        "device": device_name(),
        "date": datetime.date.today().isoformat(),
        "total_mib": options.total_mib,
        "pairs": options.pairs,
        "summary": sizes,
        "held_per_offloaded": waste,
        "runs_bytes_per_second": runs,
    }
    text = report(result, sizes, waste)
    write_result(options.out or result_folder("host"), result, text)
    print(text)


if __name__ == "__main__":
    main()
