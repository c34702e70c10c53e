"""The rounds of a comparison of a recipe or a script.

[Note: a fair comparison]
Each child is a fresh process, so no mode profits from another's caches. A machine's speed drifts by more than the modes
differ, so the children of a round go in lockstep, each a step and then each the next, and steps of the same number are
compared: after each step a child waits for a byte on a pipe (``track.lockstep``). Where memory does not hold them all,
on an accelerator, with several processes, and as scripts (which may write the same files), they run one after the
other, and medians of a round are compared. The first round decides that for all: ordinary training, which needs most
memory, begins it. The order of modes rotates. Equal processes differ, too, and on some virtual machines the one that
starts first is slower (``is_first_slow``): of one round, ordinary training is better the mean of two runs, the first
and the last (``plain-again``). Memory is sampled by this process in the same way for all modes. Every child gets the
caller's environment unchanged. The steps before ``Auto`` has its plan are warm-up in every mode.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.base.errors import ConfigError, DataError, counted, nearest
from ebbtide.base.extras import check_installed
from ebbtide.base.runs import EVENTS_FILE, REPORT_FILE, SETTLING, SUMMARY_FILE
from ebbtide.cli.board import Board
from ebbtide.cli.children import SAMPLE_SECONDS, Ended
from ebbtide.cli.lockstep import StartOf, run_round
from ebbtide.cli.modes import MODES
from ebbtide.cli.progress import RunProgress, plain_console
from ebbtide.cli.signals import STOP_CODES, how_stopped, terminate_as_interrupt

_ALLOCATORS = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "OMP_NUM_THREADS")
"""Caller's environment variables that change memory or time: recorded, never set."""

DEFAULT_MODES = ("plain", "checkpointing", "ebbtide")
DEFAULT_STEPS = 10
"""Default steps of each child: four warm-up, five timed, one that measures activation memory."""

SCRIPT_STEPS = 12
"""Default steps of each run of a script: enough to time some after the first and the measured plans."""

MORE_FOR_MINIMAL = 4
"""Further steps by default where ``ebbtide-minimal`` compares its methods first."""


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """The result of a comparison.

    Attributes:
        out: The folder with ``summary.json``, ``report.html`` and the run folders.
        modes: One merged summary per mode.
        environment: Settings and versions common to all children.
        stopped: Why it ended early: ``"interrupted"`` (Ctrl-C), ``"terminated"`` (SIGTERM), or ``""``.
    """

    out: Path
    modes: list[dict[str, Any]]
    environment: dict[str, Any]
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """0; 1 if a child failed; 130 if interrupted; 143 if terminated."""
        if self.stopped:
            return STOP_CODES[self.stopped]
        return 1 if any(mode["status"] != "ok" for mode in self.modes) else 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The runs of a comparison.

    Attributes:
        modes: Keys of ``MODES``.
        rounds: How often each mode is run.
        out: The output folder.
        steps: Steps of each child; ``None``: not known in advance.
        of_script: They run a script, and may write the same files, so that no two go in lockstep.
    """

    modes: Sequence[str]
    rounds: int
    out: Path
    steps: int | None
    of_script: bool = False

    @property
    def flag(self) -> str:
        """The flag that sets the number of steps."""
        return "--steps" if self.of_script else "--max_steps"

    @property
    def orders(self) -> list[list[str]]:
        """The modes of each round, in run order; in the first, ordinary training begins."""
        modes = list(self.modes)
        begin = next((place for place, mode in enumerate(modes) if MODES[mode].ordinary), 0)
        places = [place % len(modes) for place in range(begin, begin + self.rounds)]
        return [[*modes[place:], *modes[:place]] for place in places]


def run_rounds(
    plan: Rounds,
    start: StartOf,
    environment: Mapping[str, Any],
    console: Any,
    *,
    refuse: Callable[[Ended], None] = lambda ended: None,
) -> CompareResult:
    """Run all children and write the results.

    Args:
        plan: The runs.
        start: Returns a child's command and environment.
        environment: Further fields of the result's environment.
        console: As ``plain_console`` returns it.
        refuse: Called with each finished child until one was accepted; raises to skip the others.

    Raises:
        DataError: The output folder cannot be made.
    """
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{plan.out} cannot be made ({error.strerror})"
        raise DataError(found, expected="a folder for the result", hint="name another with --out") from error
    warm_up = warm_up_steps()
    console.print(_counted_words(plan, warm_up))
    board = Board(out=plan.out, modes=tuple(plan.modes), console=console, warm_up=warm_up, flag=plan.flag)
    progress = RunProgress(console, runs=plan.rounds * len(plan.modes), steps=plan.steps)
    everywhere = {**_environment(plan), **environment}
    stopped = ""
    alone = True if plan.of_script else None

    def start_mode(mode: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        command, variables = start(mode, folder)
        return command, {**variables, **MODES[mode].variables}

    with terminate_as_interrupt():
        try:
            for number, order in enumerate(plan.orders, start=1):

                def add(mode: str, ended: Ended, number: int = number) -> None:
                    if not board.has_runs:
                        refuse(ended)
                    board.add(number, plan.rounds, mode, ended)

                alone = run_round(
                    f"round {number}", order, plan.out / f"round-{number}", start_mode, progress,
                    ended=add, alone=alone, report=console.print,
                )  # fmt: skip
        except KeyboardInterrupt as stop:
            stopped = how_stopped(stop)
            result = "the report has the finished runs" if board.has_runs else "none had finished: there is no report"
            hint = f"hint: to compare again, name another folder with --out, or remove {plan.out}"
            console.print(f"{stopped}: the processes were ended; {result}\n{hint}", style="yellow")
        finally:
            progress.end()
        modes_merged = board.finish(everywhere)
        return CompareResult(out=plan.out, modes=modes_merged, environment=everywhere, stopped=stopped)


def begin(plan: Rounds, *, extra: str) -> Any:
    """Check everything that can be checked before the slow imports, and announce the comparison.

    Args:
        plan: The runs.
        extra: The extra of ebbtide that has the packages for sampling, pictures and tables.

    Returns:
        A console to print on.

    Raises:
        ConfigError: A mode is unknown or repeated, or there are no rounds.
        DataError: The output folder holds a result, or cannot be made.
        EbbtideError: A package is not installed.
    """
    for package in ("rich", "psutil", "jinja2"):
        check_installed(package, extra=extra, use="`ebbtide compare`")
    _check_modes(plan.modes, plan.rounds)
    check_folder(plan.out)
    console = plain_console()
    announce(console, plan)
    return console


def warm_up_steps() -> int:
    """Return the number of warm-up steps in every mode: those that ``Auto`` needs for its plan, and its first ones."""
    from ebbtide.profiling.auto import MEASURED_STEPS

    return 1 + MEASURED_STEPS + SETTLING


def more_steps(modes: Sequence[str]) -> int:
    """Return how many steps more than usual a comparison takes by default."""
    return MORE_FOR_MINIMAL if "ebbtide-minimal" in modes else 0


def announce(console: Any, plan: Rounds) -> None:
    """Print the modes, and what is run how often."""
    runs = plan.rounds * len(plan.modes)
    each = "" if plan.steps is None else f" of {plan.steps} steps"
    lines = [
        f"{counted(len(plan.modes), 'mode')}, {counted(plan.rounds, 'round')} in turn: {counted(runs, 'run')}{each}, "
        "each in a fresh process."
    ]
    for name in plan.modes:
        mode = MODES[name]
        lines.append(f"  {name:<16} {(plan.of_script and mode.does_to_script) or mode.does}")
    lines.append("A run takes some 10 to 30 s to start; the total time is estimated after the first step.")
    for line in lines:
        console.print(line)


def check_folder(out: Path) -> None:
    """Check that the folder can be created and holds no result.

    The leftovers of a comparison that never trained are no result.

    Raises:
        DataError: It holds one, or cannot be made.
    """
    begun = any(out.glob(f"round-*/*/{EVENTS_FILE}"))
    other = next((name for name in (EVENTS_FILE, SUMMARY_FILE, REPORT_FILE) if (out / name).exists()), None)
    if begun or (other is not None and not any(out.glob("round-*"))):
        what, hint = "a comparison" if begun else f"a run ({other})", "name another with --out"
        if begun and not (out / REPORT_FILE).exists():
            what, hint = f"{what} without {REPORT_FILE}", f"{hint}, or remove it if no comparison runs there now"
        raise DataError(f"{out} already holds {what}", expected="a folder without one", hint=hint)
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        what = "is not writable" if parent.is_dir() else "is a file"
        raise DataError(
            f"{out} cannot be made: {parent} {what}",
            expected="a folder for the result",
            hint="name another with --out",
        )


def _check_modes(modes: Sequence[str], rounds: int) -> None:
    hint = f"such as --modes {','.join(DEFAULT_MODES)}"
    for mode in modes:
        if mode not in MODES:
            hint = nearest(mode, MODES) or hint
            raise ConfigError(f"unknown mode {mode!r}", expected=f"some of {', '.join(MODES)}", hint=hint)
    if not modes or len(set(modes)) != len(modes):
        raise ConfigError(f"modes are {', '.join(modes) or 'none'}", expected="each mode once", hint=hint)
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}", expected="1 or more", hint="3 rounds show the spread")


def _counted_words(plan: Rounds, warm_up: int) -> str:
    """Describe which steps count, or warn that there are too few."""
    if plan.steps is None or plan.steps >= warm_up + 2:
        return f"At least the first {warm_up} steps of every run warm up (Auto makes its plan) and count in no mode.\n"
    return (
        f"{plan.steps} steps are too few to measure Auto's plan, which starts after {warm_up - SETTLING}\n"
        f"hint: {plan.flag} {DEFAULT_STEPS}\n"
    )


def _environment(plan: Rounds) -> dict[str, Any]:
    own = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ALLOCATORS)}
    modes = {mode: MODES[mode].variables for mode in plan.modes if MODES[mode].variables}
    return {
        "variables": modes | ({"all": own} if own else {}),
        "rounds": plan.rounds,
        "orders": [" ".join(order) for order in plan.orders],
        "sample_seconds": SAMPLE_SECONDS,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
    }
