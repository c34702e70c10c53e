"""A child is ended with whoever started it, whenever the interrupt comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import children
from ebbtide.cli.children import Child
from ebbtide.cli.signals import Terminated, hold_interrupts, terminate_as_interrupt

WAITING = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interrupt_while_a_child_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    """Between the start of the child and the note of it, an interrupt would leave an orphan."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        os.kill(os.getpid(), number)
        return started[-1]

    monkeypatch.setattr(children.subprocess, "Popen", interrupted)
    with terminate_as_interrupt(), pytest.raises(error):
        Child(WAITING, tmp_path / "run", environment=os.environ, sample_seconds=0.01)
    assert len(started) == 1
    assert started[0].returncode not in (None, 0)  # 1: Python itself was interrupted while it started


def test_interrupts_wait_and_come_once() -> None:
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with hold_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            order.append("went on")
        order.append("never")
    assert order == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_than_the_main_one_changes_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[Any]()

    def work() -> None:
        with hold_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [before]
