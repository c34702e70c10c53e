"""How much of raw direct I/O the disk tier reaches, and what direct I/O costs compute.

Raw is one thread that writes or reads blocks of one size, one after the other, with direct I/O, between aligned memory
and a file: as much memory as the tier's (all of it is written; a few blocks are read into repeatedly). The tier moves
tensors of that size: all copied out, then waited for; and taken one by one with a few prefetched ahead, each dropped
before the next. Both alternate, and swap which goes first, so that other load on the machine affects both. The first
pair warms up (a file's blocks are written once) and is not counted. Raw uses small pages, as torch's tensors on a CPU;
the tier writes from such and reads into huge ones.

Then a thread does raw I/O while matrices are multiplied with all processors, from or into small pages, and huge ones:
the time that this adds to the multiplications, for each MiB that was moved meanwhile. And fresh memory is written,
some seconds after as much was freed: what a first use of either kind of page costs.

    python -m benchmarks.suites.disk [--path DIR] [--pairs 7] [--out DIR]
"""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.results_folder import (
    compared_rates,
    hardware,
    interleaved,
    parser_of,
    result_folder,
    spread,
    summaries,
    write_result,
)
from ebbtide.store.aligned import BackingFile
from ebbtide.store.disk import DiskTier
from ebbtide.store.location import check_directory, default_directory, filesystem_of
from ebbtide.store.pages import use_huge_pages

MIB = 1 << 20
GOAL = 0.9
AHEAD = 4
PIECE_BYTES = 9 * MIB // 4
"""Of a saved tensor of 384 tokens and 1536 features, in float32."""

UNUSED_SECONDS = 3.0
"""A host that takes freed memory back has done so by then."""

Moved = tuple[float, int]
"""Seconds of the multiplications, and bytes moved meanwhile."""


def memory_of(nbytes: int, *, huge: bool) -> mmap.mmap:
    """Return written memory in small or huge pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        use_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes, often=True)
    else:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
    return memory


def first_use(nbytes: int, *, huge: bool) -> float:
    """Return the milliseconds that the first use of a MiB of fresh memory takes, long after as much was freed."""
    memory_of(nbytes, huge=huge).close()
    time.sleep(UNUSED_SECONDS)
    started = time.perf_counter()
    memory_of(nbytes, huge=huge).close()
    return 1e3 * (time.perf_counter() - started) / (nbytes / MIB)


def multiply() -> float:
    """Return the seconds of multiplications like those of a block's feed-forward part."""
    x, up, down = torch.randn(384, 576), torch.randn(576, 1536), torch.randn(1536, 576)
    started = time.perf_counter()
    for _ in range(60):
        x = nn.functional.normalize(nn.functional.silu(x @ up) @ down)
    return time.perf_counter() - started


def multiplied_while(move: Callable[[int], int] | None, total_bytes: int) -> Moved:
    """Multiply while a thread moves pieces of a file by ``move``, which takes an offset; None: alone."""
    stopped, moved = threading.Event(), 0

    def run() -> None:
        nonlocal moved
        while move is not None and not stopped.is_set():
            moved += move(moved % total_bytes)

    thread = threading.Thread(target=run)
    thread.start()
    seconds = multiply()
    stopped.set()
    thread.join()
    return seconds, moved


def cost_to_compute(directory: Path, total_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return, by kind of page and direction, the milliseconds that a MiB adds to compute each round, and its rate."""
    file = BackingFile(directory)
    total_bytes = total_bytes // PIECE_BYTES * PIECE_BYTES
    file.grow(0, total_bytes)
    found: dict[str, list[float]] = {}
    try:
        memories = {"small": memory_of(8 * MIB, huge=False), "huge": memory_of(8 * MIB, huge=True)}
        for index in range(0, total_bytes, PIECE_BYTES):
            os.pwritev(file.fd, [memoryview(memories["small"])[:PIECE_BYTES]], index)
        for round_ in range(rounds + 1):
            alone, _ = multiplied_while(None, total_bytes)
            for pages, memory in memories.items():
                for direction, call in (("out", os.pwritev), ("in", os.preadv)):
                    view = memoryview(memory)[:PIECE_BYTES]
                    seconds, moved = multiplied_while(lambda at, c=call, v=view: c(file.fd, [v], at), total_bytes)  # type: ignore[misc]
                    if round_:
                        found.setdefault(f"{pages}_{direction}_cost", []).append(
                            1e3 * (seconds - alone) / (moved / MIB)
                        )
                        found.setdefault(f"{pages}_{direction}_rate", []).append(moved / seconds)
            for pages in memories:
                found.setdefault(f"{pages}_fresh", []).append(first_use(32 * MIB, huge=pages == "huge"))
    finally:
        file.close()
    return found


def raw_rates(file: BackingFile, size_bytes: int, total_bytes: int) -> tuple[float, float]:
    """Return bytes per second of raw writes and reads of blocks of ``size_bytes``."""
    count = total_bytes // size_bytes
    memory = memoryview(memory_of(total_bytes, huge=False))
    views = [memory[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]
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
    slots = [tier.copy_out_all([x])[0] for x in sources]
    tier.wait_copied_out(slots)
    out = total / (time.perf_counter() - started)
    slots.reverse()
    started = time.perf_counter()
    tier.prefetch(slots[:AHEAD])
    for index, slot in enumerate(slots):
        if index + AHEAD < len(slots):
            tier.prefetch([slots[index + AHEAD]])
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


def report(
    result: dict[str, object],
    sizes: dict[str, dict[str, dict[str, float]]],
    costs: dict[str, dict[str, float]],
) -> str:
    """Return the README of a results folder."""
    lines = [
        f"# Disk tier against raw direct I/O: {result['hardware']}",
        "",
        f"{result['date']}, {result['filesystem']}, {result['total_mib']} MiB a run, {result['pairs']} alternating "
        "pairs; MiB/s as median (quartiles). The ratio is that of each pair. Made by "
        "`python -m benchmarks.suites.disk`; every run is in `run.json`.",
        "",
        f"| tensor size | direction | raw | tier | tier ÷ raw (goal ≥ {GOAL}) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size, directions in sizes.items():
        for direction in ("out", "in"):
            cells = compared_rates(directions, direction, 0, unit=MIB, ratio_digits=2)
            lines.append(f"| {size} | {direction} | {cells} |")
    lines += [
        "",
        "The same pieces of 2.25 MiB, raw, beside matrices that are multiplied with all processors:",
        "",
        "| pages | direction | MiB/s | milliseconds that a MiB adds to compute |",
        "| --- | --- | --- | --- |",
    ]
    first: list[str] = []
    for pages in ("small", "huge"):
        for direction in ("out", "in"):
            rate, cost = (costs[f"{pages}_{direction}_{x}"] for x in ("rate", "cost"))
            lines.append(f"| {pages} | {direction} | {spread(rate, 0, unit=MIB)} | {spread(cost)} |")
        first.append(f"{spread(costs[f'{pages}_fresh'], 2)} in {pages} pages")
    lines += [
        "",
        f"Milliseconds for the first use of a MiB, {UNUSED_SECONDS:g} s after as much was freed: {', '.join(first)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write ``run.json`` and ``README.md``."""
    parser = parser_of(__doc__)
    parser.add_argument("--path", type=Path, help="directory on the disk to measure")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--total-mib", type=int, default=256)
    options = parser.parse_args()
    directory = check_directory(options.path) if options.path else default_directory()
    total_bytes, pairs = options.total_mib * MIB, options.pairs
    runs = {f"{size} MiB": measure(directory, size * MIB, total_bytes, pairs) for size in (1, 4, 16)}
    compute = cost_to_compute(directory, total_bytes, pairs)
    sizes, costs = {size: summaries(found) for size, found in runs.items()}, summaries(compute)
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
        "cost_to_compute": compute,
    }
    text = report(result, sizes, costs)
    write_result(folder, result, text)
    print(text)


if __name__ == "__main__":
    main()
