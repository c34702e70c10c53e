"""Progress of a comparison or of work in this process: one changing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from ebbtide.base.runs import EVENTS_FILE, OUTPUT_FILE

REPORT_SECONDS = 10.0
"""Between two plain lines of one run, unless a new phase began."""


class RunReader:
    """Reads a run file while it is written.

    Args:
        what: The run's round and mode.
        folder: Its run folder, which may not exist yet.
        number: Its number among all runs.
        clock: Returns seconds.
    """

    def __init__(self, what: str, folder: Path, number: int, clock: Callable[[], float]) -> None:
        self.what, self.folder, self.number, self._clock = what, folder, number, clock
        self.began = self.since = clock()
        self.running = False
        """Whether its first step has begun."""
        self.done = self.waits = 0
        """Steps that have ended, and those after which the run waited for others."""
        self.seconds: list[float] = []
        self.start_seconds: float | None = None
        self.device, self.world_size = "", 1
        self._offset, self._rest = 0, ""

    def read(self) -> None:
        """Read the events recorded since the last call."""
        path = self.folder / EVENTS_FILE
        if not path.exists():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._offset)
            lines = (self._rest + file.read()).split("\n")
            self._offset = file.tell()
        self._rest = lines.pop()  # may be incomplete
        for line in lines:
            if '"event": "phase"' in line and not self.running and json.loads(line).get("name") == "forward":
                self.running, self.since = True, self._clock()
                self.start_seconds = self.since - self.began
            elif '"event": "step"' in line:
                self.done, self.since = self.done + 1, self._clock()
                if (seconds := json.loads(line).get("seconds")) is not None:
                    self.seconds.append(seconds)
            elif '"event": "wait"' in line:
                self.waits += 1
            elif '"event": "run_begin"' in line:
                begin = json.loads(line)
                self.device, self.world_size = begin.get("device") or "", begin.get("world_size") or 1


class RunProgress:
    """Follow the runs of a comparison through their run files and print their progress.

    Args:
        console: As ``plain_console`` returns it. On a terminal one line changes in place; elsewhere lines are
            printed at intervals.
        runs: Their total number.
        steps: Steps of each; ``None``: not known in advance.
        clock: Returns seconds.
    """

    def __init__(
        self,
        console: Any,
        *,
        runs: int,
        steps: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._runs, self._steps, self._clock = console, runs, steps, clock
        self._begun: list[RunReader] = []
        self._current: RunReader | None = None
        self._shown_at = 0.0
        self._status: Any = None

    def begin(self, what: str, folder: Path) -> RunReader:
        """Follow the next run; see ``RunReader``."""
        reader = RunReader(what, folder, len(self._begun) + 1, self._clock)
        self._begun.append(reader)
        self.resume(reader)
        if self._status is None:
            self._print(self._words(reader))
        return reader

    def resume(self, reader: RunReader) -> None:
        """Follow a run that takes its next step."""
        self._current, self._shown_at = reader, self._clock()
        reader.since = self._clock()
        if self._console.is_terminal and self._status is None:
            self._status = self._console.status(self._text(reader))
            self._status.start()

    def look(self) -> None:
        """Read the run's progress and print it."""
        reader = self._current
        if reader is None:
            return
        done, running = reader.done, reader.running
        reader.read()
        if self._status is not None:
            self._status.update(self._text(reader))
        elif (
            (reader.done == 1 and done == 0)
            or self._clock() - self._shown_at >= REPORT_SECONDS
            or running != reader.running
        ):
            self._print(self._words(reader))

    def end(self) -> None:
        """Stop following the run."""
        if self._current is not None:
            self._current.read()
        self._current = None
        if self._status is not None:
            self._status.stop()
            self._status = None

    def all_stepped(self, step: int, seconds: Mapping[str, float]) -> None:
        """Print the number of a step that all runs of a round have taken, and its time by mode."""
        of = "" if self._steps is None else f" of {self._steps}"
        plain = seconds.get("plain")
        texts = [
            f"{mode} {own:.2f} s" + (f" (×{own / plain:.2f})" if plain and mode != "plain" else "")
            for mode, own in seconds.items()
        ]
        left = self.seconds_left()
        texts[-1] += "" if not left else f"; {duration(left)} left in all"
        self._print(f"step {step}{of}  " + "  ".join(texts))

    def seconds_left(self) -> float | None:
        """Estimate the seconds until all runs end; ``None`` before the first step ends."""
        seconds = [each for reader in self._begun for each in reader.seconds]
        if self._steps is None or not seconds:
            return None
        step = median(seconds)
        start = median(r.start_seconds for r in self._begun if r.start_seconds is not None)
        left = (self._runs - len(self._begun)) * (start + self._steps * step)
        for reader in self._begun:
            own = median(reader.seconds) if reader.seconds else step
            left += max(self._steps - reader.done, 0) * own + (0.0 if reader.running else start)
        return left

    def _text(self, reader: RunReader) -> Any:
        from rich.text import Text

        return Text(self._words(reader))  # brackets in a run's output are no markup

    def _words(self, reader: RunReader) -> str:
        words = f"{reader.number} of {self._runs}  {reader.what}  "
        if not reader.running:
            words += f"starting, {self._clock() - reader.began:.0f} s{self._last_output(reader)}"
        else:
            words += f"{reader.done}" + ("" if self._steps is None else f" of {self._steps}") + " steps done"
            if reader.seconds and reader.done:
                words += f", {reader.seconds[-1]:.1f} s each"
            if reader.done != self._steps and (since := self._clock() - reader.since) >= REPORT_SECONDS:
                words += f", the next for {since:.0f} s"
        left = self.seconds_left()
        return words if left is None else f"{words}; {duration(left)} left in all"

    @staticmethod
    def _last_output(reader: RunReader) -> str:
        path = reader.folder / OUTPUT_FILE
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        message = next((line.strip() for line in reversed(lines) if line.startswith("INFO ")), "")
        return f": {message.removeprefix('INFO ')[:100]}" if message else ""

    def _print(self, words: str) -> None:
        self._shown_at = self._clock()
        self._console.print(words)


class WorkProgress:
    """Print the phases of work in this process; use it as a context.

    Args:
        stream: Where to print. On a terminal one line changes in place; elsewhere a line is printed for each phase.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._status: Any = None

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, phase: str) -> None:
        """Print that a phase begins."""
        if not self._stream.isatty():
            self.report(phase)
            return
        from rich.text import Text

        text = Text(phase)  # brackets in a path are no markup
        if self._status is None:
            self._status = plain_console(self._stream).status(text)
            self._status.start()
        else:
            self._status.update(text)

    def report(self, line: str) -> None:
        """Print a line that stays."""
        if self._status is not None:
            self._status.console.print(line)
        else:
            # Not by rich, which exits where a pipe is closed.
            print(line, file=self._stream, flush=True)


def plain_console(file: TextIO | None = None) -> Any:
    """Return a rich console that prints lines as they are: brackets are no markup, and long lines are not broken.

    Args:
        file: Where it prints; ``None``: standard output.
    """
    from rich.console import Console

    return Console(file=file, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format an estimated duration."""
    if seconds < 90:
        return f"about {max(round(seconds / 5) * 5, 5)} s"
    return f"about {seconds / 60:.0f} min"
