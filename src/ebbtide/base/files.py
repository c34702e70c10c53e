"""Files: read JSON, write text, replace a file at once, check early that one can be written; a full disk's errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Generator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

from ebbtide.base.errors import DataError, nearest

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, quota or file-size limit."""

DRAFT = ".part"
"""Ends the name of a file that is being written."""


def near(path: Path, pattern: str) -> str:
    """Return a hint that names files like a missing one, of those in its folder that match ``pattern``; or nothing."""
    return nearest(path.name, [other.name for other in path.parent.glob(pattern)])


def json_object(source: Path | str, what: str, *, expected: str, hint: str) -> dict[str, Any]:
    """Return a JSON object.

    Args:
        source: A file, or the JSON text itself.
        what: Name of the source in errors.
        expected: What errors expect.
        hint: Hint of errors, unless a file has a similar name.

    Raises:
        DataError: The file cannot be read, or its text is no JSON object.
    """
    try:
        content: object = json.loads(source if isinstance(source, str) else source.read_text(encoding="utf-8"))
    except OSError as error:
        close = near(source, "*.json") if isinstance(source, Path) and error.errno == errno.ENOENT else ""
        found = f"{what} cannot be read ({error.strerror})"
        raise DataError(found, expected=expected, hint=close or hint) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}", expected=expected, hint=hint) from error
    if not isinstance(content, dict):
        raise DataError(f"{what} is {content!r:.60}", expected=expected, hint=hint)
    return cast("dict[str, Any]", content)


def write_text(path: Path, text: str) -> None:
    """Write a file; a new one that cannot be written to its end is removed.

    Raises:
        DataError: It cannot be written.
    """
    new = not os.path.lexists(path)
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # a recorded command may hold any bytes
    except OSError as error:
        if new:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        found = f"{str(path)!r} cannot be written ({error.strerror})"
        hint = "name a file in a folder that you may write to"
        raise DataError(found, expected="a writable file", hint=hint) from error


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a draft that replaces a file once it is written: if anything fails, the file stays as it was.

    Raises:
        OSError: It cannot be replaced.
    """
    draft = path.with_name(f"{path.name}{DRAFT}")
    try:
        yield draft
        flush(draft)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Write what this machine still has in memory of a file or folder to the disk.

    Raises:
        OSError: The disk is full, or fails.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:  # renamed meanwhile, or on a file system that does not flush what is only read
        if error.errno in (errno.EIO, *FULL_ERRNOS):
            raise


def check_writable(path: Path, what: str, *, hint: str) -> None:
    """Raise if a file cannot be written, before the work whose result it is to hold; arguments as for ``json_object``.

    Raises:
        DataError: It is a folder, there is no folder for it, or it may not be written.
    """
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {str(path.parent)!r}"
        raise DataError(f"{what} {found}", expected="a file in an existing folder", hint=hint)
    if not (os.access(path, os.W_OK) if path.exists() else _can_create(path)):
        raise DataError(f"{what} cannot be written", expected="a writable file", hint=hint)


def _can_create(path: Path) -> bool:
    """Whether a new file can be made, by making one: root has access to /sys, and can make none there."""
    try:
        target = path.resolve()  # of a link, which must stay
        target.touch(exist_ok=False)
        target.unlink()
    except OSError:
        return False
    return True


def check_json_name(path: Path, what: str, *, hint: str) -> None:
    """Raise unless a name ends in .json, as the name of a plan or machine file must; arguments as for ``json_object``.

    Raises:
        DataError: It does not.
    """
    if path.suffix != ".json":
        raise DataError(f"{what} has another ending", expected="a name that ends in .json", hint=hint)


def check_replaceable(path: Path, what: str, result: AbstractSet[str] | str, *, hint: str) -> None:
    """Raise if a file cannot be written, or would replace anything but an earlier result.

    Args:
        path: The file.
        what: Name of the file in errors.
        result: Keys of every result in JSON, or how every other result begins.
        hint: Hint of errors.

    Raises:
        DataError: It cannot, or would.
    """
    check_writable(path, what, hint=hint)
    if not isinstance(result, str):
        check_json_name(path, what, hint=hint)
    if not path.exists() or not path.stat().st_size:
        return
    expected = "a new file, or an earlier result"
    if isinstance(result, str):
        try:
            with path.open("rb") as file:
                same = file.read(len(result)) == result.encode()
        except OSError as error:
            raise DataError(f"{what} cannot be read ({error.strerror})", expected=expected, hint=hint) from error
    else:
        same = result <= json_object(path, what, expected=expected, hint=hint).keys()
    if not same:
        raise DataError(f"{what} holds something else", expected=expected, hint=hint)
