"""Errors of worker threads, kept until the next call."""

from __future__ import annotations

import errno
import os

from ebbtide.base.errors import DiskError, DiskFullError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a system says when a disk, a quota or a file-size limit holds no more."""


class Fault:
    """What went wrong in a thread.

    It makes a fresh error each time it is raised: one object raised twice chains tracebacks, and with them the tensors
    in their frames, for as long as it lives.

    Args:
        doing: What failed, for people.
        cause: The exception that was caught.
        hint: What to do; ``None``: what helps against a bad or full disk.
    """

    def __init__(self, doing: str, cause: BaseException, *, hint: str | None = None) -> None:
        self._doing, self._cause, self._hint = doing, cause.with_traceback(None), hint

    def error(self) -> DiskError:
        """Return the error to raise, chained to what the system said."""
        cause = self._cause
        full = isinstance(cause, OSError) and cause.errno in FULL_ERRNOS
        made = (DiskFullError if full else DiskError)(
            f"{self._doing} failed: {cause}" if isinstance(cause, OSError) else f"{self._doing} failed: {cause!r}",
            expected="a disk that writes and reads every byte" if isinstance(cause, OSError) else "",
            hint=self._hint
            or f"{'free some space there' if full else 'check the system log'}, or use another disk_path=...",
        )
        made.__cause__ = self._cause
        return made


def forked_error(owner: int) -> DiskError:
    """Return the error for a tier that the process ``owner`` opened and a child of it uses."""
    return DiskError(
        f"a disk tier of process {owner} is used in its forked child {os.getpid()}",
        expected="one tier per process: threads do not survive a fork",
        hint="open the tier after the fork, or start workers with the 'spawn' method",
    )
