"""How fast copies run in a real training step, compared with a bare copy loop over tensors of the same sizes.

The step's rate is bytes ÷ the time for which copies ran, as the store counts both; the loop copies one tensor after
another, with nothing else running: on a device between pinned memory and the device, on a CPU between memory and a
file. They alternate, and the order is swapped for each pair; the first pair warms up. On a device copies compete in the
step with kernels for memory, on a CPU with kernels for cores.

    python -m benchmarks.suites.link [--small] [--pairs 10] [--model Qwen3-1.7B] [--tokens 8192] [--out DIR]
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch

import ebbtide
from benchmarks.case import step
from benchmarks.cases import MIB, arguments, device_name
from benchmarks.peers import Prepared
from benchmarks.results_folder import (
    RESULTS,
    compared_rates,
    hardware,
    interleaved,
    result_folder,
    summaries,
    write_result,
)
from benchmarks.shapes import SHAPES
from benchmarks.suites import disk, host
from ebbtide.base.actions import Action
from ebbtide.base.events import BUS
from ebbtide.store.aligned import BackingFile
from ebbtide.store.location import default_directory

GOAL = 0.95
MOST_RAW_BYTES = 1 << 30

Rates = tuple[float, float]


def moved_sizes(handle: ebbtide.Handle) -> list[int]:
    """Return the sizes of the storages that the latest pass offloaded: the mean of each site."""
    sites = handle._engine.last_pass.sites.items()
    sizes = [total // count for (_, action), (count, total) in sites for _ in range(count) if action is Action.OFFLOAD]
    if not sizes:
        raise SystemExit("nothing was offloaded: a longer --tokens has larger tensors")
    while sum(sizes) > MOST_RAW_BYTES and len(sizes) > 1:
        sizes = sizes[::2]
    return sizes


def raw_loop(sizes: list[int], stack: contextlib.ExitStack) -> Callable[[], Rates]:
    """Return a function that copies tensors of these sizes and returns the rates out and in."""
    where = torch.accelerator.current_accelerator()
    if where is not None:
        sources = [torch.ones(n, dtype=torch.uint8, device=where) for n in sizes]
        pinned = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]
        stream = torch.Stream(device=where)
        return lambda: host.raw_rates(stream, sources, pinned)
    file = BackingFile(default_directory())
    stack.callback(file.close)
    size = sum(sizes) // len(sizes) // 4096 * 4096
    file.grow(0, size * len(sizes))
    return lambda: disk.raw_rates(file, size, size * len(sizes))


def step_rates(handle: ebbtide.Handle, run: Callable[[], object]) -> Rates:
    """Return the rates of the copies of one step, out and in, while they ran."""
    tier = handle._engine.tier
    tier.counters  # noqa: B018  what was in flight before counts before
    counted = operator.attrgetter("timed_out_bytes", "out_seconds", "timed_in_bytes", "in_seconds")
    before = counted(tier.counters)
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    after = counted(tier.counters)
    out_bytes, out_seconds, in_bytes, in_seconds = (b - a for a, b in zip(before, after, strict=True))
    if not out_seconds or not in_seconds:
        raise SystemExit("a step moved nothing: a smaller --window-mib holds less back")
    return out_bytes / out_seconds, in_bytes / in_seconds


def report(result: dict[str, Any]) -> str:
    """Return the README of a results folder."""
    lines = [
        f"# Copies in a real step and in a bare loop: {result['device']}, {result['hardware']}",
        "",
        f"{result['model']}, {result['tokens']} tokens, {len(result['sizes_bytes'])} tensors, "
        f"{sum(result['sizes_bytes']) / 1e6:.0f} MB in each direction, {result['pairs']} alternating pairs; GB/s as "
        "median (quartiles); the ratio is that of each pair. Made by `python -m benchmarks.suites.link`.",
        "",
        f"| direction | bare loop | in the step | ratio (goal on a device ≥ {GOAL}) | stall of a step, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for direction in ("out", "in"):
        cells = compared_rates(result["summary"], direction, 2, unit=1e9)
        lines.append(f"| {direction} | {cells} | {result['stall_seconds_per_step']:.4f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write ``run.json`` and ``README.md``."""
    given = arguments(__doc__, pairs=10, model="", tokens=0, window_mib=64)
    name = given.model or ("tiny" if given.small else "Qwen3-1.7B")
    tokens = given.tokens or (512 if given.small else 8192)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = SHAPES[name].build(device, "full").train()
    inputs, prepared = SHAPES[name].inputs(tokens, 1, device), Prepared(model=model)
    window = (1 if given.small else given.window_mib) * MIB
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(ebbtide.enable_activation_offloading(model, policy="offload", window=window))
        stack.callback(BUS.subscribe(lambda kind, fields: None))  # a device times only steps that have a listener
        for _ in range(2):
            step(prepared, inputs)
        sizes = moved_sizes(handle)
        loop, before = raw_loop(sizes, stack), handle.stats().total_stall_seconds
        found = interleaved(given.pairs, loop, lambda: step_rates(handle, lambda: step(prepared, inputs)))
        stall = (handle.stats().total_stall_seconds - before) / (given.pairs + 1)
    result: dict[str, Any] = {
        "suite": "link",
        "hardware": hardware(RESULTS),
        "device": device_name(),
        "model": name,
        "tokens": tokens,
        "pairs": given.pairs,
        "window_bytes": window,
        "sizes_bytes": sizes,
        "stall_seconds_per_step": stall,
        "summary": summaries(found),
        "runs_bytes_per_second": found,
    }
    text = report(result)
    write_result(given.out or result_folder("link"), result, text)
    print(text)


if __name__ == "__main__":
    main()
