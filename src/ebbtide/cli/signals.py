"""Make SIGTERM end a command as Ctrl-C does: files closed, children ended, summaries written."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Cleanup code for Ctrl-C handles it, too."""


@contextmanager
def terminate_as_interrupt() -> Generator[None, None, None]:
    """Raise ``Terminated`` in the main thread on SIGTERM, instead of ending the process at once.

    A second SIGTERM is ignored during cleanup. Outside the main thread this does nothing.

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
    """Delay SIGINT and SIGTERM until the end of the context.

    For example, a child that was started but not yet recorded would outlive this process. Outside the main thread this
    does nothing.
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
