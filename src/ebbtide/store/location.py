"""Choose the directory for offloaded bytes on disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ebbtide.base.errors import DiskPathError

RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems in memory."""
_MOUNTINFO = Path("/proc/self/mountinfo")
_CACHE = "~/.cache/ebbtide"


def filesystem_of(path: str | os.PathLike[str], *, mountinfo: Path = _MOUNTINFO) -> str:
    """Return the type of the file system that holds ``path`` (``"ext4"``, ``"tmpfs"``), or ``""`` if not known."""
    try:
        lines = os.fsdecode(mountinfo.read_bytes()).split("\n")
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, filesystem = -1, ""
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        # The last of several mounts at one point is visible.
        if os.path.commonpath([real, mount]) == mount and len(mount) >= best:
            best, filesystem = len(mount), right.split()[0]
    return filesystem


def check_directory(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, made absolute, if it can hold offloaded bytes.

    Raises:
        DiskPathError: It is missing, not a directory, not writable, or in RAM.
    """
    hint = "name a directory on a local disk as disk_path"
    try:
        directory = Path(path).expanduser()
    except RuntimeError as error:  # as in a container whose user has neither an account nor HOME
        found = f"disk path {os.fspath(path)!r} is in a home directory that is not known"
        raise DiskPathError(found, expected="an existing directory", hint=hint) from error
    if not os.path.isdir(directory):  # ``Path.is_dir`` raises for what is in a folder that may not be read
        what = "is not a directory" if os.path.exists(directory) else "does not exist"
        raise DiskPathError(f"disk path {str(directory)!r} {what}", expected="an existing directory", hint=hint)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DiskPathError(f"disk path {str(directory)!r} is not writable", expected="a writable directory", hint=hint)
    filesystem = filesystem_of(directory)
    if filesystem in RAM_FILESYSTEMS:
        raise DiskPathError(
            f"disk path {str(directory)!r} is on {filesystem}, which is RAM",
            expected="a file system on a disk",
            hint=hint,
        )
    return directory.absolute()  # the program may change its directory before a file is made here


def default_directory() -> Path:
    """Return the first of the usual directories that is on a disk and writable.

    Raises:
        DiskPathError: None is usable; the message gives the reason for each.
    """
    reasons: list[str] = []
    for candidate in (tempfile.gettempdir(), "/var/tmp", _CACHE):
        try:
            if candidate == _CACHE:
                with contextlib.suppress(RuntimeError):  # as ``check_directory`` explains
                    Path(candidate).expanduser().mkdir(parents=True, exist_ok=True)
            return check_directory(candidate)
        except DiskPathError as error:
            reasons.append(error.found)
        except OSError as error:
            reasons.append(f"disk path {candidate!r}: {error.strerror}")
    raise DiskPathError(
        "no directory for offloaded bytes: " + " · ".join(reasons),
        expected="a writable directory on a disk",
        hint="name one as disk_path",
    )
