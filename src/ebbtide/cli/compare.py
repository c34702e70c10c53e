"""``ebbtide compare``: the same few steps in fresh processes under several modes.

[Note: a fair comparison]
Each child is a fresh process, so nothing warm is handed from one mode to the next. Modes take turns as first, second
and third over the rounds, and step times are compared within a round. Memory is watched from this process, the same
way for all modes, with the engine in them or without. All children get the same environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.runs import REPORT_FILE, SCHEMA, SUMMARY_FILE
from ebbtide.cli.children import Ended, run_child
from ebbtide.cli.merge import latest_whole_round, merge, spread_of
from ebbtide.cli.parsing import Parser
from ebbtide.report import Run, html, load_run
from ebbtide.report.table import headline, measured, number, size
from ebbtide.track import write_summary

MODES: dict[str, tuple[str, str]] = {
    "plain": ("false", "false"),
    "checkpointing": ("false", "true"),
    "ebbtide": ("true", "false"),
    "ebbtide-minimal": ("true", "true"),
}
"""Each mode's values of ``--activation_cpu_offload`` and ``--gradient_checkpointing``."""

DEFAULT_MODES = ("plain", "checkpointing", "ebbtide")
RECIPES = ("sft",)
DEFAULT_STEPS = 4
"""Steps of each child when the arguments name neither steps, nor epochs, nor a file."""

VARIABLES = {
    # glibc raises its mmap threshold, up to 32 MiB, whenever a larger block is freed, and keeps what lies below it: the
    # resident size then tells what a process once used and not what it uses. A fixed one lets freed tensors leave.
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    # Memory that comes fresh from the kernel is cleared page by page; huge pages make that cheap, in every mode alike.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""What every child finds in its environment, unless the caller's own says otherwise."""


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """What a comparison found.

    Attributes:
        out: The folder with ``summary.json``, ``report.html`` and the run folders.
        modes: One merged summary a mode.
        environment: What was the same for all children.
        interrupted: It was ended before all rounds were done.
    """

    out: Path
    modes: list[dict[str, Any]]
    environment: dict[str, Any]
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0; 1 if a child failed; 130 if interrupted."""
        if self.interrupted:
            return 130
        return 1 if any(mode["status"] != "ok" for mode in self.modes) else 0


def compare(
    arguments: Sequence[str],
    *,
    recipe: str = "sft",
    modes: Sequence[str] = DEFAULT_MODES,
    rounds: int = 3,
    out: Path,
    sample_seconds: float = 0.005,
    command: Sequence[str] | None = None,
    console: Any = None,
) -> CompareResult:
    """Run a recipe under several modes and compare memory, time and losses.

    Args:
        arguments: The recipe's arguments, the same for all children; the flags of the mode come after them.
        recipe: The verb.
        modes: Keys of ``MODES``.
        rounds: How often each mode is run.
        out: The folder for everything; must not hold a comparison.
        sample_seconds: Time between two memory samples.
        command: What starts a child, in place of this Python and ``-m ebbtide.cli RECIPE``.
        console: A rich console; the terminal's if ``None``.

    Returns:
        The result, already written to ``out``; also when children failed or the user interrupted.

    Raises:
        ConfigError: An unknown mode, a mode twice, no round, or arguments that set what the modes set.
        DataError: ``out`` already holds a comparison.
    """
    from rich.console import Console

    _check(arguments, modes, rounds, out)
    console = Console() if console is None else console
    command = [sys.executable, "-m", "ebbtide.cli", recipe] if command is None else list(command)
    orders = [[*modes[turn % len(modes) :], *modes[: turn % len(modes)]] for turn in range(rounds)]
    variables = {name: os.environ.get(name, value) for name, value in VARIABLES.items()}
    board = _Board(out=out, modes=tuple(modes), console=console)
    environment = _environment(recipe, arguments, rounds, orders, variables, sample_seconds)
    interrupted = False
    try:
        with _terminate_as_interrupt():
            for turn, order in enumerate(orders, start=1):
                for mode in order:
                    folder = out / f"round-{turn}" / mode
                    with console.status(f"round {turn} of {rounds}: {mode}"):
                        ended = run_child(
                            [*command, *arguments, *_flags(recipe, mode, arguments, folder)],
                            folder,
                            environment={**os.environ, **variables},
                            sample_seconds=sample_seconds,
                        )
                    board.add(turn, rounds, mode, ended)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: the child was ended; what is finished is reported", style="yellow")
    return board.finish(environment, interrupted=interrupted)


class _Board:
    """Collects what the children left, says so, and writes the result."""

    def __init__(self, *, out: Path, modes: Sequence[str], console: Any) -> None:
        self._out, self._modes, self._console = out, modes, console
        self._rounds: dict[int, dict[str, Run]] = {}
        self._failures: dict[str, list[str]] = {}

    def add(self, turn: int, rounds: int, mode: str, ended: Ended) -> None:
        """Read a child's folder and print its line."""
        head = f"round {turn} of {rounds}  {mode:<16}"
        problem, run = _read(mode, ended)
        if run is None:
            self._failures.setdefault(mode, []).append(f"round {turn}: {problem}")
            self._console.print(f"{head}failed: {problem}", style="red", highlight=False, markup=False, soft_wrap=True)
            self._console.print(ended.tail, markup=False, highlight=False, style="dim", soft_wrap=True)
            return
        self._rounds.setdefault(turn, {})[mode] = run
        view = measured(run.summary)
        said = [
            f"{ended.seconds:.1f} s",
            f"peak {size(view.get('peak_bytes'))}",
            f"activations {size(view.get('activation_bytes'))}",
            f"step {number(run.summary.get('step_seconds_median'), '{:.3f} s')}",
        ]
        self._console.print(head + "  ".join(said), highlight=False, markup=False, soft_wrap=True)

    def finish(self, environment: dict[str, Any], *, interrupted: bool) -> CompareResult:
        """Merge, write ``summary.json`` and ``report.html``, print the table."""
        summaries = {turn: {mode: run.summary for mode, run in by.items()} for turn, by in self._rounds.items()}
        modes = merge(summaries, self._modes, self._failures)
        result = CompareResult(out=self._out, modes=modes, environment=environment, interrupted=interrupted)
        written = {"schema": SCHEMA, "modes": modes, "environment": environment}
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / SUMMARY_FILE).write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
        shown = latest_whole_round(self._rounds, self._modes)
        if shown:
            html(shown, self._out / REPORT_FILE, comparison=written)
            self._print(modes)
        return result

    def _print(self, modes: Sequence[Mapping[str, Any]]) -> None:
        from rich.table import Table

        strings = headline(modes, [str(mode["mode"]) for mode in modes])
        # What a narrow terminal has no room for stands in report.html.
        dropped = {"step", "tokens / s", "stall"} if self._console.width < 110 else set[str]()
        shown = [index for index, head in enumerate(strings.columns) if head not in dropped]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for index in shown:
            head = strings.columns[index].replace(" memory", "\nmemory").replace(" / ", "\n/ ")
            table.add_column(head, justify="left" if index == 0 else "right", no_wrap=True)
        for row in strings.rows:
            cells = [row[index] for index in shown]
            table.add_row(*cells, style="bold" if row[0].startswith("ebbtide") else None)
        self._console.print()
        self._console.print(table)
        self._console.print(f"\n{self._out / REPORT_FILE}", markup=False, highlight=False, soft_wrap=True)


def _read(mode: str, ended: Ended) -> tuple[str, Run | None]:
    """Read a child's run folder; a problem in words if it did not end well."""
    try:
        # Once more, now that the outside samples are complete: the child wrote its own before it ended.
        summary = write_summary(ended.folder)
        run = dataclasses.replace(load_run(ended.folder), name=mode)
    except DataError as error:
        return (f"exit code {ended.code}" if ended.code else str(error)), None
    if ended.code or summary["status"] != "ok":
        return f"exit code {ended.code}, {run.error or summary['status']}", None
    return "", run


def _flags(recipe: str, mode: str, arguments: Sequence[str], folder: Path) -> list[str]:
    offload, checkpointing = MODES[mode]
    flags = ["--activation_cpu_offload", offload, "--gradient_checkpointing", checkpointing]
    flags += ["--output_dir", str(folder)]
    if recipe in RECIPES and "save" not in _names(arguments):
        flags += ["--save", "false"]
    return flags


def _names(arguments: Sequence[str]) -> set[str]:
    return {a[2:].partition("=")[0].replace("-", "_") for a in arguments if a.startswith("--")}


def _check(arguments: Sequence[str], modes: Sequence[str], rounds: int, out: Path) -> None:
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(
                f"unknown mode {mode!r}", expected=f"some of {', '.join(MODES)}", hint=nearest(mode, MODES)
            )
    if not modes or len(set(modes)) != len(modes):
        raise ConfigError(f"modes are {', '.join(modes) or 'none'}", expected="each mode once")
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}", expected="1 or more")
    taken = sorted(_names(arguments) & {"activation_cpu_offload", "gradient_checkpointing", "output_dir"})
    if taken:
        raise ConfigError(
            f"--{taken[0]} is given for the recipe",
            expected="compare to set it for each child",
            hint="choose modes with --modes, and compare's folder with --out",
        )
    if (out / SUMMARY_FILE).exists() or any(out.glob("round-*")):
        raise DataError(
            f"{out} already holds a comparison", expected="a folder without one", hint="name another with --out"
        )


def _environment(
    recipe: str,
    arguments: Sequence[str],
    rounds: int,
    orders: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    sample_seconds: float,
) -> dict[str, Any]:
    return {
        "variables": dict(variables),
        "recipe": recipe,
        "arguments": list(arguments),
        "rounds": rounds,
        "orders": [" ".join(order) for order in orders],
        "sample_seconds": sample_seconds,
        "spread": spread_of(rounds),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
    }


@contextmanager
def _terminate_as_interrupt() -> Generator[None, None, None]:
    """Treat SIGTERM like Ctrl-C meanwhile: by its default it would leave a child behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(argv: Sequence[str]) -> int:
    """Compare as the arguments say: ``ebbtide compare [RECIPE] [--modes A,B] [--rounds N] [--out DIR] [recipe's own]``.

    Args:
        argv: The arguments after ``compare``.

    Returns:
        The exit code: 0, 1 if a child failed, 130 if interrupted.

    Raises:
        ConfigError: As ``compare``; or a flag of compare that cannot be read.
        DataError: As ``compare``.
    """
    rest = list(argv)
    recipe = rest.pop(0) if rest and rest[0] in RECIPES else RECIPES[0]
    parser = Parser(
        prog="ebbtide compare",
        usage=f"%(prog)s [{'|'.join(RECIPES)}] [file.yaml] [--modes A,B] [--rounds N] [--out DIR] [--flag value ...]",
        description="The same few steps of a recipe in fresh processes under several modes. "
        f"Every other argument goes to the recipe (see `ebbtide {recipe} --help`); without --max_steps, "
        f"--num_train_epochs or a file, each takes {DEFAULT_STEPS} steps.",
        allow_abbrev=False,
    )
    parser.add_argument("--modes", default=",".join(DEFAULT_MODES), help=f"some of {', '.join(MODES)}; %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="how often each mode is run; %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder for the result; %(default)s")
    try:
        own, arguments = parser.parse_known_args(rest)
    except SystemExit:  # --help has been printed
        return 0
    has_length = {"max_steps", "num_train_epochs"} & _names(arguments)
    if not has_length and not any(a.endswith((".yaml", ".yml")) for a in arguments):
        arguments += ["--max_steps", str(DEFAULT_STEPS)]  # a comparison is a few steps, never a whole epoch by accident
    modes = [mode.strip() for mode in str(own.modes).split(",") if mode.strip()]
    return compare(arguments, recipe=recipe, modes=modes, rounds=own.rounds, out=own.out).exit_code
