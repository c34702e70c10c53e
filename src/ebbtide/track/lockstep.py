"""Wait, after each step, until the other runs of a comparison have taken theirs: see [Note: a fair comparison]."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ebbtide.base.runs import LOCKSTEP_VARIABLE


class Lockstep:
    """The end of a pipe from which a run reads one byte for each step that it may take.

    When the writing process has closed its end, or has died, the run continues alone.
    """

    def __init__(self, pipe: Path) -> None:
        self.waited_seconds = 0.0
        # Opened without blocking: if the writing process has died, nobody would ever complete the opening.
        self._pipe: int | None = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._pipe, True)

    @staticmethod
    def requested(folder: Path) -> Lockstep | None:
        """Return the lockstep of the run of a folder; ``None`` if it takes its steps alone."""
        pipe = Path(os.environ.get(LOCKSTEP_VARIABLE, ""))
        return Lockstep(pipe) if pipe.is_fifo() and pipe.resolve().parent == folder.resolve() else None

    def wait(self) -> bool:
        """Wait for the permit of the next step; return whether there was one: else the run goes on alone."""
        if self._pipe is None:
            return False
        began = time.monotonic()
        permit = os.read(self._pipe, 1)
        self.waited_seconds += time.monotonic() - began
        return bool(permit)

    def close(self) -> None:
        """Wait no more. May be called repeatedly."""
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe = None
