"""``ebbtide run -- COMMAND``: an unedited training script, with activation offloading.

[Note: a command's end]
The command keeps its terminal, exit code and signals: Ctrl-C reaches it from the keyboard, others are forwarded, and
those that this process ignores stay ignored. This process only waits. At the end one line reports the offloaded bytes,
or why nothing was offloaded.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ebbtide.base.errors import ConfigError, DataError, counted, nearest
from ebbtide.base.runs import EVENTS_FILE, Event, check_results, of_kind, only_writer, put_record_aside
from ebbtide.base.units import format_size
from ebbtide.cli.parsing import Parser, count, named_folder
from ebbtide.cli.signals import handled
from ebbtide.cli.starting import signal_words, started, wait_for
from ebbtide.config import MIN_BYTES, POLICIES, policy_named
from ebbtide.planner.table import load_plan
from ebbtide.script.request import Request, read_notes, remove_notes, why_uncounted, why_untrained

EXAMPLE = "-- python train.py"
_OF_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
_HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Schedulers announce the end of a job with SIGUSR1 or SIGUSR2, as `sbatch --signal` and submitit do."""

_NOT_HANDED_ON = (signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""A shell names these, if it starts the command itself."""

_KNOWN = ("python", "python3", "torchrun", "accelerate")
_ELSEWHERE = ("srun", "salloc", "mpirun", "mpiexec", "ssh", "pdsh")
"""Programs that start their command on other machines."""


def run(argv: Sequence[str]) -> int:
    """Run a command with offloading: ``ebbtide run [--policy P] [--disk_path DIR] [--out DIR] [--steps N] -- COMMAND``.

    Returns:
        The command's exit code; 128 and the signal's number if one ended it.

    Raises:
        ConfigError: No command, one that does not exist, or a flag that cannot be read.
        DataError: ``--out`` cannot be created, holds a comparison, or another run writes into it; the plan file cannot
            be read.
        DiskError: ``--disk_path`` cannot hold offloaded bytes.
    """
    parser = Parser(
        prog="ebbtide run",
        usage="%(prog)s [--policy NAME] [--disk_path DIR] [--out DIR]\n                   [--steps N] -- COMMAND",
        description="Run a training script, or a launcher of one (torchrun, accelerate launch), as it is: the first "
        f"model that it trains is offloaded. Such as `ebbtide run {EXAMPLE}`.",
    )
    policies = f"{', '.join(POLICIES)}, or a plan file (default: auto)"
    parser.add_argument("--policy", metavar="NAME", help=policies)
    parser.add_argument("--disk_path", metavar="DIR", help="directory for the disk tier")
    parser.add_argument("--out", metavar="DIR", help="record the run into this folder, for `ebbtide report`")
    parser.add_argument("--steps", metavar="N", help="end the script after so many steps of its optimizer")
    flags, command = split(argv)
    words = parser.parse_known_args(flags)[1]
    if words and not command and not words[0].startswith("-"):
        before, command = split_at_word(flags)
        raise no_command(f"there is no -- before {command[0]!r}", "run", command, flags=before)
    own = parser.read(flags)
    check_command(command, verb="run")
    out_folder = None if own.out is None else named_folder("--out", own.out)
    disk_folder = None if own.disk_path is None else named_folder("--disk_path", own.disk_path)
    policy = _policy(own.policy)
    steps = None if own.steps is None else count("--steps", own.steps)
    disk_path = None if disk_folder is None else _directory(disk_folder, command[0])
    with contextlib.ExitStack() as claimed:
        out = None if out_folder is None else _folder(out_folder, claimed)
        folder = claimed.enter_context(tempfile.TemporaryDirectory(prefix="ebbtide-", ignore_cleanup_errors=True))
        request = Request(
            mode="ebbtide", folder=str(out or folder), record=out is not None, steps=steps,
            policy=policy, disk_path=disk_path,
        )  # fmt: skip
        code = _wait_for(command, request.environment(os.environ))
        if code - 128 in _NOT_HANDED_ON:
            print(f"ebbtide: the command was ended by {signal_words(code - 128)}", file=sys.stderr)
        for line in _ending(read_notes(Path(request.folder)), code):
            print(line, file=sys.stderr)
    if out is not None and (out / EVENTS_FILE).exists():
        if code:
            from ebbtide.track.summary import record_failure

            record_failure(out, f"exit code {code}")
        print(f"ebbtide: `{shlex.join(['ebbtide', 'report', str(out)])}` draws the run", file=sys.stderr)
    return code


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments at the first ``--``: a verb's own flags, and the command."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def split_at_word(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments at the first word that is no flag and no flag's value; each flag before it takes one."""
    at = 0
    while argv[at].startswith("-"):
        at += 1 if "=" in argv[at] else 2
    return list(argv[:at]), list(argv[at:])


def check_command(command: Sequence[str], *, verb: str) -> None:
    """Check that a verb's command can be started.

    Raises:
        ConfigError: There is no command, or no such program.
    """
    if not command or not command[0].strip():
        hint = f"such as `ebbtide {verb} {EXAMPLE}`"
        raise ConfigError("there is no command", expected="a command after --", hint=hint)
    program = command[0]
    if shutil.which(program) is not None:
        return
    if program.endswith(".py") and Path(program).exists():
        raise no_command(f"{program!r} is no program: it is a Python file", verb, command)
    if program in _KNOWN:
        hint = f"{program} is not on PATH: activate the environment that has it, or write its path"
    else:
        hint = nearest(program, _KNOWN)
    raise ConfigError(
        f"{program!r} is no program",
        expected="a command as you would type it",
        hint=hint or f"such as `ebbtide {verb} {EXAMPLE}`",
    )


def no_command(
    found: str, verb: str, words: Sequence[str], *, flags: Sequence[str] = (), others: str = ""
) -> ConfigError:
    """Return an error whose hint is the command line with ``--``, and with python before a Python file.

    Args:
        found: What was found.
        verb: The verb.
        words: The command, as typed.
        flags: The verb's own flags before it.
        others: Whatever else the verb takes, for the text.
    """
    started = ["python", *words] if words[0].endswith(".py") else list(words)
    hint = shlex.join(["ebbtide", verb, *flags, "--", *started])
    return ConfigError(found, expected=f"{others}a command after --", hint=hint)


def _policy(policy: str | None) -> str | None:
    """Return a policy's name, or the absolute path of a plan file: the script may change its directory.

    Raises:
        ConfigError: There is no such policy.
        DataError: The plan file cannot be read.
    """
    if policy is None:
        return None
    if not policy.endswith(".json"):
        policy_named(policy)
        return policy
    load_plan(policy)
    return str(Path(policy).absolute())


def _directory(path: Path, program: str) -> str:
    """Return the absolute path of a directory for offloaded bytes, checked where this machine trains."""
    from ebbtide.store.location import check_directory  # imports torch

    if Path(program).name in _ELSEWHERE:  # enabling checks it on the machine that trains
        return str(path.absolute())
    return str(check_directory(path))


def _folder(out: Path, claimed: contextlib.ExitStack) -> Path:
    """Create the folder of a recorded run; put an earlier record aside, as of a job that is started again."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            claimed.enter_context(only_writer(out))
        except DataError:
            if (out / EVENTS_FILE).exists():
                raise
            return out.absolute()  # the same command on another node was first
        check_results(out)
        remove_notes(out)
        with contextlib.suppress(FileNotFoundError):
            kept = put_record_aside(out)
            print(f"ebbtide: the record of an earlier run in {out} is kept as {kept.name}", file=sys.stderr)
    except OSError as error:
        raise DataError(
            f"{out} cannot be made ({error.strerror})", expected="a folder for the run", hint="name another with --out"
        ) from error
    return out.absolute()


def _wait_for(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command on this process's terminal; see [Note: a command's end]."""
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came before the command had started
    # Ctrl-C at a terminal reaches the command itself; a second SIGINT would interrupt its cleanup.
    reached = _OF_KEYBOARD if _at_terminal() else ()

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if not running:
            early.append(number)
        elif number not in reached:
            running[0].send_signal(number)

    # One that is ignored, as under nohup, stays ignored.
    heard = [n for n in (*_OF_KEYBOARD, *_HANDED_ON) if signal.getsignal(n) is not signal.SIG_IGN]
    with handled(heard, hand_on):
        running.append(started(command, env=environment))
        for number in early:
            running[0].send_signal(number)
        code = wait_for(running[0])
    return 128 - code if code < 0 else code


def _at_terminal() -> bool:
    """Whether this process's group is a terminal's foreground group, which gets Ctrl-C, whatever stdin is."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _ending(notes: Sequence[Event], code: int) -> list[str]:
    """Return the lines at the end: the offloaded bytes, or why nothing was offloaded."""
    reason = why_untrained(notes)
    if reason is not None:
        what, hint = reason
        # A failed script has printed its own error.
        return [] if code else [f"ebbtide: nothing was offloaded: {what}", f"hint: {hint}"]
    lines = [
        f"ebbtide: the script enables ebbtide on {n['model']} itself; left as it is" for n in of_kind(notes, "own")
    ]
    if any(note["checkpoints_itself"] for note in of_kind(notes, "model")):
        lines.append(
            "ebbtide: the script checkpoints its blocks, so only what they keep could be offloaded; "
            "without gradient_checkpointing ebbtide chooses for every tensor"
        )
    for note in of_kind(notes, "more"):
        lines.append(f"ebbtide: {note['model']} and later models were left as they are")
        if note["alike"]:
            lines.append("hint: if these are layers of a model, call enable_activation_offloading(model) in the script")
    for note in of_kind(notes, "unrecorded"):
        lines.append(f"ebbtide: a process of the command trained and is not recorded: {note['reason']}")
    if not code and (uncounted := why_uncounted(notes)) is not None:
        lines += [f"ebbtide: {uncounted[0]}", f"hint: {uncounted[1]}"]
    for note in of_kind(notes, "end"):
        if note["main"] and note["unique_bytes"]:
            saved, of = format_size(note["memory_saved_bytes"]), format_size(note["unique_bytes"])
            lines.append(
                f"ebbtide: {counted(note['steps'], 'step')}; {saved} of the {of} of activations per forward were "
                "offloaded or recomputed"
            )
        elif note["main"] and note["small_storages"]:
            lines.append(
                f"ebbtide: {counted(note['steps'], 'step')}; nothing was offloaded: all {note['small_storages']} "
                f"storages that blocks save are below {format_size(MIN_BYTES)} and stay"
            )
    return lines
