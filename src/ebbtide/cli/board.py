"""Collect the results of a comparison's runs, print them, and write the summary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.base.errors import DataError, counted
from ebbtide.base.files import write_text
from ebbtide.base.runs import REPORT_FILE, SCHEMA, SETTLING, SUMMARY_FILE
from ebbtide.cli.children import Ended
from ebbtide.cli.merge import in_lockstep, latest_complete_round, merge, spread_of
from ebbtide.cli.modes import MODES
from ebbtide.report import Run, load_run, page, splits_of, verdicts, warnings
from ebbtide.report.table import ABSENT, headline, measured, number, size
from ebbtide.report.verdict import LEAST_TIMED
from ebbtide.track import write_summary
from ebbtide.track.steady import steps_before_plan
from ebbtide.track.summary import record_failure

_WIDEST = 1000
"""More characters than a table of all modes has in a line."""

_LEAST_COUNTED = 2
"""Steps that always count, however late a plan was made: a timed one and the trimmed one."""


class Board:
    """Collects and prints the children's results, and writes the summary.

    Args:
        out: The comparison's folder.
        modes: In display order.
        console: As ``plain_console`` returns it.
        warm_up: Steps of each child that do not count.
        flag: The flag that sets the number of steps.
    """

    def __init__(
        self, *, out: Path, modes: Sequence[str], console: Any, warm_up: int, flag: str = "--max_steps"
    ) -> None:
        self._flag = flag
        self._out, self._modes, self._console, self._warm_up = out, modes, console, warm_up
        self._rounds: dict[int, dict[str, Run]] = {}
        self._failures: dict[str, list[str]] = {}

    @property
    def has_runs(self) -> bool:
        """Whether a run has succeeded."""
        return bool(self._rounds)

    def add(self, index: int, rounds: int, mode: str, ended: Ended) -> None:
        """Read a child's folder and print its line."""
        head = f"round {index} of {rounds}  {mode:<16}"
        problem, run = _read(mode, ended, self._warm_up)
        if run is None:
            self._failures.setdefault(mode, []).append(f"round {index}: {problem}")
            self._console.print(f"{head}failed: {problem}", style="red")
            self._console.print(ended.tail, style="dim")
            return
        self._rounds.setdefault(index, {})[mode] = run
        view = measured(run.summary)
        lines = [
            f"{ended.seconds:.1f} s",
            f"peak {size(view.get('peak_bytes'))}",
            f"activations {size(view.get('activation_bytes'))}",
            f"step {number(run.summary.get('step_seconds_median'), '{:.3f} s')}",
        ]
        self._console.print(head + "  ".join(lines))

    def _spread(self) -> str:
        rounds = [[run.summary for run in by_mode.values()] for by_mode in self._rounds.values()]
        if rounds and all(in_lockstep(*summaries) for summaries in rounds):
            return spread_of(sum(len(summaries[0]["step_seconds"]) for summaries in rounds), "step")
        return spread_of(len(rounds))

    def finish(self, environment: dict[str, Any]) -> list[dict[str, Any]]:
        """Merge, write ``summary.json`` and ``report.html``, print the table; return one summary per mode.

        Args:
            environment: Settings common to all children; ``spread`` is added.
        """
        late = self._wait_for_plans()
        environment["spread"] = self._spread()
        summaries = {index: {mode: run.summary for mode, run in by.items()} for index, by in self._rounds.items()}
        modes = merge(summaries, self._modes, self._failures)
        equal = self._compare_parameters(modes)
        written = {"schema": SCHEMA, "modes": modes, "environment": environment}
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / SUMMARY_FILE).write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
        shown = latest_complete_round(self._rounds, self._modes)
        if shown:
            write_text(self._out / REPORT_FILE, page(shown, comparison=written))
            self.print_table(modes)
            self._console.print("")
            words = verdicts({mode["mode"]: mode for mode in modes}, splits_of(shown))
            for line in [*_counted(shown), *late, *equal, *words, *warnings(shown)]:
                self._console.print(line)
            self._console.print(f"\n{self._out / REPORT_FILE}")
        return modes

    def _wait_for_plans(self) -> list[str]:
        """Exclude the steps before the last plan of any run from every run; report plans that came too late."""
        runs = [run for by_mode in self._rounds.values() for run in by_mode.values()]
        made = max((steps_before_plan(run.events) for run in runs), default=0)
        settled = made + SETTLING
        if settled <= self._warm_up:
            return []
        steps = min(int(run.summary["steps"]) for run in runs)
        # A plan that came too late to be timed is no reason to time fewer steps.
        counted_steps = _LEAST_COUNTED if settled <= steps - _LEAST_COUNTED else 1 + LEAST_TIMED
        warm_up = max(self._warm_up, min(settled, steps - counted_steps))
        if warm_up > self._warm_up:
            self._warm_up = warm_up
            for by_mode in self._rounds.values():
                for mode, run in by_mode.items():
                    summary = write_summary(run.folder, warm_up=warm_up)
                    by_mode[mode] = dataclasses.replace(run, summary=summary)
        last = f"The last plan was made after step {made}"
        if made > warm_up:
            return [f"{last}, so some of the counted steps ran under another one; use a larger {self._flag}."]
        timed = min(int(run.summary["timed_steps"]) for by_mode in self._rounds.values() for run in by_mode.values())
        if timed >= LEAST_TIMED:
            return []
        return [f"{last}, which left {counted(timed, 'step')} of each run to time; use a larger {self._flag}."]

    def _compare_parameters(self, modes: list[dict[str, Any]]) -> list[str]:
        """Compare the trained parameters with those of plain, and runs of ordinary training with each other.

        If ordinary training is not deterministic, losses and parameters cannot be compared.

        Returns:
            The result in words.
        """
        ordinary = [mode for mode in MODES if MODES[mode].ordinary and mode in self._modes]
        losses = [by[mode].summary["loss"] for by in self._rounds.values() for mode in ordinary if mode in by]
        sums = {
            mode: [
                event["checksum"] for by in self._rounds.values() if mode in by for event in by[mode].all("parameters")
            ]
            for mode in self._modes
        }
        plain = [checksum for mode in ordinary for checksum in sums[mode]]
        if len(set(plain)) > 1 or any(values != losses[0] for values in losses):
            for mode in modes:
                mode["loss_equal"] = mode["parameters_equal"] = None
            return [
                f"Training is not deterministic: runs of {' and '.join(ordinary)} differ from one another, so losses "
                "and parameters are not compared.\nhint: set all seeds (torch, numpy, data loader workers), and choose "
                "deterministic kernels: torch.use_deterministic_algorithms(True)"
            ]
        if not sums.get("plain"):
            return []
        for mode in modes:
            own = sums[mode["mode"]]
            mode["parameters_equal"] = all(each == plain[0] for each in own) if own else None
        differing = [mode["mode"] for mode in modes if mode["parameters_equal"] is False]
        compared = [mode["mode"] for mode in modes if mode["parameters_equal"] and mode["mode"] != "plain"]
        if not differing:
            names = "all runs" if len(compared) == len(modes) - 1 else f"plain, {', '.join(compared)}"
            return [f"Trained parameters after the last step: bitwise equal in {names}."] if compared else []
        doubt = " (or plain differs from itself: a larger --rounds shows it)" if len(plain) == 1 else ""
        return [f"Trained parameters after the last step differ from plain's: {', '.join(differing)}{doubt}."]

    def print_table(self, modes: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of the modes."""
        from rich.segment import Segment, Segments
        from rich.table import Table

        strings = headline({mode["mode"]: mode for mode in modes})
        # report.html has the columns that do not fit a narrow terminal.
        dropped = {"step", "tokens / s", "stall"} if self._console.width < 110 else set[str]()
        # A script's tokens are not known: a column without a figure says nothing.
        dropped |= {
            head for index, head in enumerate(strings.columns) if all(row[index] == ABSENT for row in strings.rows)
        }
        shown = [index for index, head in enumerate(strings.columns) if head not in dropped]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for index in shown:
            head = strings.columns[index].replace(" memory", "\nmemory").replace(" / ", "\n/ ")
            table.add_column(head, justify="left" if index == 0 else "right", no_wrap=True)
        for row in strings.rows:
            cells = [row[index] for index in shown]
            table.add_row(*cells, style="bold" if row[0].startswith("ebbtide") else None)
        self._console.print("")
        wide = self._console.options.update(width=_WIDEST)
        natural = wide.update(width=self._console.measure(table, options=wide).maximum)
        for line in self._console.render_lines(table, natural, pad=False):
            self._console.print(Segments([*line, Segment.line()]))  # figures that a narrow terminal cut had no meaning


def _counted(runs: Sequence[Run]) -> list[str]:
    """Return which steps count, in words, if they are the same in all runs."""
    counts = {(run.summary["warm_up_steps"], run.summary["steps"], run.summary["timed_steps"]) for run in runs}
    if len(counts) != 1:
        return []
    warm_up, steps, timed = counts.pop()
    trimmed = any(run.all("trim") for run in runs) and steps - warm_up > timed
    text = f"The first {warm_up} of {steps} steps warm up and do not count."
    if trimmed:
        times = f"times in the other {timed}" if timed > 1 else f"the step time in step {steps - 1}"
        text += f" Activation memory is measured in step {steps}, {times}."
    return [text]


def _read(mode: str, ended: Ended, warm_up: int) -> tuple[str, Run | None]:
    """Read a child's run folder; also return a problem in words if it failed."""
    try:
        # Summarize again: the child wrote its summary before the outside samples were complete.
        summary = write_summary(ended.folder, warm_up=warm_up)
        run = dataclasses.replace(load_run(ended.folder), name=mode)
    except DataError as error:
        return (ended.how if ended.code else str(error)), None
    if ended.code or summary["status"] != "ok":
        after = "after its last step" if summary["status"] == "ok" else summary["status"]
        record_failure(ended.folder, ended.how)  # for `ebbtide report`, which reads the folder alone
        return f"{ended.how}, {run.error or after}", None
    return "", run
