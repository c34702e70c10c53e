"""SIGTERM ends a command like Ctrl-C does: files are closed, children are ended, summaries are written."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Whoever closes up on Ctrl-C does so on this too."""


@contextmanager
def terminate_as_interrupt() -> Generator[None, None, None]:
    """Raise ``Terminated`` in the main thread when SIGTERM comes; by its default it would end the process on the spot.

    A second SIGTERM does not disturb the closing up. In another thread than the main one nothing is changed.

    Raises:
        Terminated: SIGTERM was received.
    """

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def hold_interrupts() -> Generator[None, None, None]:
    """Let SIGINT and SIGTERM wait until the end of the context, for what must not be done by halves.

    A child that was started and not yet noted down would outlive whoever started it. In another thread than the main
    one nothing is changed.
    """
    came: list[int] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, _frame: came.append(number))
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])
