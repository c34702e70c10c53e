"""Make SIGTERM, SIGHUP and the like end a command as Ctrl-C does: files closed, children ended, summaries written."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """A signal that ends a command was received. Cleanup code for Ctrl-C handles it, too."""


@contextmanager
def terminate_as_interrupt() -> Generator[None, None, None]:
    """Raise ``Terminated`` in the main thread on SIGTERM and SIGHUP, instead of ending the process at once.

    So do SIGUSR1 and SIGUSR2, with which schedulers announce the end of a job, unless a handler was set. A second one
    is ignored during cleanup, as is a SIGHUP that was ignored before (``nohup``). Outside the main thread this does
    nothing.

    Raises:
        Terminated: One was received.
    """
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    ending += [n for n in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(n) is signal.SIG_DFL]

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        for number in ending:
            signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = {}
    try:
        for number in ending:
            before[number] = signal.signal(number, terminate)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
