"""The command line's request to a script's processes, and their notes in return; imports no torch.

The request is one environment variable. Notes are JSON lines in one file of the request's folder: a command may have
many processes, and only the notes show which of them trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ebbtide.base.errors import DataError
from ebbtide.base.runs import Event

VARIABLE = "EBBTIDE_SCRIPT"
NOTES_FILE = "notes.jsonl"
SITE = Path(__file__).with_name("site")
"""The first folder on ``PYTHONPATH``."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings for the processes of a command.

    Attributes:
        mode: A mode of ``compare``.
        folder: Where the notes are written, and the run file if there is one.
        record: Whether the run is recorded.
        compared: The run is part of a comparison: it starts from a fixed seed, and its last event is a checksum.
        steps: End the script after this many optimizer steps; ``None``: it ends by itself.
        policy: Name of a policy, or a plan file; ``None``: the mode's own.
        disk_path: Directory for the disk tier.
    """

    mode: str
    folder: str
    record: bool = True
    compared: bool = False
    steps: int | None = None
    policy: str | None = None
    disk_path: str | None = None

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the command: ``base``, the request, and the folder in front of ``PYTHONPATH``."""
        paths = [str(SITE), *filter(None, [base.get("PYTHONPATH")])]
        return {**base, VARIABLE: json.dumps(dataclasses.asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}

    @staticmethod
    def received() -> Request:
        """Return the request of this process's environment."""
        return Request(**json.loads(os.environ[VARIABLE]))

    def note(self, event: str, **fields: Any) -> None:
        """Write a note in a single write, so that lines of processes do not mix.

        One that cannot be written is dropped: a process may outlive the command and the folder, or run on another node.
        """
        line = json.dumps({"t": time.monotonic(), "event": event, "pid": os.getpid(), **fields}) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(Path(self.folder) / NOTES_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)


def read_notes(folder: Path) -> list[Event]:
    """Return the notes of all processes of a command, by time.

    A damaged line, as a process leaves that is killed while it writes, is left out: others write after it.
    """
    path = folder / NOTES_FILE
    notes: list[Event] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            note: object = json.loads(line)
            if isinstance(note, dict) and {"t", "event"} <= note.keys():
                notes.append(cast("Event", note))
    return sorted(notes, key=lambda note: note["t"])


def remove_notes(folder: Path) -> None:
    """Remove the notes of an earlier command: one that trained nothing leaves no record.

    Raises:
        DataError: The file holds something else.
    """
    path = folder / NOTES_FILE
    if path.exists() and path.stat().st_size and not read_notes(folder):
        found = f"{folder} already holds {NOTES_FILE} of something other than a run"
        raise DataError(found, expected="a folder without it", hint="choose another folder, or remove it")
    path.unlink(missing_ok=True)


def why_untrained(notes: Sequence[Event]) -> tuple[str, str] | None:
    """Explain why no model was switched, and what to do; ``None`` if one was."""
    kinds = {note["event"] for note in notes}
    if not kinds.isdisjoint(("model", "own", "end")):
        return None
    by_hand = "call ebbtide.enable_activation_offloading(model) in the script"
    if "torch" not in kinds:
        hint = "the command must start a Python that has torch; `python -I`, `-E` and `-S` keep ebbtide out"
        return "no process of the command imported torch", hint
    if "optimizer" not in kinds:
        hint = "if the script trains without a torch.optim.Optimizer, " + by_hand
        return "the command imported torch and made no optimizer: it trained nothing", hint
    if "step" not in kinds:
        hint = "if it trains later, let it run until then"
        return "the command made an optimizer, and ended before it trained a model", hint
    if "traced" in kinds:
        hint = "compile the model's blocks (`block.compile()`), not the function around the model"
        return "an optimizer took a step, and the model is called only inside a compiled function", hint
    hint = f"its parameters are copies, or its layers are called one by one: {by_hand}"
    return "an optimizer took a step, but no model that was called has its parameters", hint


def why_uncounted(notes: Sequence[Event]) -> tuple[str, str] | None:
    """Explain why no step of a trained model was counted, and what to do; ``None`` if one was, or the run failed."""
    ends = [note for note in notes if note["event"] == "end" and note["main"]]
    if not ends or any(end["steps"] or end.get("failed") for end in ends):
        return None
    what = "no step was counted: no optimizer with parameters of the model took a step, so none is timed"
    hint = "use an optimizer that updates the weights in its step(); LOMO's fused_backward(loss, lr) takes none"
    return what, hint
