"""Errors of worker threads, kept until the next call, and those that several tiers raise."""

from __future__ import annotations

import errno
import os

from ebbtide.base.errors import DiskError, DiskFullError, TargetError
from ebbtide.base.files import FULL_ERRNOS

_LIMITS: dict[int | None, str] = {
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`)",
    errno.EDQUOT: "raise the disk quota",
}
"""What to do about errors of a disk that has room."""


class Fault:
    """An error in a thread.

    Each raise makes a new exception: one object raised twice chains tracebacks, and keeps the tensors in their frames
    alive as long as it lives.

    Args:
        doing: The failed operation, for the message.
        cause: The caught exception.
        hint: What to do; ``None``: advice for a bad or full disk, or short memory.
    """

    def __init__(self, doing: str, cause: BaseException, *, hint: str | None = None) -> None:
        self._doing, self._cause, self._hint = doing, cause.with_traceback(None), hint

    def error(self) -> DiskError:
        """Return the error to raise, chained to the system's."""
        cause = self._cause
        full = isinstance(cause, OSError) and cause.errno in FULL_ERRNOS
        expected = (
            "a disk that writes and reads every byte" if isinstance(cause, OSError) else "a disk tier without errors"
        )
        advice = limit_of(cause) or ("free some space there" if full else "check the system log")
        hint = f"{advice}, or use another disk_path"
        short = isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        if short and self._hint is None:
            expected = "memory for these bytes"
            hint = "memory, or the address space (`ulimit -v`), is short: set a smaller window, which reads less ahead"
        made = (DiskFullError if full else DiskError)(
            f"{self._doing} failed: {cause}" if isinstance(cause, OSError) else f"{self._doing} failed: {cause!r}",
            expected=expected,
            hint=self._hint or hint,
        )
        made.__cause__ = self._cause
        return made


def limit_of(cause: BaseException | None) -> str:
    """Return advice on the limit of this user or process that a write met; nothing if it failed for another reason."""
    return _LIMITS.get(getattr(cause, "errno", None), "")


def forked_error(owner: int) -> DiskError:
    """Return the error for a tier opened by process ``owner`` and used in a child of it."""
    return DiskError(
        f"a disk tier of process {owner} is used in its forked child {os.getpid()}",
        expected="one tier per process: threads do not survive a fork",
        hint="in the child call handle.close() and enable_activation_offloading(model), or start it with 'spawn'",
    )


def freed_error(error: type[TargetError] = TargetError, *, when: str = ", and is used") -> TargetError:
    """Return the error for a slot that is used too late."""
    return error(f"a slot was freed or cancelled{when}", expected="a live slot", hint="keep its ticket alive")


def closed_error(tier: str, error: type[TargetError] = TargetError) -> TargetError:
    """Return the error for a closed tier that is used."""
    hint = "keep it open until the last backward is done"
    return error(f"the {tier} tier is closed", expected="an open one", hint=hint)


def unstarted_error(cause: RuntimeError) -> DiskError:
    """Return the error for threads of the disk tier that cannot be started."""
    hint = "raise the limit of processes (`ulimit -u`, or the container's), or free memory"
    return DiskError(f"the disk tier cannot start its threads: {cause}", expected="two more threads", hint=hint)


def ended_error() -> DiskError:
    """Return the error for a thread of the disk tier that ended without a word."""
    hint = "close this handle and open a new one"
    return DiskError("a thread of the disk tier has died", expected="all of them until the tier is closed", hint=hint)
