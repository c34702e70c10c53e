"""Run cases one after the other, each in a process of its own, and write each result at once."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.case import MARK, READY, Case, Row
from benchmarks.peers import absent, mode_named
from benchmarks.results_folder import (
    RESULTS,
    hardware,
    is_simulated,
    parser_of,
    result_folder,
    spread,
    summary,
    write_result,
)
from ebbtide.cli.lockstep import why_alone
from ebbtide.track import MemoryReader

Key = TypeVar("Key", bound=Hashable)
MIB = 1 << 20
LOCKSTEP = "lockstep"
"""The note of a row that numbers the lockstep it was taken in."""
COMPACT_MEMORY = Path("/proc/sys/vm/compact_memory")
CASE_SECONDS = 600.0
"""A case that takes longer is stopped, and its row says so: next to a busy process a plan is judged by then."""


def arguments(about: str | None, *, minutes: float = 8.0, **defaults: Any) -> argparse.Namespace:
    """Read the options that suites share.

    Args:
        about: The suite's docstring.
        minutes: Default time of the suite.
        defaults: Further options and their default values.
    """
    parser = parser_of(about)
    parser.add_argument("--small", action="store_true", help="a tiny model; the default on a machine without a device")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin no further case after this time")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    found = parser.parse_args()
    found.small = found.small or not torch.accelerator.is_available()
    return found


def run_in_lockstep(cases: Sequence[Case], *, limit_seconds: float = CASE_SECONDS) -> list[Row]:
    """Run cases in fresh processes; a crash becomes a row's status.

    They start one after the other. Those with ``lockstep`` stop before their first timed step; then each takes a
    step, then each the next, so that a machine whose speed drifts favours none of them. If the first one, which
    has then done all that a step does, shows that memory does not hold them all, they follow one another.

    Args:
        cases: What to run.
        limit_seconds: After which a case is stopped, before its first step or, in lockstep, in one of its steps.
    """
    running: list[_Running] = []
    try:
        for case in cases:
            running.append(_Running(case, limit_seconds))
            running[-1].read()
            if len(running) == 1 and running[0].waits:
                reason = why_alone(running[0].peak_bytes, runs=len(cases), device="cpu")
                if reason is not None:
                    print(f"The cases follow one another: {reason}.", flush=True)
                    running[0].end()
                    alone = [replace(case, lockstep=False) for case in cases]
                    return [run_in_lockstep([case], limit_seconds=limit_seconds)[0] for case in alone]
        for number in itertools.count():
            waiting = [each for each in running if each.waits]
            if not waiting:
                break
            first = number % len(waiting)
            for each in [*waiting[first:], *waiting[:first]]:
                each.step()
        return [each.row() for each in running]
    finally:
        for each in running:
            each.end()


def compact_memory() -> bool:
    """Join the machine's free memory into large pieces, so that equal processes get equal memory (decision 23).

    Returns:
        Whether it was permitted: root may do so on Linux, outside of most containers.
    """
    try:
        COMPACT_MEMORY.write_text("1")
    except OSError:
        return False
    return True


class _Running:
    """A case in a process of its own."""

    def __init__(self, case: Case, limit_seconds: float) -> None:
        loader = ["tests.simdev.run"] if is_simulated() else []  # which a fresh process does not have
        command = [sys.executable, "-m", *loader, "benchmarks.case", json.dumps(asdict(case))]
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ  # without it deterministic algorithms are not
        self._case, self._limit_seconds = case, limit_seconds
        self._printed = self._stopped = ""
        self._process_peak_bytes = 0
        self.waits = False
        """Whether it waits to be permitted a step."""
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=RESULTS.parents[1],
            env=environment,
        )

    @property
    def peak_bytes(self) -> int:
        """Its peak so far."""
        return MemoryReader(self._child.pid).peaks()["peak_rss_bytes"] or 0

    def step(self) -> None:
        """Let it take a step."""
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write("\n")
                self._child.stdin.flush()
        self.read()

    def read(self) -> None:
        """Read what it prints until it waits or ends."""
        child = self._child
        stop = threading.Timer(max(self._limit_seconds, 0.0), child.kill)
        stop.start()
        self.waits = False
        for line in child.stdout or ():
            if line.startswith(MARK):
                self._printed = line.rstrip()
            elif line.rstrip() == READY:
                self.waits = True
                break
        if not self.waits:
            _, status, usage = os.wait4(child.pid, 0)  # its end was not requested before: it waits for this
            child.returncode, self._process_peak_bytes = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
            if not stop.is_alive():
                self._stopped = f"stopped after {self._limit_seconds:.0f} s"
            self._close()
        stop.cancel()

    def row(self) -> Row:
        """Return its row."""
        row = Row(case=self._case)
        if self._printed:
            found = json.loads(self._printed.removeprefix(MARK))
            row = Row(**(found | {"case": Case(**found["case"])}))
        else:
            row.status = self._stopped or "its process died: out of memory, most likely"
        row.notes["process_peak_bytes"] = self._process_peak_bytes  # as the system saw it
        return row

    def end(self) -> None:
        """End it if it still runs."""
        if self._child.returncode is None:
            self._child.kill()
            self._child.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def against_plain(rows: Sequence[Row]) -> list[list[float]]:
    """Return, for each row, its timed steps divided by ordinary training's of its lockstep, step by step.

    If several runs of a lockstep are ordinary training, by their mean: equal runs differ (suite ``equal``).

    Args:
        rows: As a book has them. A lockstep without ordinary training is divided by that of the one before.
    """
    plain: dict[int, list[list[float]]] = defaultdict(list)
    for row in rows:
        if row.case.mode == "plain" and row.seconds:
            plain[row.notes[LOCKSTEP]].append(row.seconds)
    found: list[list[float]] = []
    for row in rows:
        known = [runs for earlier, runs in plain.items() if earlier <= row.notes[LOCKSTEP]]
        equal_length = [seconds for seconds in (known[-1] if known else []) if len(seconds) == len(row.seconds)]
        yardstick = [statistics.fmean(step) for step in zip(*equal_length, strict=True)]
        found.append([own / other for own, other in zip(row.seconds, yardstick, strict=bool(yardstick))])
    return found


def grouped(rows: Sequence[Row], key: Callable[[Case], Key]) -> dict[Key, tuple[list[Row], list[float]]]:
    """Return the rows of each key of their cases, and their steps ÷ ordinary training's, as ``against_plain``."""
    groups: dict[Key, tuple[list[Row], list[float]]] = {}
    for row, ratios in zip(rows, against_plain(rows), strict=True):
        alike, compared = groups.setdefault(key(row.case), ([], []))
        alike.append(row)
        compared.extend(ratios)
    return groups


class Book:
    """Rows of a suite, written after each case, so that a stop loses nothing.

    Args:
        suite: Name of the suite.
        folder: Where to write; ``None``: a new folder of results.
        minutes: After which no further case begins.
        text: Return the README of the rows so far.
        about: Further facts to note.
    """

    def __init__(
        self, suite: str, folder: Path | None, minutes: float, text: Callable[[list[Row]], str], about: dict[str, Any]
    ) -> None:
        self.rows: list[Row] = []
        self._suite, self._text, self._about = suite, text, about
        self._folder = folder or result_folder(suite)
        self._ends = time.monotonic() + 60 * minutes
        self._locksteps = 0
        self._compacted = False

    @property
    def late(self) -> bool:
        """Whether no further case may begin."""
        return time.monotonic() > self._ends

    def run(self, case: Case) -> Row:
        """Run a case, or say that the time was up; write."""
        return self._run([case])[0]

    def run_all(self, cases: Iterable[Case]) -> None:
        """Run cases one after the other."""
        for case in cases:
            self._print(self.run(case))

    def run_in_lockstep(self, cases: Iterable[Case]) -> None:
        """Run cases at the same time, in lockstep; one after the other where they share a device.

        Args:
            cases: What to run.
        """
        if torch.accelerator.is_available():
            self.run_all(cases)
            return
        for row in self._run([replace(case, lockstep=True) for case in cases]):
            self._print(row)

    def _run(self, cases: Sequence[Case]) -> list[Row]:
        left = self._ends - time.monotonic() + 60
        why = [absent(mode_named(case.mode), accelerated=torch.accelerator.is_available()) for case in cases]
        why = ["not reached: the suite's time was up" if reason is None and self.late else reason for reason in why]
        present = [case for case, reason in zip(cases, why, strict=True) if reason is None]
        self._compacted = not torch.accelerator.is_available() and compact_memory()
        found = iter(run_in_lockstep(present, limit_seconds=min(CASE_SECONDS, left)) if present else [])
        rows = [
            next(found) if reason is None else Row(case=case, status=reason)
            for case, reason in zip(cases, why, strict=True)
        ]
        self._locksteps += 1
        for row in rows:
            row.notes[LOCKSTEP] = self._locksteps
            self.add(row)
        return rows

    def _print(self, row: Row) -> None:
        case, median = row.case, f"{summary(row.seconds)['median']:.3f} s" if row.seconds else ""
        print(
            f"{case.model} {case.tuning} {case.batch} x {case.tokens}  {case.mode}: {row.status} {median}",
            flush=True,
        )

    def add(self, row: Row) -> None:
        """Add a row and write all rows."""
        self.rows.append(row)
        result = {
            "suite": self._suite,
            "hardware": hardware(RESULTS),
            "device": device_name(),
            "memory_compacted": self._compacted,
            **self._about,
            "rows": [asdict(r) for r in self.rows],
        }
        write_result(self._folder, result, self._text(self.rows))

    def close(self) -> None:
        """Print the folder."""
        print(f"written to {self._folder}")


def device_name() -> str:
    """Return the name of the cases' device."""
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else str(torch.accelerator.current_accelerator() or "cpu")
    )


def table(rows: list[Row]) -> list[str]:
    """Return a table of rows, each next to the plain one of its model, tuning and length."""
    plain = {_key(r.case): r for r in rows if r.case.mode == "plain" and r.seconds}
    lines = [
        "| model | tuning | sequences x tokens | mode | step, s | ÷ plain | peak, MB | ÷ plain | out, MB | in, MB | "
        "status |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        case, beside = row.case, plain.get(_key(row.case))
        cells = [case.model, case.tuning, f"{case.batch} x {case.tokens}", case.mode]
        if row.seconds:
            found = summary(row.seconds)
            base = summary(beside.seconds)["median"] if beside else 0.0
            cells += [
                spread(found),
                f"{found['median'] / base:.3f}" if base else "",
                f"{row.peak_bytes / 1e6:.0f}",
                f"{row.peak_bytes / beside.peak_bytes:.2f}" if beside and beside.peak_bytes else "",
                f"{row.out_bytes / 1e6:.0f}",
                f"{row.in_bytes / 1e6:.0f}",
            ]
        else:
            cells += [""] * 6
        lines.append("| " + " | ".join([*cells, row.status]) + " |")
    return lines


def _key(case: Case) -> tuple[str, str, int, int]:
    return case.model, case.tuning, case.batch, case.tokens
