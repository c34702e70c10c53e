"""ebbtide's warnings are in the record of a run, and reach the terminal as before."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ebbtide.base.events import Bus
from ebbtide.report.run import load_run
from ebbtide.report.story import messages
from ebbtide.track.runfile import RunFile

LOG = logging.getLogger("ebbtide.wrap")


def test_warnings_of_a_run_are_in_its_report(tmp_path: Path) -> None:
    LOG.warning("before it")
    with RunFile(tmp_path / "run", bus=Bus()):
        LOG.warning("%s blocks are not checkpointed", "Layer")
        LOG.info("a plan was made")
        logging.getLogger("another").warning("of another package")
    LOG.warning("after it")
    assert messages(load_run(tmp_path / "run")) == ["Layer blocks are not checkpointed"]


def test_a_record_that_cannot_be_written_is_no_endless_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with RunFile(tmp_path / "run", bus=Bus()):
        monkeypatch.setattr("os.write", full)
        LOG.warning("once")
        monkeypatch.undo()


def test_warnings_of_a_forked_child_are_not_its_parents(tmp_path: Path) -> None:
    """Another thread may have held the record's lock at the fork: a child that took it would wait for ever."""
    with RunFile(tmp_path / "run", bus=Bus()) as run:
        taken, over = threading.Event(), threading.Event()

        def hold() -> None:
            with run._lock:
                taken.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(60)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends a child that waits
            LOG.warning("of a worker")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        over.set()
        thread.join()
    assert messages(load_run(tmp_path / "run")) == []


@pytest.mark.parametrize("runs", [1, 2])
def test_warnings_are_printed_once_where_nothing_else_handles_them(tmp_path: Path, runs: int) -> None:
    program = f"""
import contextlib, logging
from ebbtide.track.runfile import RunFile
with contextlib.ExitStack() as stack:
    for number in range({runs}):
        stack.enter_context(RunFile({str(tmp_path)!r} + f"/{{number}}"))
    logging.getLogger("ebbtide.wrap").warning("seen once")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stderr.count("seen once") == 1
