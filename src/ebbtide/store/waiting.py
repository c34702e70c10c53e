"""Waiting under a lock that an interrupt may end at any moment."""

from __future__ import annotations

import threading


def wait_held(condition: threading.Condition, seconds: float) -> bool:
    """Wait on a condition over an ``RLock``; whatever ends the wait, the lock is held afterwards, as before.

    ``Condition.wait`` promises less: an interrupt right after it has released the lock leaves it released, and
    whoever leaves the ``with`` around it then fails, or releases the lock under the thread that has it by then. Over
    a plain ``Lock`` an interrupt may also end the attempt to take it again.

    Args:
        condition: The condition; its lock is held, once.
        seconds: Longest wait.

    Returns:
        Whether it was notified.
    """
    try:
        return condition.wait(seconds)
    except BaseException:
        try:
            condition.notify(0)  # wakes nobody; raises unless this thread has the lock
        except RuntimeError:
            condition.acquire()
        raise
