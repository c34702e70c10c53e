"""Step and peak of several ways on one card, in turn in one process, on one set of weights.

For machines that are held for minutes only: nothing is imported, built or warmed up twice. Each way has its own modules
over the same parameters, trains until it has settled, and then takes a step of every round; who begins changes from
round to round. The loss and the rest of a step are those of ``benchmarks/case.py``; gradients are not compared here.
``auto within checkpointing`` is ``Auto`` with the peak that checkpointing had as its budget.

    python -m benchmarks.suites.rounds [--model Qwen3-8B] [--tokens 8192] [--rounds 15] [--minutes 4] [--out DIR]
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from benchmarks.case import forget_peak, peak, step, synchronize
from benchmarks.cases import arguments, device_name
from benchmarks.peers import Prepared, planned, way_named
from benchmarks.results_folder import result_folder, summary, write_result
from benchmarks.shapes import SHAPES

WITHIN = "auto within checkpointing"
WAYS = ("plain", "checkpointing", WITHIN, "ebbtide minimal", "ebbtide auto")
LEAST_WARMUP, MOST_WARMUP = 8, 14
MARGIN = 1.02
"""Budget of ``WITHIN``, relative to checkpointing's peak."""


class Trained:
    """A way over shared weights.

    Attributes:
        steps: Seconds, seconds until the host had queued everything, and the peak, of each step that counts.
        warmup: Steps before them.
    """

    def __init__(self, way: str, model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        own = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self._way: Generator[Prepared] = way_named(way).prepare(own)
        self.prepared, self._inputs = next(self._way), inputs
        self._device = next(model.parameters()).device
        self.steps: list[tuple[float, float, int]] = []
        self.warmup = 0
        while self.warmup < LEAST_WARMUP or (self.warmup < MOST_WARMUP and not self.prepared.settled()):
            self.peak_bytes = self.step()[2]
            self.warmup += 1

    def step(self) -> tuple[float, float, int]:
        """Take a step; see ``steps``."""
        synchronize(self._device)
        forget_peak(self._device)
        begun = time.perf_counter()
        step(self.prepared, self._inputs)
        queued = time.perf_counter() - begun
        synchronize(self._device)
        took = time.perf_counter() - begun
        self.prepared.model.zero_grad(set_to_none=True)
        return took, queued, peak(self._device)

    def close(self) -> None:
        """Undo what the way has done."""
        self._way.close()


def table(found: dict[str, list[tuple[float, float, int]]]) -> list[str]:
    """Return a line for every way."""
    lines = ["| way | step | ÷ plain | host has queued | peak |", "| --- | ---: | ---: | ---: | ---: |"]
    for way, steps in found.items():
        ratio = summary([mine[0] / plain[0] for mine, plain in zip(steps, found["plain"], strict=True)])
        seconds, queued = (1e3 * statistics.median(s[i] for s in steps) for i in (0, 1))
        lines.append(
            f"| {way} | {seconds:.0f} ms | ×{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f}) "
            f"| {queued:.0f} ms | {max(s[2] for s in steps) / 2**30:.2f} GiB |"
        )
    return lines


def main() -> None:
    """Measure, print and write."""
    given = arguments(__doc__, minutes=4.0, model="", tokens=0, rounds=15)
    name, tokens = (
        given.model or ("tiny" if given.small else "Qwen3-8B"),
        given.tokens or (256 if given.small else 8192),
    )
    device, begun = torch.accelerator.current_accelerator() or torch.device("cpu"), time.monotonic()
    shape = SHAPES[name]
    model, inputs = shape.build(device, "full").train(), shape.inputs(tokens, 1, device)
    ways: dict[str, Trained] = {}
    for way in WAYS:
        budget = int(MARGIN * ways["checkpointing"].peak_bytes) if way == WITHIN else 0
        ways[way] = Trained(planned(memory_budget=budget) if budget else way, model, inputs)
        print(f"{way}: {ways[way].warmup} steps to warm up", flush=True)
    for number in range(given.rounds):
        if number and time.monotonic() - begun > 60 * given.minutes:
            break
        first = number % len(WAYS)
        for way in (*WAYS[first:], *WAYS[:first]):
            ways[way].steps.append(ways[way].step())
    found = {way: trained.steps for way, trained in ways.items()}
    notes: dict[str, Any] = {way: trained.prepared.notes() for way, trained in ways.items()}
    for trained in ways.values():
        trained.close()
    text = [
        f"# Modes in turn: {name}, {tokens} tokens, {device_name()}",
        "",
        "Forward and backward, full training in bfloat16 (on a CPU float32), no head and no optimizer. Peak: with",
        f"weights and gradients. {len(found['plain'])} rounds in one process; medians (quartiles). Made by",
        "`python -m benchmarks.suites.rounds`; every step is in `run.json`.",
        "",
        *table(found),
        "",
    ]
    print("\n".join(text))
    folder = given.out or result_folder("rounds")
    write_result(folder, {"model": name, "tokens": tokens, "rounds": found, "notes": notes}, "\n".join(text))


if __name__ == "__main__":
    main()
