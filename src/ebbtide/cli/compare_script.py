"""``ebbtide compare -- COMMAND``: any training script under several modes, unedited: see [Note: any script]."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ebbtide.base.errors import TrainingError
from ebbtide.cli.children import Ended
from ebbtide.cli.rounds import CompareResult, Rounds, begin, run_rounds
from ebbtide.cli.run import check_command
from ebbtide.script.request import Request, read_notes, remove_notes, why_uncounted, why_untrained


def compare_script(
    command: Sequence[str],
    *,
    modes: Sequence[str],
    rounds: int,
    steps: int | None,
    out: Path,
) -> CompareResult:
    """Run a training script under several modes and compare memory, time, losses and the trained parameters.

    Args:
        command: The program and its arguments, as typed.
        modes: Keys of ``MODES``.
        rounds: How often each mode is run.
        steps: Steps of the optimizer after which each run is ended; ``None``: each runs to its own end.
        out: The output folder; must not hold a comparison.

    Returns:
        The result, already written to ``out``, even after failed children or an interrupt.

    Raises:
        ConfigError: No command or none that can be started, an unknown mode, a mode twice, or no round.
        DataError: ``out`` already holds a comparison, or cannot be written.
        EbbtideError: A package of the command line is not installed.
        TrainingError: The first run trained nothing, so there is nothing to compare.
    """
    check_command(command, verb="compare")
    plan = Rounds(modes=modes, rounds=rounds, out=out, steps=steps, of_script=True)
    console = begin(plan, extra="cli,track")
    console.print(_care(command, steps))

    def start(mode: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        folder.mkdir(parents=True, exist_ok=True)
        remove_notes(folder)
        request = Request(mode=mode, folder=str(folder.absolute()), compared=True, steps=steps)
        # Sets of strings have the same order in every run.
        return list(command), request.environment({"PYTHONHASHSEED": "0", **os.environ})

    result = run_rounds(plan, start, {"command": shlex.join(command), "steps": steps}, console, refuse=_refuse)
    for line in _remarks(out):
        console.print(line, style="yellow")
    return result


def _care(command: Sequence[str], steps: int | None) -> str:
    ends = "runs to its own end" if steps is None else f"is ended after {steps} steps of its optimizer"
    return (
        f"Each run of `{shlex.join(command)}` {ends}, starts from one random seed until it sets its own, and writes "
        "where the script writes."
    )


def _refuse(ended: Ended) -> None:
    reason = why_untrained(read_notes(ended.folder))
    if reason is None:
        return
    what, hint = reason
    if ended.code:
        what = f"the command ended with {ended.how} before it trained a model"
        hint = "it must run by itself: try it without `ebbtide compare --`"
    error = TrainingError(what, expected="a command that trains a model", hint=hint)
    if ended.code:
        error.places = ended.tail.splitlines()
    raise error


def _remarks(out: Path) -> list[str]:
    """Warn if no step was counted, or if the script checkpoints its blocks itself, in plain too."""
    runs = [read_notes(folder) for folder in sorted(out.glob("round-*/*"))]
    uncounted = next(filter(None, map(why_uncounted, runs)), None)
    remarks = [] if uncounted is None else [f"{uncounted[0][0].upper()}{uncounted[0][1:]}.\nhint: {uncounted[1]}"]
    for notes in runs:
        for note in notes:
            if note["event"] == "model" and note["checkpoints_itself"]:
                return [
                    *remarks,
                    f"The script itself checkpoints the blocks of {note['model']}, in every mode: of its saved tensors "
                    "ebbtide sees only what the checkpoints keep.\nhint: turn gradient_checkpointing off in the script "
                    "(TRL's trainers have it on) to compare with ordinary training",
                ]
    return remarks
