"""Running cases one after the other, each in a process of its own, and writing down what came of each at once."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import MARK, Case, Row
from benchmarks.peers import absent, way_named
from benchmarks.results_folder import RESULTS, hardware, is_simulated, result_folder, summary, write_result

MIB = 1 << 20
CASE_SECONDS = 240.0
"""A case that takes longer is stopped, and its row says so."""


def arguments(about: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the options that suites share.

    Args:
        about: The suite's documentation.
        defaults: Further options and their default values.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model; the default on a machine without a device")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no further case after this time")
    parser.add_argument("--out", type=Path, help="results folder; default: a new one in benchmarks/results")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    found = parser.parse_args()
    found.small = found.small or not torch.accelerator.is_available()
    return found


def run_in_process(case: Case, *, limit_seconds: float = CASE_SECONDS) -> Row:
    """Run a case in a fresh process; its death becomes the row's status.

    Args:
        case: What to run.
        limit_seconds: After which it is stopped.
    """
    loader = ["tests.simdev.run"] if is_simulated() else []  # which a fresh process does not have
    command = [sys.executable, "-m", *loader, "benchmarks.case", json.dumps(asdict(case))]
    row = Row(case=case)
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ  # without it deterministic algorithms are not
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=RESULTS.parents[1], env=environment) as child:
        stop = threading.Timer(limit_seconds, child.kill)
        stop.start()
        lines = child.stdout.read().splitlines() if child.stdout is not None else []
        _, status, usage = os.wait4(child.pid, 0)  # nobody has asked for its end before: it waits for this
        child.returncode = os.waitstatus_to_exitcode(status)
        stopped = not stop.is_alive()
        stop.cancel()
    told = next((line for line in reversed(lines) if line.startswith(MARK)), None)
    if told is not None:
        found = json.loads(told.removeprefix(MARK))
        row = Row(**(found | {"case": Case(**found["case"])}))
    else:
        row.status = (
            f"stopped after {limit_seconds:.0f} s" if stopped else "its process died: out of memory, most likely"
        )
    row.notes["process_peak_bytes"] = usage.ru_maxrss * 1024  # as the system saw it
    return row


class Book:
    """Rows of a suite, written after each case, so that a stop loses nothing.

    Args:
        suite: Name of the suite.
        folder: Where to write; ``None``: a new folder of results.
        minutes: After which no further case begins.
        text: Returns the README of the rows so far.
        about: What else is to be noted.
    """

    def __init__(
        self, suite: str, folder: Path | None, minutes: float, text: Callable[[list[Row]], str], about: dict[str, Any]
    ) -> None:
        self.rows: list[Row] = []
        self._suite, self._text, self._about = suite, text, about
        self._folder = folder or result_folder(suite)
        self._ends = time.monotonic() + 60 * minutes

    @property
    def late(self) -> bool:
        """Whether no further case is to begin."""
        return time.monotonic() > self._ends

    def run(self, case: Case) -> Row:
        """Run a case, or say that the time was up; write."""
        reason = absent(way_named(case.way), accelerated=torch.accelerator.is_available())
        if reason is not None:
            row = Row(case=case, status=reason)
        elif self.late:
            row = Row(case=case, status="not reached: the suite's time was up")
        else:
            row = run_in_process(case, limit_seconds=min(CASE_SECONDS, self._ends - time.monotonic() + 60))
        self.add(row)
        return row

    def run_all(self, cases: Iterable[Case]) -> None:
        """Run cases one after the other."""
        for case in cases:
            row = self.run(case)
            median = f"{summary(row.seconds)['median']:.3f} s" if row.seconds else ""
            print(
                f"{case.model} {case.tuning} {case.batch} x {case.tokens}  {case.way}: {row.status} {median}",
                flush=True,
            )

    def add(self, row: Row) -> None:
        """Take a row and write all that there are."""
        self.rows.append(row)
        result = {
            "suite": self._suite,
            "hardware": hardware(RESULTS),
            "device": device_name(),
            **self._about,
            "rows": [asdict(r) for r in self.rows],
        }
        write_result(self._folder, result, self._text(self.rows))

    def close(self) -> None:
        """Say where it was written."""
        print(f"written to {self._folder}")


def device_name() -> str:
    """Return what the cases ran on."""
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else str(torch.accelerator.current_accelerator() or "cpu")
    )


def table(rows: list[Row]) -> list[str]:
    """Return a table of rows, each beside the plain one of its model, tuning and length."""
    plain = {_key(r.case): r for r in rows if r.case.way == "plain" and r.seconds}
    lines = [
        "| model | tuning | sequences x tokens | way | step, s | ÷ plain | peak, MB | ÷ plain | out, MB | in, MB | "
        "status |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        case, beside = row.case, plain.get(_key(row.case))
        cells = [case.model, case.tuning, f"{case.batch} x {case.tokens}", case.way]
        if row.seconds:
            found = summary(row.seconds)
            base = summary(beside.seconds)["median"] if beside else 0.0
            cells += [
                f"{found['median']:.3f} ({found['q1']:.3f} to {found['q3']:.3f})",
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
