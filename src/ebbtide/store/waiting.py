"""Wait under a lock, safely against interrupts."""

from __future__ import annotations

import threading


def wait_held(condition: threading.Condition, seconds: float) -> bool:
    """Wait on a condition over an ``RLock``; the lock is held afterwards even after an interrupt.

    ``Condition.wait`` does not guarantee this: an interrupt right after it released the lock leaves it released, and
    the end of the surrounding ``with`` then fails, or releases the lock of another thread. With a plain ``Lock`` an
    interrupt may also prevent reacquiring it. The lock must be held, once.

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
