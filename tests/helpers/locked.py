"""A folder that another process writes into."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = (
    "import sys; from pathlib import Path; from ebbtide.base.runs import only_writer\n"
    "with only_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Let another process hold the lock on a folder while the context is open; yield its number."""
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield other.pid  # at the end it reads the end of its input
