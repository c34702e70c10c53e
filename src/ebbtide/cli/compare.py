"""``ebbtide compare``: the same few steps in fresh processes under several modes.

[Note: a fair comparison]
Each child is a fresh process, so nothing warm is handed from one mode to the next. Modes take turns as first, second
and third over the rounds, and step times are compared within a round. Memory is watched from this process, the same
way for all modes, with the engine in them or without. Every child gets the caller's environment as it is: plain
training is plain as users have it. ``Auto`` makes its plan after some steps; these warm up, and count in no mode.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.extras import check_installed
from ebbtide.base.runs import EVENTS_FILE, SUMMARY_FILE
from ebbtide.cli.board import Board
from ebbtide.cli.children import OUTPUT_FILE, run_child
from ebbtide.cli.merge import spread_of
from ebbtide.cli.parsing import Parser, count
from ebbtide.cli.progress import RunProgress
from ebbtide.cli.recipe import RECIPES, check, read
from ebbtide.cli.signals import Terminated, terminate_as_interrupt

MODES: dict[str, tuple[str, str]] = {
    "plain": ("false", "false"),
    "checkpointing": ("false", "true"),
    "ebbtide": ("true", "false"),
    "ebbtide-minimal": ("true", "true"),
    "plain-malloc": ("false", "false"),
}
"""Each mode's values of ``--activation_cpu_offload`` and ``--gradient_checkpointing``."""

DOES: dict[str, str] = {
    "plain": "ordinary training",
    "checkpointing": "the trainer's own activation checkpointing",
    "ebbtide": "the default policy, Auto",
    "ebbtide-minimal": "the policy Minimal: checkpointing's memory or less",
    "plain-malloc": "ordinary training; glibc gives freed memory back at once",
}
"""What each mode is, in words."""

_ALLOCATORS = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "OMP_NUM_THREADS")
"""Variables of the caller's own that change memory or time: recorded, never set."""

VARIABLES: dict[str, dict[str, str]] = {
    "plain-malloc": {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"},
}
"""Environment variables of a mode, beside the caller's own; the other modes have none."""

Stopped = Literal["", "interrupted", "terminated"]

OWN_FLAGS = ("activation_cpu_offload", "gradient_checkpointing", "output_dir")
"""What compare sets for each child."""

DEFAULT_MODES = ("plain", "checkpointing", "ebbtide")
DEFAULT_RECIPE = "sft"
DEFAULT_STEPS = 7
"""Steps of each child when the arguments name neither steps, nor epochs, nor a file: three warm up, three are
timed, one measures activation memory."""


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """What a comparison found.

    Attributes:
        out: The folder with ``summary.json``, ``report.html`` and the run folders.
        modes: One merged summary a mode.
        environment: What was the same for all children.
        stopped: What ended it before all rounds were done: ``"interrupted"`` (Ctrl-C), ``"terminated"`` (SIGTERM).
    """

    out: Path
    modes: list[dict[str, Any]]
    environment: dict[str, Any]
    stopped: Stopped = ""

    @property
    def exit_code(self) -> int:
        """0; 1 if a child failed; 130 if interrupted; 143 if terminated."""
        if self.stopped:
            return 143 if self.stopped == "terminated" else 130
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
        DataError: ``out`` already holds a comparison, or cannot be written.
        EbbtideError: The recipe refuses its arguments in one of the modes.
    """
    check_installed("rich", extra="recipes", use="`ebbtide compare`")
    from rich.console import Console

    _check(arguments, modes, rounds, out)
    console = Console() if console is None else console
    config = None if command is not None else read(recipe, arguments, others=("modes", "rounds", "out"))
    steps = _steps(arguments, config)
    _announce(console, modes, rounds, steps)
    if set_twice := _set_twice(config):
        console.print(f"{', '.join(set_twice)}: compare sets these; what the file says has no effect", style="yellow")
    if config is not None:
        _check_recipe(recipe, arguments, modes, out)
    warm_up = warm_up_steps()
    console.print(_counted_words(steps, warm_up), markup=False, highlight=False, soft_wrap=True)
    command = [sys.executable, "-m", "ebbtide.cli", recipe] if command is None else list(command)
    orders = [[*modes[turn % len(modes) :], *modes[: turn % len(modes)]] for turn in range(rounds)]
    board = Board(out=out, modes=tuple(modes), console=console, warm_up=warm_up)
    environment = _environment(recipe, arguments, rounds, orders, modes, sample_seconds)
    progress = RunProgress(console, runs=rounds * len(modes), steps=steps, output=OUTPUT_FILE)
    stopped: Stopped = ""
    with terminate_as_interrupt():
        try:
            for turn, order in enumerate(orders, start=1):
                for mode in order:
                    folder = out / f"round-{turn}" / mode
                    progress.begin(f"round {turn}, {mode}", folder)
                    try:
                        ended = run_child(
                            [*command, *arguments, *_flags(recipe, mode, arguments, folder)],
                            folder,
                            environment={**os.environ, **VARIABLES.get(mode, {})},
                            sample_seconds=sample_seconds,
                            look=progress.look,
                        )
                    finally:
                        progress.end()
                    board.add(turn, rounds, mode, ended)
        except KeyboardInterrupt as stop:
            stopped = "terminated" if isinstance(stop, Terminated) else "interrupted"
            console.print(f"{stopped}: the process was ended; the report has the finished runs", style="yellow")
        modes_merged = board.finish(environment)
        return CompareResult(out=out, modes=modes_merged, environment=environment, stopped=stopped)


def warm_up_steps() -> int:
    """Return how many steps of a run do not count, in any mode: those that ``Auto`` needs for its plan."""
    from ebbtide.profiling.measured import MEASURED_STEPS

    return 1 + MEASURED_STEPS


def _announce(console: Any, modes: Sequence[str], rounds: int, steps: int | None) -> None:
    """Say what will be done, before anything is, imports that take seconds included."""
    runs = rounds * len(modes)
    each = "" if steps is None else f" of {steps} steps"
    lines = [
        f"{_times(len(modes), 'mode')}, {_times(rounds, 'round')} in turn: {_times(runs, 'run')}{each}, "
        "one after the other, each in a fresh process."
    ]
    lines += [f"  {mode:<16} {DOES[mode]}" for mode in modes]
    lines.append("A run takes some 10 to 30 s to start; the total time is estimated after the first step.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _counted_words(steps: int | None, warm_up: int) -> str:
    """Say which steps will count, or that there are too few."""
    if steps is None or steps >= warm_up + 2:
        return f"The first {warm_up} steps of every run warm up (Auto makes its plan) and count in no mode.\n"
    return (
        f"{steps} steps are too few to measure Auto's plan, which starts after {warm_up}\n"
        f"hint: --max_steps {DEFAULT_STEPS}\n"
    )


def _times(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _steps(arguments: Sequence[str], config: Any) -> int | None:
    """Return the steps of each child as the arguments or the recipe's config have them; ``None`` if they do not."""
    if config is not None:
        return config.max_steps if config.max_steps > 0 else None
    following = dict(itertools.pairwise([*arguments, ""]))
    named = following.get("--max_steps", "")
    return int(named) if named.isdigit() else None


def _flags(recipe: str, mode: str, arguments: Sequence[str], folder: Path) -> list[str]:
    offload, checkpointing = MODES[mode]
    flags = ["--activation_cpu_offload", offload, "--gradient_checkpointing", checkpointing]
    flags += ["--output_dir", str(folder)]
    if recipe in RECIPES and "save" not in _names(arguments):
        flags += ["--save", "false"]
    if recipe == "video" and "samples" not in _names(arguments):
        flags += ["--samples", "0"]  # what is compared is training
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
        hint = f"such as --modes {','.join(DEFAULT_MODES)}"
        raise ConfigError(f"modes are {', '.join(modes) or 'none'}", expected="each mode once", hint=hint)
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}", expected="1 or more", hint="3 rounds show the spread")
    taken = sorted(_names(arguments) & set(OWN_FLAGS))
    if taken:
        raise ConfigError(
            f"--{taken[0]} is set by compare",
            expected="the recipe's other flags",
            hint="choose modes with --modes, and compare's folder with --out",
        )
    _check_folder(out)


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds a result or cannot be made.

    A comparison no child of which came as far as training has left nothing to keep, and does not stand in the way.
    """
    begun = any(out.glob(f"round-*/*/{EVENTS_FILE}"))
    if begun or ((out / SUMMARY_FILE).exists() and not any(out.glob("round-*"))):
        what = "a comparison" if begun else f"a run ({SUMMARY_FILE})"
        raise DataError(f"{out} already holds {what}", expected="a folder without one", hint="name another with --out")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is not writable" if there.is_dir() else "is a file"
        raise DataError(
            f"{out} cannot be made: {there} {what}", expected="a folder for the result", hint="name another with --out"
        )


def _check_recipe(recipe: str, arguments: Sequence[str], modes: Sequence[str], out: Path) -> None:
    """Let the recipe refuse its arguments in each mode, before a child is started for them."""
    for mode in modes:
        check(recipe, read(recipe, [*arguments, *_flags(recipe, mode, arguments, out / "round-1" / mode)]))


def _set_twice(config: Any) -> list[str]:
    """Return the names that a file sets and that compare sets for each child."""
    if config is None:
        return []
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [name for name in OWN_FLAGS if getattr(config, name) != defaults[name]]


def _environment(
    recipe: str,
    arguments: Sequence[str],
    rounds: int,
    orders: Sequence[Sequence[str]],
    modes: Sequence[str],
    sample_seconds: float,
) -> dict[str, Any]:
    own = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ALLOCATORS)}
    return {
        "variables": {mode: VARIABLES[mode] for mode in modes if mode in VARIABLES} | ({"all": own} if own else {}),
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


def run(argv: Sequence[str]) -> int:
    """Compare as the arguments say: ``ebbtide compare [RECIPE] [--modes A,B] [--rounds N] [--out DIR] [recipe's own]``.

    Args:
        argv: The arguments after ``compare``.

    Returns:
        The exit code: 0, 1 if a child failed, 130 if interrupted, 143 if terminated.

    Raises:
        ConfigError: As ``compare``; or a flag of compare that cannot be read.
        DataError: As ``compare``.
    """
    rest = list(argv)
    recipe = _recipe(rest)
    parser = Parser(
        prog="ebbtide compare",
        usage="%(prog)s [RECIPE] [file.yaml] [--modes A,B] [--rounds N]\n"
        "                       [--out DIR] [flags of the recipe]",
        description=f"The same few steps of a recipe ({', '.join(RECIPES)}) in fresh processes under several modes. "
        f"All other arguments go to the recipe (see `ebbtide {recipe} --help`); without --max_steps, "
        f"--num_train_epochs or a file, each takes {DEFAULT_STEPS} steps.",
    )
    listed = f"some of {', '.join(MODES)} (default: %(default)s)"
    parser.add_argument("--modes", metavar="A,B", default=",".join(DEFAULT_MODES), help=listed)
    parser.add_argument("--rounds", metavar="N", default="3", help="how often each mode is run (default: %(default)s)")
    folder = "folder for the result (default: %(default)s)"
    parser.add_argument("--out", metavar="DIR", default="runs/compare", help=folder)
    try:
        own, arguments = parser.parse_known_args(rest)
    except SystemExit:  # --help has been printed
        return 0
    has_length = {"max_steps", "num_train_epochs"} & _names(arguments)
    if not has_length and not any(a.endswith((".yaml", ".yml")) for a in arguments):
        arguments += ["--max_steps", str(DEFAULT_STEPS)]  # a comparison is a few steps, never a whole epoch by accident
    modes = [mode.strip() for mode in str(own.modes).split(",") if mode.strip()]
    if not own.out.strip():
        raise ConfigError(f"--out is {own.out!r}", expected="a folder", hint="leave --out out for its default")
    rounds = count("--rounds", own.rounds)
    return compare(arguments, recipe=recipe, modes=modes, rounds=rounds, out=Path(own.out)).exit_code


def _recipe(rest: list[str]) -> str:
    """Take the recipe's name off the front; without one it is the first recipe."""
    if not rest or rest[0].startswith("-"):
        return DEFAULT_RECIPE
    if rest[0] in RECIPES:
        return rest.pop(0)
    path = Path(rest[0])
    if not path.suffix and not path.exists():
        raise ConfigError(
            f"there is no recipe {rest[0]!r}",
            expected=f"one of {', '.join(RECIPES)}, or a YAML file",
            hint=nearest(rest[0], RECIPES) or f"such as `ebbtide compare {DEFAULT_RECIPE} --max_steps {DEFAULT_STEPS}`",
        )
    return DEFAULT_RECIPE
