"""Wait, after each step, until the other runs of a comparison have taken theirs: see [Note: a fair comparison]."""

from __future__ import annotations

import os
from pathlib import Path

from ebbtide.base.runs import TURN_VARIABLE


class Turns:
    """The end of a pipe from which a run reads one byte for each step that it may take.

    When the writing process has closed its end, or is gone, the run goes on alone.

    Args:
        pipe: A named pipe.
    """

    def __init__(self, pipe: Path) -> None:
        # Opened without blocking: if the writing process is gone, nobody would ever complete the opening.
        self._pipe: int | None = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._pipe, True)

    @staticmethod
    def asked(folder: Path) -> Turns | None:
        """Return the turns of the run of a folder; ``None`` if it takes its steps alone."""
        pipe = Path(os.environ.get(TURN_VARIABLE, ""))
        return Turns(pipe) if pipe.is_fifo() and pipe.resolve().parent == folder.resolve() else None

    def wait(self) -> bool:
        """Wait for the next turn; return whether there will be others."""
        return self._pipe is not None and bool(os.read(self._pipe, 1))

    def close(self) -> None:
        """Wait no more. May be called repeatedly."""
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe = None
