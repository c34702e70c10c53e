"""Modes of saving activation memory on the simulated device: bytes moved, bytes kept, and waits of compute.

Every mode of ``benchmarks.peers`` that runs here trains the same small decoder on the same batch, on a device whose
kernels and copies take a fixed time. Bytes are counted by a dispatch mode that sees every copy, peaks by the device's
allocator; seconds are simulated, so that a busy machine changes none (except ``Auto``'s measurements). They show
how modes differ, and say nothing about a real device.

    python -m tests.simdev.run tests.simdev.peers [--modes 'plain;TRL'] [--tokens 256] [--out DIR]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import case
from benchmarks.case import Case, Row
from benchmarks.peers import all_modes
from benchmarks.results_folder import RESULTS, write_result
from tests.simdev.device import configured

KERNEL_US = 50
RATES = (4_000_000_000, 500_000_000)
"""Bytes a second of the link: one that hides the copies of this model behind its kernels, and one that does not."""

NARROW = tuple(f"ebbtide {policy}, window=1MiB" for policy in ("auto", "offload"))
"""A window that fits a model this small: the default's least is nearly all that it saves."""

ABSENT = "not installed"
"""The begin of the status of a method without its package."""

BY_NAME = {
    "torchtune": "0.6.1 asks for CUDA by name: `torch.cuda.default_stream()`, `torch.cuda.Stream()`, `.to('cuda')`",
    "verl": "0.9.1 takes its streams from a platform of CUDA, ROCm or NPU (`verl/plugin/platform`)",
    "Unsloth": "unsloth_zoo 2026.10.9 raises on import where the accelerator is none of CUDA, ROCm, XPU and NPU "
    "(`unsloth_zoo/device_type.py`)",
    "save_on_cpu": "torch's `save_on_cpu(pin_memory=True)` asks for CUDA unless `device_type` is passed: elsewhere "
    "its copies silently go to pageable memory and stall the host; the row `save_on_cpu` passes it",
}
"""Facts read in the sources of packages."""


def measure(case_: Case, rate: int) -> Row:
    """Run a case at a rate of the link."""
    with configured(kernel_delay_us=KERNEL_US, copy_bytes_per_s=rate, races=0, poison=1):
        return case.run(case_)


def report(rows: list[tuple[int, Row]], about: Case) -> str:
    """Return the README of a results folder."""
    lines = [
        "# Methods to save activation memory on the simulated device",
        "",
        f"{about.model}, {about.batch} x {about.tokens} tokens: forward and backward of one step after "
        f"{case.WARMUP_STEPS} of warm-up; each kernel takes {KERNEL_US} us. *Bits*: gradients, compared with those of "
        "ordinary training before. *Peak*: above weights, gradients and inputs, as the allocator counts. *Waits*: "
        "simulated time of a step in which compute runs no kernel. `Auto` measures real time, on a machine that does "
        "other work: these rows do not test its promise. ebbtide's default window, at least 16 MiB, holds nearly all "
        "that this model saves. Made by `python -m tests.simdev.run tests.simdev.peers`.",
        "",
        "| method | link, GB/s | bits | out, MB | in, MB | peak, MB | ÷ plain | step, ms | ÷ plain | waits, ms |",
        "| --- | ---: | --- |" + " ---: |" * 7,
    ]
    plain = {rate: row for rate, row in rows if row.case.mode == "plain" and row.seconds}
    absent = [row.case.mode for _, row in rows if row.status.startswith(ABSENT)]
    table: dict[tuple[str, ...], list[str]] = {}
    for rate, row in rows:
        if not row.status.startswith(ABSENT):
            table.setdefault((row.case.mode, *_cells(row, plain.get(rate))), []).append(f"{rate / 1e9:g}")
    lines += [f"| {mode} | {', '.join(rates)} | {' | '.join(cells)} |" for (mode, *cells), rates in table.items()]
    lines += ["", f"Not installed: {'; '.join(absent)}."] if absent else []
    lines += ["", "Read in their sources:", ""]
    return "\n".join([*lines, *(f"- {name}: {text}." for name, text in BY_NAME.items()), ""])


def _cells(row: Row, beside: Row | None) -> list[str]:
    """Return the cells of a row; without figures, its status in place of the bits."""
    if not row.seconds or beside is None:
        return [row.status, *[""] * 7]
    step, least = (r.notes["simulated_step_seconds"] for r in (row, beside))
    return [
        "equal", f"{row.out_bytes / 1e6:.2f}", f"{row.in_bytes / 1e6:.2f}", f"{row.peak_bytes / 1e6:.2f}",
        f"{row.peak_bytes / beside.peak_bytes:.2f}", f"{1e3 * step:.2f}", f"{step / least:.3f}",
        f"{1e3 * row.notes['simulated_wait_seconds']:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Measure, and write the results after every mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="", help="names, separated by semicolons; default: all")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "peers_simulated-device")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[int, Row]] = []
    chosen = given.modes.split(";") if given.modes else [*all_modes(), *NARROW]
    for mode in chosen:
        for rate in RATES:
            rows.append((rate, measure(Case(mode=mode, model="tiny", tokens=given.tokens, steps=1), rate)))
            print(f"{mode}, {rate / 1e9:g} GB/s: {rows[-1][1].status}", flush=True)
            if not rows[-1][1].seconds:
                break  # the rate does not matter there
        found: dict[str, Any] = {"rows": [{"rate": rate, **asdict(row)} for rate, row in rows]}
        write_result(given.out, found, report(rows, rows[0][1].case))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
