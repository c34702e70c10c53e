"""Errors of worker threads, kept until somebody asks."""

from __future__ import annotations

import errno

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
    """

    def __init__(self, doing: str, cause: BaseException) -> None:
        self._doing, self._cause = doing, cause.with_traceback(None)

    def error(self) -> DiskError:
        """Return the error to raise, chained to what the system said."""
        full = isinstance(self._cause, OSError) and self._cause.errno in FULL_ERRNOS
        made = (DiskFullError if full else DiskError)(
            f"{self._doing} failed: {self._cause}",
            expected="a disk that takes and returns every byte",
            hint=("make room there" if full else "see the system log") + ", or give another disk_path=...",
        )
        made.__cause__ = self._cause
        return made
