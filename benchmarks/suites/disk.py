"""How much of raw direct I/O the disk tier reaches.

Raw is one thread that writes or reads blocks of one size, one after the other, with direct I/O, between aligned memory
and a file: as much memory as the tier's (all of it is written; a few blocks are read into repeatedly). The tier moves
tensors of that size: all copied out, then waited for; and taken one by one with a few prefetched ahead, each dropped
before the next. Both alternate, and swap which goes first, so that other load on the machine affects both. The first
pair warms up (a file's blocks are written once) and is not counted.

    python -m benchmarks.suites.disk [--path DIR] [--pairs 7] [--out DIR]
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import time
from pathlib import Path

import torch

from benchmarks.results_folder import hardware, interleaved, result_folder, summary, write_result
from ebbtide.store.aligned import BackingFile
from ebbtide.store.buffers import Buffer, view_memory
from ebbtide.store.disk import DiskTier
from ebbtide.store.location import check_directory, default_directory, filesystem_of

MIB = 1 << 20
GOAL = 0.9
AHEAD = 4


def raw_rates(file: BackingFile, size_bytes: int, total_bytes: int) -> tuple[float, float]:
    """Return bytes per second of raw writes and reads of blocks of ``size_bytes``."""
    count = total_bytes // size_bytes
    memory = Buffer(total_bytes, 0)
    ctypes.memset(memory.address, 1, total_bytes)
    views = [view_memory(memory.address + i * size_bytes, size_bytes) for i in range(count)]
    rates: list[float] = []
    for call, ring in ((os.pwritev, count), (os.preadv, AHEAD + 1)):
        started = time.perf_counter()
        for index in range(count):
            if call(file.fd, [views[index % ring]], index * size_bytes) != size_bytes:
                raise OSError(f"short raw transfer of block {index}")
        rates.append(total_bytes / (time.perf_counter() - started))
    return rates[0], rates[1]


def tier_rates(tier: DiskTier, sources: list[torch.Tensor]) -> tuple[float, float]:
    """Return bytes per second of copying all sources out, and back in, in reverse order."""
    total = sum(x.numel() for x in sources)
    started = time.perf_counter()
    slots = [tier.park(x) for x in sources]
    for slot in slots:
        slot.wait_parked()
    out = total / (time.perf_counter() - started)
    slots.reverse()
    started = time.perf_counter()
    for slot in slots[:AHEAD]:
        slot.prefetch()
    for index, slot in enumerate(slots):
        if index + AHEAD < len(slots):
            slots[index + AHEAD].prefetch()
        slot.take()
    into = total / (time.perf_counter() - started)
    for slot in slots:
        slot.free()
    return out, into


def measure(directory: Path, size_bytes: int, total_bytes: int, pairs: int) -> dict[str, list[float]]:
    """Return the rates of ``pairs`` alternating runs after one that warms up."""
    file, tier = BackingFile(directory), DiskTier(directory)
    if not file.direct:
        raise SystemExit(f"direct I/O is refused in {directory}: there is nothing to compare with")
    file.grow(0, total_bytes)
    sources = [torch.ones(size_bytes, dtype=torch.uint8) for _ in range(total_bytes // size_bytes)]
    try:
        return interleaved(pairs, lambda: raw_rates(file, size_bytes, total_bytes), lambda: tier_rates(tier, sources))
    finally:
        tier.close()
        file.close()


def report(result: dict[str, object], sizes: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the README of a results folder."""
    lines = [
        f"# Disk tier against raw direct I/O: {result['hardware']}",
        "",
        f"{result['date']}, {result['filesystem']}, {result['total_mib']} MiB a run, {result['pairs']} alternating "
        "pairs; MiB/s as median (quartiles). The ratio is that of each pair. Made by "
        "`python -m benchmarks.suites.disk`; every run is in `run.json`.",
        "",
        f"| tensor size | way | raw | tier | tier ÷ raw (goal ≥ {GOAL}) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size, ways in sizes.items():
        for way in ("out", "in"):
            raw, tier, ratio = (ways[f"{x}_{way}"] for x in ("raw", "tier", "ratio"))
            cells = [f"{x['median'] / MIB:.0f} ({x['q1'] / MIB:.0f} to {x['q3'] / MIB:.0f})" for x in (raw, tier)]
            share = f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
            lines.append(f"| {size} | {way} | {cells[0]} | {cells[1]} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write ``run.json`` and ``README.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="directory on the disk to measure")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--out", type=Path, help="results folder; default: a new one in benchmarks/results")
    options = parser.parse_args()
    directory = check_directory(options.path) if options.path else default_directory()
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    runs: dict[str, dict[str, list[float]]] = {}
    for size_mib in (1, 4, 16):
        found = measure(directory, size_mib * MIB, options.total_mib * MIB, options.pairs)
        for way in ("out", "in"):
            pairs = zip(found[f"tier_{way}"], found[f"raw_{way}"], strict=True)
            found[f"ratio_{way}"] = [tier / raw for tier, raw in pairs]
        runs[f"{size_mib} MiB"] = found
        sizes[f"{size_mib} MiB"] = {name: summary(values) for name, values in found.items()}
    folder = options.out or result_folder("disk", directory)
    result: dict[str, object] = {
        "suite": "disk",
        "hardware": hardware(directory),
        "date": datetime.date.today().isoformat(),
        "filesystem": filesystem_of(directory),
        "total_mib": options.total_mib,
        "pairs": options.pairs,
        "summary": sizes,
        "runs_bytes_per_second": runs,
    }
    text = report(result, sizes)
    write_result(folder, result, text)
    print(text)


if __name__ == "__main__":
    main()
