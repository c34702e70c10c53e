"""Whether a save failed because of the disk, which libraries report in several ways."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ebbtide.base.errors import DiskError, DiskFullError, first_line
from ebbtide.base.files import FULL_ERRNOS
from ebbtide.base.units import format_size

_FULL_WORDS = ("No space left", "os error 28", "os error 27", "File too large", "Disk quota")
_FAILS = (errno.EIO, errno.EROFS)
"""Errors of a disk that fails; Linux then allows reads alone."""
_FAILS_WORDS = ("Input/output error", "Read-only file system")
_NO_REASON = ("Writer failed writing", "iostream error", "unexpected pos")
"""Errors of torch.save after a failed write (torch 2.13)."""


def disk_failure(error: Exception, output: Path) -> tuple[type[DiskError], str] | None:
    """Return the error to raise for a save that failed because of the disk, and the reason; ``None``: another failed.

    The disk must be as the save left it: torch.save loses the system's reason, so another file is written.
    """
    chain: dict[int, BaseException] = {}
    before: BaseException | None = error
    while before is not None and id(before) not in chain:  # an error may be its own cause
        chain[id(before)] = before
        before = before.__cause__ or before.__context__
    cause = next((x for x in chain.values() if says_full(x) or _has(x, _FAILS, _FAILS_WORDS)), None)
    if cause is None:
        if not any(_has(x, (), _NO_REASON) for x in chain.values()):
            return None
        cause = _write_error(output)
    if says_full(cause):
        return DiskFullError, first_line(cause)
    reason = first_line(cause)
    with suppress(OSError):  # the disk may fail here too
        reason += f" ({format_size(shutil.disk_usage(output).free)} are free)"
    return DiskError, reason


def says_full(error: BaseException) -> bool:
    """Whether an error means a full disk; libraries report it in words."""
    return _has(error, FULL_ERRNOS, _FULL_WORDS)


def _has(error: BaseException, codes: Sequence[int], words: Sequence[str]) -> bool:
    """Whether an error has one of these codes of the system, or one of these words."""
    return (isinstance(error, OSError) and error.errno in codes) or any(word in str(error) for word in words)


def _write_error(folder: Path) -> OSError:
    """Return the error of writing another file, or one without a reason if it is written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return OSError("torch.save does not report why")
