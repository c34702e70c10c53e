"""Training runs as child processes, step by step if need be; their memory is sampled from outside."""

from __future__ import annotations

import contextlib
import functools
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

from ebbtide.base.extras import require
from ebbtide.base.runs import LOCKSTEP_FILE, LOCKSTEP_VARIABLE, OUTPUT_FILE, OUTSIDE_FILE
from ebbtide.cli.signals import hold_interrupts
from ebbtide.cli.starting import KILLED, LOOK_SECONDS, signal_words, started
from ebbtide.track import MemoryReader, Sampler

SAMPLE_SECONDS = 0.005
"""Time between two samples of a child's memory."""

_PIECE_BYTES = 16 * 2**20
"""After every so many bytes of samples half as many are written: a report reads the file into memory."""

_POLITE_SECONDS = 20.0
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

    @property
    def how(self) -> str:
        """How it ended: its exit code, or the signal's name."""
        if self.code < 0:
            return signal_words(-self.code)
        words = f"exit code {self.code}"
        # A shell passes its command's end on as a code.
        return words + KILLED if self.code == 128 + signal.SIGKILL else words


class Child:
    """A training run as a child process, between its start and its end.

    Its output goes to ``output.txt``, and the memory of its process family, while it is followed, to
    ``outside.jsonl``. It leads its own process group, so a keyboard interrupt reaches only this process, which then
    ends the whole family.

    Args:
        command: The program and its arguments.
        folder: The child's run folder; created here.
        environment: Its complete environment, but for the variable of the lockstep.

    Raises:
        KeyboardInterrupt: This process was interrupted; the child has already been ended.
    """

    def __init__(self, command: Sequence[str], folder: Path, *, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.most_bytes = folder, 0
        self._samples = self._written_bytes = self._most_written_bytes = 0
        self._highest: tuple[int, float] = 0, 0.0  # of the samples since the last written one
        self._unwritten: OSError | None = None
        self._began = time.monotonic()
        self._variables = dict(environment)
        with contextlib.ExitStack() as opening:
            self._lockstep = self._make_pipe(opening)
            output = opening.enter_context((folder / OUTPUT_FILE).open("wb"))
            self._outside = opening.enter_context((folder / OUTSIDE_FILE).open("wb", buffering=0))
            self._process = opening.enter_context(
                family(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._variables)
            )
            self._closing = opening.pop_all()

    def _make_pipe(self, opening: contextlib.ExitStack) -> int | None:
        """Make the pipe on which the child is permitted its steps, where the system has pipes with names."""
        if not hasattr(os, "mkfifo"):
            return None
        pipe = self.folder.absolute() / LOCKSTEP_FILE
        pipe.unlink(missing_ok=True)
        try:
            os.mkfifo(pipe)
        except OSError:  # this file system has none: the child takes its steps alone
            return None
        opening.callback(pipe.unlink, missing_ok=True)
        self._variables[LOCKSTEP_VARIABLE] = str(pipe)
        # For reading too: a pipe that nobody reads cannot be opened for writing.
        permits = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        opening.callback(self.release)
        return permits

    def permit_step(self) -> None:
        """Permit its next step."""
        if self._lockstep is not None:
            os.write(self._lockstep, b"1")

    def release(self) -> None:
        """Permit all further steps. May be called repeatedly."""
        if self._lockstep is not None:
            os.close(self._lockstep)
        self._lockstep = None

    def follow(self, over: Callable[[], bool]) -> Ended | None:
        """Sample its memory until its step is over; return its outcome if it has ended.

        Args:
            over: Called repeatedly: whether the step is over.

        Raises:
            OSError: A sample cannot be written: without it, memory would seem lower than it was.
        """
        sampler = Sampler(MemoryReader(self._process.pid, children=True), self._write, seconds=SAMPLE_SECONDS)
        sampler.start()
        try:
            while (code := self._wait()) is None:
                self._check_samples()
                if over():
                    return None
        finally:
            sampler.stop()
        self._check_samples()
        over()  # what it wrote at last
        self.close()
        seconds = time.monotonic() - self._began
        return Ended(folder=self.folder, code=code, seconds=seconds, tail=_tail(self.folder / OUTPUT_FILE))

    def close(self) -> None:
        """End it, if it has not ended, with its whole family. May be called repeatedly."""
        self._closing.close()

    def _check_samples(self) -> None:
        if self._unwritten is not None:
            raise self._unwritten

    def _write(self, rss_bytes: int, _device_bytes: int | None) -> None:
        now = time.monotonic()
        self.most_bytes = max(self.most_bytes, rss_bytes)
        self._samples, self._highest = self._samples + 1, max(self._highest, (rss_bytes, now))
        if self._samples % 2 ** (self._written_bytes // _PIECE_BYTES):
            return
        (most_bytes, at), self._highest = self._highest, (0, 0.0)
        if at < now and most_bytes > self._most_written_bytes:  # no new peak is left out
            self._write_sample(most_bytes, at)
        self._write_sample(rss_bytes, now)
        self._most_written_bytes = max(self._most_written_bytes, most_bytes)

    def _write_sample(self, rss_bytes: int, t: float) -> None:
        line = {"t": t, "event": "memory", "rss_bytes": rss_bytes}
        rest = memoryview((json.dumps(line) + "\n").encode())
        self._written_bytes += len(rest)
        try:
            while rest and self._unwritten is None:  # a full disk takes a part of the line first
                rest = rest[self._outside.write(rest) :]
        except OSError as error:
            error.filename = str(self.folder / OUTSIDE_FILE)
            self._unwritten = error

    def _wait(self) -> int | None:
        """Wait briefly; return its exit code, ``None`` if it is still running."""
        try:
            return self._process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def family(command: Sequence[str], **options: Any) -> Generator[subprocess.Popen[bytes], None, None]:
    """Start a child that leads its own process group; end the whole family on exit. Options are those of ``Popen``."""
    running: list[subprocess.Popen[Any]] = []
    try:
        with hold_interrupts():
            running.append(started(command, start_new_session=True, **options))
        yield running[0]
    finally:
        for child in running:
            end_family(child)


def end_family(child: subprocess.Popen[bytes]) -> None:
    """End a child and its descendants: SIGINT, so that it closes its run file; then SIGTERM, then SIGKILL.

    An interrupt while it waits makes it send SIGKILL at once.
    """
    others = _descendants(child)  # launchers give each rank a process group of its own
    try:
        for asking in (signal.SIGINT, signal.SIGTERM):
            if child.poll() is not None:
                break
            _signal(child, asking)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLITE_SECONDS)
    finally:
        # Also after success: a worker that outlives its parent would hold memory while the next child runs.
        _signal(child, signal.SIGKILL)
        for end in others:
            end()
        child.wait()


def _descendants(child: subprocess.Popen[bytes]) -> list[Callable[[], None]]:
    """Return functions that end the running descendants of a child, if they still run."""
    psutil = require("psutil", extra="track", use="ending the processes that a run has started")

    def end(process: Any) -> None:
        with contextlib.suppress(psutil.Error):  # it has ended, and its number may be another process's
            process.kill()

    try:
        return [functools.partial(end, one) for one in psutil.Process(child.pid).children(recursive=True)]
    except psutil.Error:
        return []


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The child leads its own group, so this reaches its family and nobody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line.rstrip() for line in lines[-_TAIL_LINES:])
