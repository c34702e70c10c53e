"""The command line: ``ebbtide VERB``.

[Note: a light start]
``ebbtide --help`` and ``ebbtide VERB --help`` import neither torch nor transformers: the module of a verb is imported
when the verb is called, and configs are plain dataclasses. Recipes are above this package, so they are reached by path.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from ebbtide.base.errors import (
    CapError,
    ConfigError,
    DiskError,
    DiskPathError,
    EbbtideError,
    ModifiedInPlaceError,
    RestoreError,
    TrainingError,
    nearest,
)
from ebbtide.base.extras import installed
from ebbtide.base.files import FULL_ERRNOS
from ebbtide.cli.signals import STOP_CODES, how_stopped, terminate_as_interrupt

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2

_RUN_FAILURES = (CapError, DiskError, ModifiedInPlaceError, RestoreError, TrainingError)
"""Errors of a valid command at run time; all others, and a disk path that cannot serve, are bad input."""

_NAME_ERRNOS = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of a name, whatever is done with it."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One verb of the command line: the function ``run`` of the module of its name, or of ``recipe``.

    Args:
        does: One line of help.
        is_recipe: Whether it trains by a recipe.
        prints: Whether it ends when its output is closed; all other verbs train.
    """

    does: str
    is_recipe: bool = False
    prints: bool = False


VERBS: dict[str, Verb] = {
    "sft": Verb(does="supervised fine-tuning of a language model (full, LoRA, QLoRA)", is_recipe=True),
    "grpo": Verb(does="reinforcement learning of a language model with rewards (GRPO)", is_recipe=True),
    "video": Verb(does="flow-matching fine-tuning and distillation of a video transformer", is_recipe=True),
    "run": Verb(does="your own training script with offloading, unedited"),
    "compare": Verb(does="the same few steps under several modes, in fresh processes"),
    "plan": Verb(does="predict whether training fits, from the model config alone", prints=True),
    "report": Verb(does="report.html and summary.json from a run folder", prints=True),
    "doctor": Verb(does="benchmark this machine and diagnose problems", prints=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments after the program's name; ``None``: those of the process.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted, 143 terminated.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    try:
        with terminate_as_interrupt():
            code = _call(arguments)
            _flush()  # raise a closed pipe's error here, not at interpreter exit
            return code
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):
            raise  # of another pipe or socket, such as a tracker's
        _discard_output()
        if not _only_prints(arguments):
            raise
        return 0  # `ebbtide --help | head -1`
    except KeyboardInterrupt as stop:
        print(how_stopped(stop), file=sys.stderr)
        return STOP_CODES[how_stopped(stop)]
    except EbbtideError as error:
        print(f"error: {error}", file=sys.stderr)
        failed = isinstance(error, _RUN_FAILURES) and not isinstance(error, DiskPathError)
        return EXIT_FAILED if failed else EXIT_BAD_INPUT
    except OSError as error:
        if error.errno in (*_NAME_ERRNOS, errno.EACCES) and error.filename is not None:
            what = "may not be used" if error.errno == errno.EACCES else "is no file's name"
            print(f"error: {os.fsdecode(error.filename)!r} {what} ({error.strerror})", file=sys.stderr)
            print("hint: check the names and permissions of files and folders in the command", file=sys.stderr)
            return EXIT_BAD_INPUT
        if error.errno not in FULL_ERRNOS:
            raise
        print(f"error: {_unwritten(error)} cannot be written ({error.strerror})", file=sys.stderr)
        print("hint: free some space there, or name a folder on another disk", file=sys.stderr)
        return EXIT_FAILED


def _flush() -> None:
    if sys.stdout is not None:  # as where a scheduler closes it
        sys.stdout.flush()


def _discard_output() -> None:
    """Discard what the buffer of standard output holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(error: OSError) -> str:
    """Return the name of what a full disk could not take; what standard output still holds is discarded then."""
    if error.filename is not None:
        return os.fsdecode(error.filename)
    try:
        _flush()
    except OSError:
        _discard_output()
    return "standard output, or a file,"


def _print_anything() -> None:
    """Replace characters that the terminal's encoding lacks, and bytes of arguments that are no characters."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and sys.stdout.errors in ("strict", "surrogateescape"):
        reconfigure(errors="replace")


def _only_prints(arguments: Sequence[str]) -> bool:
    verb = VERBS.get(arguments[0]) if arguments else None
    return verb is None or verb.prints or not {"-h", "--help"}.isdisjoint(arguments)


def _call(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        _overview(sys.stdout if arguments else sys.stderr)
        return 0 if arguments else EXIT_BAD_INPUT
    if arguments[0] == "--version":
        print(installed("ebbtide") or "unknown (not installed)")
        return 0
    try:
        return _function(arguments[0])(arguments[1:])
    except SystemExit as end:
        if end.code:
            raise
        if any(argument == "--help" or argument.startswith("-h") for argument in arguments):
            return 0  # it has been printed
        raise TrainingError(
            f"exit({end.code!r}) was called during `ebbtide {arguments[0]}`, which had not finished",
            expected="code that returns, or raises an error",
            hint="look for sys.exit() in your own functions and in the packages that they import",
        ) from end


def _function(name: str) -> Callable[[Sequence[str]], int]:
    """Import and return the function behind a verb."""
    verb = VERBS.get(name)
    if verb is None:
        raise ConfigError(
            f"there is no verb {name!r}",
            expected="one of " + ", ".join(VERBS),
            hint=nearest(name, (*VERBS, "--help", "--version")) or "`ebbtide --help` describes each",
        )
    module = importlib.import_module(f"ebbtide.cli.{'recipe' if verb.is_recipe else name}")
    return partial(module.run, name) if verb.is_recipe else module.run


def _overview(stream: TextIO) -> None:
    """Print what ``ebbtide --help`` shows."""
    lines = ["usage: ebbtide VERB [file.yaml] [--flag value ...]", "", "verbs:"]
    lines += [f"  {name:<9}{verb.does}" for name, verb in VERBS.items()]
    lines += ["", "`ebbtide VERB --help` lists the flags of a verb.", "`ebbtide --version` prints the version."]
    print("\n".join(lines), file=stream)
