"""Progress and remaining time of a comparison: one changing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.base.runs import EVENTS_FILE

REPORT_SECONDS = 10.0
"""Between two plain lines of one run, unless a new phase began."""


class RunProgress:
    """Follow the runs of a comparison through their run files and print their progress.

    Args:
        console: A rich console. On a terminal one line changes in place; elsewhere lines are printed at intervals.
        runs: Their total number.
        steps: Steps of each; ``None``: not known in advance.
        output: Name of the file of a run's output in its folder.
        clock: Returns seconds.
    """

    def __init__(
        self,
        console: Any,
        *,
        runs: int,
        steps: int | None,
        output: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._runs, self._steps, self._output, self._clock = console, runs, steps, output, clock
        self._number = 0
        self._starts: list[float] = []
        self._seconds: list[float] = []
        self._status: Any = None

    def begin(self, what: str, folder: Path) -> None:
        """Follow the next run.

        Args:
            what: Its round and mode.
            folder: Its run folder, which may not exist yet.
        """
        self._number += 1
        self._what, self._folder = what, folder
        self._offset, self._rest = 0, ""
        self._began, self._shown_at, self._done, self._running = self._clock(), self._clock(), 0, False
        if self._console.is_terminal:
            self._status = self._console.status(self._words())
            self._status.start()
        else:
            self._print()

    def look(self) -> None:
        """Read the run's progress and print it."""
        done, running = self._done, self._running
        self._read()
        if self._status is not None:
            self._status.update(self._words())
        elif (
            (self._done == 1 and done == 0)
            or self._clock() - self._shown_at >= REPORT_SECONDS
            or running != self._running
        ):
            self._print()

    def end(self) -> None:
        """Stop following the run."""
        self._read()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def seconds_left(self) -> float | None:
        """Estimate the seconds until all runs end; ``None`` before the first step ends."""
        if self._steps is None or not self._seconds:
            return None
        step, start = median(self._seconds), median(self._starts)
        now = (self._steps - self._done) * step if self._running else start + self._steps * step
        return max(now, 0.0) + (self._runs - self._number) * (start + self._steps * step)

    def _read(self) -> None:
        """Read the events recorded since the last call."""
        path = self._folder / EVENTS_FILE
        if not path.exists():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._offset)
            lines = (self._rest + file.read()).split("\n")
            self._offset = file.tell()
        self._rest = lines.pop()  # may be incomplete
        for line in lines:
            if '"event": "phase"' in line and not self._running and json.loads(line).get("name") == "forward":
                self._running = True
                self._step_began = self._clock()
                self._starts.append(self._step_began - self._began)
            elif '"event": "step"' in line:
                self._done, self._step_began = self._done + 1, self._clock()
                if (seconds := json.loads(line).get("seconds")) is not None:
                    self._seconds.append(seconds)

    def _words(self) -> str:
        words = f"{self._number} of {self._runs}  {self._what}  "
        if not self._running:
            words += f"starting, {self._clock() - self._began:.0f} s{self._last_output()}"
        else:
            words += f"{self._done}" + ("" if self._steps is None else f" of {self._steps}") + " steps done"
            if self._seconds and self._done:
                words += f", {self._seconds[-1]:.1f} s each"
            if self._done != self._steps and (since := self._clock() - self._step_began) >= REPORT_SECONDS:
                words += f", the next for {since:.0f} s"
        left = self.seconds_left()
        return words if left is None else f"{words}; {duration(left)} left in all"

    def _last_output(self) -> str:
        path = self._folder / self._output
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        message = next((line.strip() for line in reversed(lines) if line.startswith("INFO ")), "")
        return f": {message.removeprefix('INFO ')[:100]}" if message else ""

    def _print(self) -> None:
        self._shown_at = self._clock()
        self._console.print(self._words(), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format an estimated duration."""
    if seconds < 90:
        return f"about {max(round(seconds / 5) * 5, 5)} s"
    return f"about {seconds / 60:.0f} min"
