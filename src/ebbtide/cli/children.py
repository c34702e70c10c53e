"""Run a training run as a child process and sample its memory from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.base.runs import OUTSIDE_FILE
from ebbtide.cli.signals import hold_interrupts
from ebbtide.track import MemoryReader, Sampler

OUTPUT_FILE = "output.txt"
_POLITE_SECONDS = 20.0
_LOOK_SECONDS = 0.5
_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The outcome of a child process.

    Attributes:
        folder: Its run folder.
        code: Its exit code; if negative, the signal that ended it.
        seconds: Its run time, including startup and imports.
        tail: The last lines of its output.
    """

    folder: Path
    code: int
    seconds: float
    tail: str


def run_child(
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str],
    sample_seconds: float,
    look: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command and write the memory of its process family to ``outside.jsonl``.

    Its output goes to ``output.txt``. The child leads its own process group, so a keyboard interrupt reaches only this
    process, which then ends the whole family.

    Args:
        command: The program and its arguments.
        folder: The child's run folder; created here.
        environment: Its complete environment.
        sample_seconds: Time between two samples.
        look: Called repeatedly while the child runs.

    Raises:
        KeyboardInterrupt: This process was interrupted; the child has already been ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (folder / OUTPUT_FILE).open("wb") as output, (folder / OUTSIDE_FILE).open("w", buffering=1) as outside:

        def write(rss_bytes: int, _device_bytes: int | None) -> None:
            outside.write(json.dumps({"t": time.monotonic(), "event": "memory", "rss_bytes": rss_bytes}) + "\n")

        with family(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(environment)
        ) as child:
            sampler = Sampler(MemoryReader(child.pid, children=True), write, seconds=sample_seconds)
            sampler.start()
            try:
                while (code := _wait(child)) is None:
                    look()
            finally:
                sampler.stop()
    return Ended(folder=folder, code=code, seconds=time.monotonic() - began, tail=_tail(folder / OUTPUT_FILE))


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    """Wait briefly for a child; return its exit code, ``None`` if it is still running."""
    try:
        return child.wait(_LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return None


@contextmanager
def family(command: Sequence[str], **options: Any) -> Generator[subprocess.Popen[bytes], None, None]:
    """Start a child that leads its own process group; end the whole family on exit.

    Args:
        command: The program and its arguments.
        options: Further arguments of ``subprocess.Popen``.
    """
    started: list[subprocess.Popen[Any]] = []
    try:
        with hold_interrupts():
            started.append(subprocess.Popen(command, start_new_session=True, **options))
        yield started[0]
    finally:
        for child in started:
            end_family(child)


def end_family(child: subprocess.Popen[bytes]) -> None:
    """End a child and its descendants: SIGINT, so that it closes its run file; then SIGTERM, then SIGKILL."""
    for asking in (signal.SIGINT, signal.SIGTERM):
        if child.poll() is not None:
            break
        _signal(child, asking)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLITE_SECONDS)
    # Also after success: a worker that outlives its parent would hold memory while the next child runs.
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The child leads its own group, so this reaches its family and nobody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line.rstrip() for line in lines[-_TAIL_LINES:])
