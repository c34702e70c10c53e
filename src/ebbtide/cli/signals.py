"""Make SIGTERM, SIGHUP and the like end a command as Ctrl-C does: files closed, children ended, summaries written."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

STOP_CODES = {"interrupted": 130, "terminated": 143}
"""How a command was stopped → its exit code."""


_ENDING, _OF_SCHEDULERS = (signal.SIGTERM, signal.SIGHUP), (signal.SIGUSR1, signal.SIGUSR2)


class Terminated(KeyboardInterrupt):
    """A signal that ends a command was received. Cleanup code for Ctrl-C handles it, too."""


def how_stopped(stop: KeyboardInterrupt) -> str:
    """Return the key of ``STOP_CODES``."""
    return "terminated" if isinstance(stop, Terminated) else "interrupted"


@contextmanager
def terminate_as_interrupt() -> Generator[None, None, None]:
    """Raise ``Terminated`` in the main thread on SIGTERM and SIGHUP, instead of ending the process at once.

    So do SIGUSR1 and SIGUSR2, with which schedulers announce the end of a job, unless a handler was set. A second one
    is ignored during cleanup, as is a SIGHUP that was ignored before (``nohup``). Outside the main thread this does
    nothing.

    Raises:
        Terminated: One was received.
    """
    ending = [n for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN]
    ending += [n for n in _OF_SCHEDULERS if signal.getsignal(n) is signal.SIG_DFL]

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        for number in ending:
            signal.signal(number, signal.SIG_IGN)
        raise Terminated

    with handled(ending, terminate):
        yield


@contextmanager
def hold_interrupts() -> Generator[None, None, None]:
    """Delay SIGINT and the signals of ``terminate_as_interrupt`` until the end of the context.

    For example, a child that was started but not yet recorded would outlive this process. Outside the main thread this
    does nothing.
    """
    came: list[int] = []
    try:
        with handled((signal.SIGINT, *_OF_SCHEDULERS, *_ENDING), lambda number, _frame: came.append(number)):
            yield
    finally:
        for number in dict.fromkeys(came):  # the first that ends the command raises
            os.kill(os.getpid(), number)


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Generator[None, None, None]:
    """Handle signals until the end of the context, which restores what was set; outside the main thread, do nothing."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, handler)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
