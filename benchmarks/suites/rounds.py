"""Step and peak of several modes on one card, in turn in one process, on one set of weights.

For machines that are lent for minutes only: nothing is imported, built or warmed up twice. Each mode has its own
modules over the same parameters, trains until it has settled, and then takes one step a round; which one begins changes
from round to round. The loss and the rest of a step are those of ``benchmarks/case.py``; gradients are not compared
here. ``auto within checkpointing`` is ``Auto`` with checkpointing's peak as its budget. Each mode also takes some steps
in a row, before the rounds and after them: ``Auto`` measures its own steps in a row. On CUDA a last step of each mode
is traced: what the device did, and how long it ran no kernel.

[Note: who decides] A device queues a limited number of launches, and then the host waits for it: at the end of a step
the host may be ahead by that many in every mode, so "queued" says little about the host. At the end of the forward it
does: if the device is done as soon as the host has queued it, the host sets the pace.

    python -m benchmarks.suites.rounds [--model Qwen3-8B] [--tokens 8192] [--rounds 15] [--minutes 4] [--out DIR]
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.case import MOST_WARMUP_STEPS, forget_peak, peak, step, synchronize
from benchmarks.cases import arguments, device_name
from benchmarks.device_time import DeviceTime, device_time
from benchmarks.peers import Prepared, mode_named, planned
from benchmarks.results_folder import result_folder, spread, summary, write_result
from benchmarks.shapes import SHAPES

WITHIN = "auto within checkpointing"
MODES = ("plain", "checkpointing", WITHIN, "ebbtide minimal", "ebbtide auto")
LEAST_WARMUP = 8
MARGIN = 1.02
"""Budget of ``WITHIN``, relative to checkpointing's peak."""
IN_ROW = 4
"""Steps in a row, before the rounds and after them; the first of them follows another mode and does not count."""


class Step(NamedTuple):
    """One step.

    Attributes:
        seconds: Until the device is done.
        queued: Until the host has queued everything.
        peak_bytes: Peak memory, weights and gradients included.
        forward: Until the device is done with the forward; as ``forward_queued`` on a CPU.
        forward_queued: Until the host has queued the forward. See [Note: who decides].
        collecting: Time of it that Python's garbage collector took.
        segments: Segments that torch's allocator took from the device; there should be none.
    """

    seconds: float
    queued: float
    peak_bytes: int
    forward: float
    forward_queued: float
    collecting: float
    segments: int


class Collector:
    """Seconds of Python's garbage collector so far."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self.seconds += now - self._begun


COLLECTOR = Collector()


class Trained:
    """A mode over shared weights.

    Attributes:
        steps: Counted steps, alternating with other modes.
        in_row: Steps in a row, before the rounds and after them.
        warmup: Steps before all of them.
        traced: How the device spent a step after all of them; None unless it is CUDA's.
    """

    def __init__(self, mode: str, model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        own = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self._mode: Generator[Prepared] = mode_named(mode).prepare(own)
        prepared, self._inputs = next(self._mode), inputs
        self.prepared = replace(prepared, forward=self._around_forward(prepared))
        self._device = next(model.parameters()).device
        self._forward: tuple[float, Any] = 0.0, None  # when the host had queued it, and the device's event
        self.steps: list[Step] = []
        self.in_row: tuple[list[Step], ...] = ()
        self.traced: DeviceTime | None = None
        self.warmup = 0
        while self.warmup < LEAST_WARMUP or (self.warmup < MOST_WARMUP_STEPS and not self.prepared.settled()):
            self.peak_bytes = self.step().peak_bytes
            self.warmup += 1
        self.take_row()

    def _around_forward(self, prepared: Prepared) -> Any:
        @contextlib.contextmanager
        def around() -> Generator[None]:
            with prepared.forward():
                yield
            self._forward = time.perf_counter(), self._event()

        return around

    def _event(self) -> Any:
        if self._device.type == "cpu":
            return None
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _segments(self) -> int:
        if self._device.type == "cpu":
            return 0
        return int(torch.get_device_module(self._device).memory_stats().get("segment.all.allocated", 0))

    def take_row(self) -> None:
        """Take steps in a row."""
        self.in_row += ([self.step() for _ in range(IN_ROW)][1:],)

    def step(self) -> Step:
        """Take a step."""
        synchronize(self._device)
        forget_peak(self._device)
        collecting, segments, device_begun, begun = (
            COLLECTOR.seconds, self._segments(), self._event(), time.perf_counter(),
        )  # fmt: skip
        step(self.prepared, self._inputs)
        queued = time.perf_counter() - begun
        synchronize(self._device)
        took = time.perf_counter() - begun
        self.prepared.model.zero_grad(set_to_none=True)
        host, done = self._forward
        return Step(
            seconds=took, queued=queued, peak_bytes=peak(self._device),
            forward=host - begun if done is None else device_begun.elapsed_time(done) / 1e3,
            forward_queued=host - begun, collecting=COLLECTOR.seconds - collecting,
            segments=self._segments() - segments,
        )  # fmt: skip

    def close(self) -> None:
        """Undo the mode's changes."""
        self._mode.close()


def table(modes: dict[str, Trained]) -> list[str]:
    """Return a row for every mode."""
    lines = [
        "| mode | step | ÷ plain | in a row, before | and after | forward | ends after the host | collector | kernels "
        "| gaps | peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def ms(steps: list[Step], *names: str) -> str:
        first, *less = ([getattr(step, name) for step in steps] for name in names)
        return f"{1e3 * statistics.median(x - sum(y) for x, *y in zip(first, *less, strict=True)):.0f} ms"

    for mode, trained in modes.items():
        steps, (before, after) = trained.steps, trained.in_row
        ratio = summary([mine.seconds / p.seconds for mine, p in zip(steps, modes["plain"].steps, strict=True)])
        most = 1e3 * max(step.collecting for step in steps)
        device = trained.traced
        kernels, gaps = (f"{1e3 * x:.0f} ms" for x in (device.busy_seconds, device.gap_seconds)) if device else ("", "")
        lines.append(
            f"| {mode} | {ms(steps, 'seconds')} | ×{spread(ratio)} "
            f"| {ms(before, 'seconds')} | {ms(after, 'seconds')} | {ms(steps, 'forward')} "
            f"| {ms(steps, 'forward', 'forward_queued')} | {ms(steps, 'collecting')}, at most {most:.0f} "
            f"| {kernels} | {gaps} | {max(step.peak_bytes for step in steps) / 2**30:.2f} GiB |"
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
    modes: dict[str, Trained] = {}
    for mode in MODES:
        budget = int(MARGIN * modes["checkpointing"].peak_bytes) if mode == WITHIN else 0
        modes[mode] = Trained(planned(memory_budget=budget) if budget else mode, model, inputs)
        print(f"{mode}: {modes[mode].warmup} steps to warm up", flush=True)
    for number in range(given.rounds):
        if number and time.monotonic() - begun > 60 * given.minutes:
            break
        first = number % len(MODES)
        for mode in (*MODES[first:], *MODES[:first]):
            modes[mode].steps.append(modes[mode].step())
    for trained in modes.values():
        trained.take_row()
    for trained in modes.values():
        trained.traced = device_time(trained.step)
    found = {mode: trained.steps for mode, trained in modes.items()}
    in_row = {mode: trained.in_row for mode, trained in modes.items()}
    traced = {mode: trained.traced and trained.traced._asdict() for mode, trained in modes.items()}
    notes: dict[str, Any] = {mode: trained.prepared.notes() for mode, trained in modes.items()}
    for trained in modes.values():
        trained.close()
    text = [
        f"# Modes in turn: {name}, {tokens} tokens, {device_name()}",
        "",
        "Forward and backward, full training in bfloat16 (on a CPU float32), no head and no optimizer. Peak: with",
        f"weights and gradients. {len(found['plain'])} rounds in one process; medians (quartiles). Where the forward",
        "ends hardly after the host, the host decides. Made by `python -m benchmarks.suites.rounds`; every step is in",
        f"`run.json`: {', '.join(Step._fields)}.",
        "",
        *table(modes),
        "",
    ]
    print("\n".join(text))
    folder = given.out or result_folder("rounds")
    write_result(
        folder,
        {"model": name, "tokens": tokens, "rounds": found, "in_row": in_row, "traced": traced, "notes": notes},
        "\n".join(text),
    )


if __name__ == "__main__":
    main()
