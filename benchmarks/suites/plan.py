"""What a plan says against what comes: peak memory and step time, predicted and measured, for budgets and slowdowns.

A decoder trains in a fresh process for each case: a few steps until the plan is made, then the steps that are measured.
The process's resident size is what is scarce (glibc's mmap threshold is fixed, so that freed memory goes back). Losses
must be those of plain training, bit by bit: no number on a red gate. All cases run in turn, round after round.

    python -m benchmarks.suites.plan [--rounds 3] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ebbtide
from benchmarks.results_folder import result_folder, write_result
from ebbtide.base.units import format_size
from ebbtide.measuring import MEASURED_STEPS, MeasuredPlan
from ebbtide.store.meter import HostMeter

SHARES = (0.1, 0.25, 0.5, 0.75)
"""Budgets, between the least memory (0) and that of plain training (1)."""

SLOWDOWNS = (0.0, 0.05, 0.3)

MEASURED = 3
"""Steps measured in each process."""

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000, "use_cache": False,
}  # fmt: skip
BATCH = (2, 512)


def child(case: dict[str, Any]) -> dict[str, Any]:
    """Train as a case says, in this process.

    Args:
        case: ``{}`` for plain training, or the arguments of ``Auto``.

    Returns:
        Losses of all steps; peak bytes and seconds of the measured ones; what the plan predicted, if there is one.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    ids = torch.randint(0, SHAPE["vocab_size"], BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    meter, losses, peaks, seconds = HostMeter(), list[float](), list[int](), list[float]()

    def step() -> None:
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
        peaks.append(meter.take_peak_bytes() or 0)

    handle = ebbtide.enable_activation_offloading(model, policy=ebbtide.Auto(**case)) if case else None
    for _ in range(2 + MEASURED_STEPS + MEASURED):
        step()
    predicted = None
    if handle is not None and isinstance(handle.plan, MeasuredPlan):
        found = handle.plan.made().predicted
        predicted = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return {
        "losses": losses, "peak_bytes": max(peaks[-MEASURED:]), "seconds": seconds[-MEASURED:], "predicted": predicted
    }  # fmt: skip


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a fresh process."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-m", "benchmarks.suites.plan", "--child", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: the run failed\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what every case gave, in every round; its key is the case as JSON."""
    plain, least = run({}), run({"max_slowdown": 10.0})
    low, high = least["peak_bytes"], plain["peak_bytes"]
    cases = [{}, *({"memory_budget": int(low + share * (high - low))} for share in SHARES)]
    cases += [{"max_slowdown": slowdown} for slowdown in SLOWDOWNS]
    found: dict[str, list[dict[str, Any]]] = {json.dumps(case): [] for case in cases}
    for number in range(rounds):
        for case in cases if number % 2 else reversed(cases):
            got = run(case)
            if got["losses"] != plain["losses"]:
                raise SystemExit(f"{case}: the losses differ; no number on a red gate")
            found[json.dumps(case)].append(got)
            print(f"round {number + 1} of {rounds}  {json.dumps(case):<30} peak {format_size(got['peak_bytes'])}")
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the rows: predicted and measured, medians over rounds."""
    plain = statistics.median(t for got in found["{}"] for t in got["seconds"])
    rows = [
        "| asked for | predicted peak | measured | off by | predicted slowdown | step ÷ plain's |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, runs in found.items():
        peak = statistics.median(got["peak_bytes"] for got in runs)
        ratio = statistics.median(t for got in runs for t in got["seconds"]) / plain
        name, *_ = [*json.loads(key).items(), ("plain training", None)]
        label = name[0] if name[1] is None else f"`{name[0]}={_shown(*name)}`"
        if not json.loads(key):
            rows.append(f"| {label} | | {format_size(peak)} | | | x{ratio:.2f} |")
            continue
        if key.startswith('{"memory_budget"'):
            said = statistics.median(got["predicted"]["peak_bytes"] for got in runs)
            off = f"{100 * (said - peak) / peak:+.1f} %"
            predicted = format_size(said)
        else:  # without a budget, memory is not measured and only what blocks save is predicted
            predicted = off = "–"
        slower = statistics.median(got["predicted"]["overhead_percent"] for got in runs)
        rows.append(f"| {label} | {predicted} | {format_size(peak)} | {off} | {slower:+.1f} % | x{ratio:.2f} |")
    return rows


def _shown(name: str, value: float) -> str:
    return f"'{format_size(value)}'" if name == "memory_budget" else f"{value:g}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(child(given.child)))
        return
    found = measure(given.rounds)
    text = "\n".join(
        [
            "# What plans say, and what comes",
            "",
            f"A decoder of {SHAPE['num_hidden_layers']} blocks, width {SHAPE['hidden_size']}, {BATCH[0]} x {BATCH[1]} "
            f"tokens, float32, one thread, offloading to disk; medians over {given.rounds} rounds of fresh processes, "
            f"{MEASURED} steps each. Peaks are resident sizes of the process, steps are divided by those of plain "
            "training in the same rounds. Losses are those of plain training, bit by bit.",
            "",
            *table(found),
            "",
        ]
    )
    print(text)
    folder = given.out or result_folder("plan")
    write_result(folder, {"suite": "plan", "rounds": given.rounds, "shape": SHAPE, "batch": BATCH, "runs": found}, text)
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
