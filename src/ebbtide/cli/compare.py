"""``ebbtide compare``: the same few steps in fresh processes under several modes; see [Note: a fair comparison].

Recipes are switched by their flags (here), other scripts from outside (``compare_script``).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbtide.base.errors import ConfigError, nearest
from ebbtide.cli.compare_script import compare_script
from ebbtide.cli.modes import MODES
from ebbtide.cli.parsing import Parser, count, named_folder
from ebbtide.cli.recipe import RECIPES, check, names, read
from ebbtide.cli.rounds import (
    DEFAULT_MODES,
    DEFAULT_STEPS,
    MORE_FOR_MINIMAL,
    SCRIPT_STEPS,
    CompareResult,
    Rounds,
    begin,
    more_steps,
    run_rounds,
)
from ebbtide.cli.run import EXAMPLE, no_command, split, split_at_word

OWN_FLAGS = ("activation_cpu_offload", "gradient_checkpointing", "output_dir")
"""Flags that compare sets for each child."""

_LENGTHS = {"max_steps", "num_train_epochs", "trainer.total_training_steps"}
"""Fields, and a key of verl's that is translated into one, that set the number of steps."""

DEFAULT_RECIPE = "sft"


def compare(
    arguments: Sequence[str],
    *,
    recipe: str = DEFAULT_RECIPE,
    modes: Sequence[str] = DEFAULT_MODES,
    rounds: int = 3,
    out: Path,
) -> CompareResult:
    """Run a recipe under several modes and compare memory, time and losses.

    Args:
        arguments: The recipe's arguments, equal for all children; the flags of the mode follow them.
        recipe: The verb.
        modes: Keys of ``MODES``.
        rounds: How often each mode is run.
        out: The output folder; must not hold a comparison.

    Returns:
        The result, already written to ``out``, even after failed children or an interrupt.

    Raises:
        ConfigError: An unknown mode, a mode twice, no round, or arguments that set what the modes set.
        DataError: ``out`` already holds a comparison, or cannot be written.
        EbbtideError: The recipe refuses its arguments in one of the modes, or a package is not installed.
    """
    taken = sorted(names(recipe, arguments) & set(OWN_FLAGS))
    if taken:
        raise ConfigError(
            f"--{taken[0]} is set by compare",
            expected="the recipe's other flags",
            hint="choose modes with --modes, and compare's folder with --out",
        )
    config = read(recipe, arguments, others=("modes", "rounds", "out"))
    steps = config.max_steps if config.max_steps > 0 else None
    plan = Rounds(modes=modes, rounds=rounds, out=out, steps=steps)
    console = begin(plan, extra="recipes")
    if set_twice := [name for name in OWN_FLAGS if config.is_set(name)]:
        console.print(
            f"{', '.join(set_twice)}: compare sets these; their values in the file have no effect", style="yellow"
        )
    for mode in modes:  # before any child is started
        check(recipe, read(recipe, [*arguments, *_flags(recipe, mode, arguments, out / "round-1" / mode)]))

    def start(mode: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        flags = _flags(recipe, mode, arguments, folder)
        return [sys.executable, "-m", "ebbtide", recipe, *arguments, *flags], dict(os.environ)

    return run_rounds(plan, start, {"recipe": recipe, "arguments": list(arguments)}, console)


def _flags(recipe: str, mode: str, arguments: Sequence[str], folder: Path) -> list[str]:
    offload, checkpointing = (str(on).lower() for on in (MODES[mode].offload, MODES[mode].checkpointing))
    flags = ["--activation_cpu_offload", offload, "--gradient_checkpointing", checkpointing]
    flags += ["--output_dir", str(folder)]
    own = names(recipe, arguments)
    if "save" not in own:
        flags += ["--save", "false"]
    if recipe == "video" and "samples" not in own:
        flags += ["--samples", "0"]  # only training is compared
    return flags


def run(argv: Sequence[str]) -> int:
    """Compare as the arguments say: ``ebbtide compare [RECIPE] [--modes A,B] [--rounds N] [--out DIR] [recipe's own]``.

    A command follows ``--``: ``ebbtide compare [--steps N] -- python train.py``.

    Returns:
        The exit code: 0, 1 if a child failed, 130 if interrupted, 143 if terminated.

    Raises:
        ConfigError: As ``compare``; a flag of compare that cannot be read; or neither a recipe, nor a flag of one,
            nor a command.
        DataError: As ``compare``.
        TrainingError: As ``compare_script``.
    """
    rest, command = split(argv)
    is_script = len(rest) < len(argv)
    parser = _parser(next((word for word in rest if word in RECIPES), DEFAULT_RECIPE))
    own, arguments = (parser.read(rest), []) if is_script else parser.parse_known_args(rest)
    modes = [mode.strip() for mode in str(own.modes).split(",") if mode.strip()]
    out, rounds = named_folder("--out", own.out), count("--rounds", own.rounds)
    if is_script:
        steps = None if own.steps == "all" else count("--steps", own.steps or str(SCRIPT_STEPS + more_steps(modes)))
        return compare_script(command, modes=modes, rounds=rounds, steps=steps, out=out).exit_code
    is_named = bool(arguments) and not arguments[0].startswith("-")
    recipe = _recipe(arguments, split_at_word(rest)[0] if is_named else [])
    if own.steps is not None:
        hint = f"--max_steps {own.steps}"
        raise ConfigError("--steps is set, and there is no script", expected="-- and a command after it", hint=hint)
    if not is_named and not arguments:
        raise ConfigError(
            "there is nothing to compare",
            expected=f"one of {', '.join(RECIPES)}, or a command after --",
            hint=f"`ebbtide compare {DEFAULT_RECIPE} --max_steps {DEFAULT_STEPS}`, or `ebbtide compare {EXAMPLE}`",
        )
    has_file = bool(arguments) and not arguments[0].startswith("--") and not names(recipe, arguments[:1])
    if not has_file and _LENGTHS.isdisjoint(names(recipe, arguments)):
        arguments += ["--max_steps", str(DEFAULT_STEPS + more_steps(modes))]  # never a whole epoch by accident
    return compare(arguments, recipe=recipe, modes=modes, rounds=rounds, out=out).exit_code


def _parser(recipe: str) -> Parser:
    parser = Parser(
        prog="ebbtide compare",
        usage="%(prog)s [RECIPE] [file.yaml] [--modes A,B] [--rounds N]\n"
        "                       [--out DIR] [flags of the recipe]\n"
        "       %(prog)s [--modes A,B] [--rounds N] [--out DIR]\n"
        "                       [--steps N] -- COMMAND",
        description=f"The same few steps of a recipe ({', '.join(RECIPES)}), or of your own training script (such as "
        "`ebbtide compare -- python train.py`), in fresh processes under several modes. "
        f"All other arguments go to the recipe (see `ebbtide {recipe} --help`); without --max_steps, "
        f"--num_train_epochs or a file, each takes {_default(DEFAULT_STEPS)}.",
    )
    listed = f"some of {', '.join(MODES)} (default: %(default)s)"
    parser.add_argument("--modes", metavar="A,B", default=",".join(DEFAULT_MODES), help=listed)
    parser.add_argument("--rounds", metavar="N", default="3", help="how often each mode is run (default: %(default)s)")
    folder = "folder for the result (default: %(default)s)"
    parser.add_argument("--out", metavar="DIR", default="runs/compare", help=folder)
    steps = (
        f"of a script: end each run after so many steps of its optimizer, or all (default: {_default(SCRIPT_STEPS)})"
    )
    parser.add_argument("--steps", metavar="N", help=steps)
    return parser


def _default(steps: int) -> str:
    return f"{steps} steps, {steps + MORE_FOR_MINIMAL} with ebbtide-minimal"


def _recipe(rest: list[str], flags: Sequence[str]) -> str:
    """Remove the recipe's name from the front; default: the first recipe. ``flags``: compare's own before it."""
    if not rest or rest[0].startswith("-"):
        return DEFAULT_RECIPE
    if rest[0] in RECIPES:
        return rest.pop(0)
    path = Path(rest[0])
    if path.suffix == ".py" or (not path.exists() and shutil.which(rest[0])):
        others = f"one of {', '.join(RECIPES)}, or "
        raise no_command(f"{rest[0]!r} is no recipe", "compare", rest, flags=flags, others=others)
    if not path.suffix and not path.exists():
        raise ConfigError(
            f"there is no recipe {rest[0]!r}",
            expected=f"one of {', '.join(RECIPES)}, or a YAML file",
            hint=nearest(rest[0], RECIPES) or f"such as `ebbtide compare {DEFAULT_RECIPE} --max_steps {DEFAULT_STEPS}`",
        )
    return DEFAULT_RECIPE
