"""Where a process's time goes, by the innermost Python line, as py-spy sees it from outside.

A sampler inside the process would charge a kernel that ran without Python to the next Python line, which is often a
hook of ours.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

RATE = 500
"""Samples per second."""

_FRAME = re.compile(r"^(?P<name>.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)$")


def shares(work: Callable[[], object], seconds: float) -> Counter[str] | None:
    """Return samples by innermost line (``ebbtide/engine/run.py:44 pack``) while ``work`` is repeated.

    Args:
        work: The function to repeat.
        seconds: Duration.

    Returns:
        Samples of the calling thread; None if py-spy is not installed.
    """
    spy = shutil.which("py-spy")
    if spy is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.txt")
        command = [spy, "record", "--pid", str(os.getpid()), "--format", "raw", "--output", str(raw), "--nonblocking"]
        command += ["--rate", str(RATE), "--duration", str(round(seconds)), "--threads"]
        recorder = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        ends = time.monotonic() + seconds + 30
        while recorder.poll() is None and time.monotonic() < ends:
            work()
        recorder.kill()  # it should have ended by itself
        _, said = recorder.communicate()
        if recorder.returncode:
            raise SystemExit(f"py-spy failed: {said.strip()}; hint: it needs the right to trace this process")
        return innermost(raw.read_text())


def innermost(raw: str) -> Counter[str]:
    """Return the samples of the main thread by innermost line, from py-spy's raw format."""
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if "MainThread" not in frames[0]:
            continue
        match = _FRAME.match(frames[-1])
        if match is not None:
            path = match["file"]
            place = path[path.index("ebbtide/") :] if "ebbtide/" in path else Path(path).name
            found[f"{place}:{match['line']} {match['name']}"] += int(count)
    return found


def ours(found: Counter[str]) -> float:
    """Return the share of samples whose innermost line is one of ebbtide's."""
    return sum(n for place, n in found.items() if place.startswith("ebbtide/")) / max(1, found.total())
