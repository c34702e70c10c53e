"""Choose the directory for offloaded bytes on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ebbtide.base.errors import DiskPathError

RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems in memory."""
_MOUNTINFO = Path("/proc/self/mountinfo")


def filesystem_of(path: str | os.PathLike[str], *, mountinfo: Path = _MOUNTINFO) -> str:
    """Return the type of the file system that holds ``path`` (``"ext4"``, ``"tmpfs"``), or ``""`` if not known."""
    try:
        lines = os.fsdecode(mountinfo.read_bytes()).split("\n")
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        # The last of several mounts at one point is visible.
        if os.path.commonpath([real, mount]) == mount and len(mount) >= best:
            best, kind = len(mount), right.split()[0]
    return kind


def check_directory(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, made absolute, if it can hold offloaded bytes.

    Raises:
        DiskPathError: It is missing, not a directory, not writable, or in RAM.
    """
    directory = Path(path).expanduser()
    hint = "name a directory on a local disk as disk_path"
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise DiskPathError(f"disk path {str(directory)!r} {what}", expected="an existing directory", hint=hint)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DiskPathError(f"disk path {str(directory)!r} is not writable", expected="a writable directory", hint=hint)
    kind = filesystem_of(directory)
    if kind in RAM_FILESYSTEMS:
        raise DiskPathError(
            f"disk path {str(directory)!r} is on {kind}, which is RAM",
            expected="a file system on a disk",
            hint=hint,
        )
    return directory.absolute()  # the program may change its directory before a file is made here


def default_directory() -> Path:
    """Return the first of the usual directories that is on a disk and writable.

    Raises:
        DiskPathError: None is usable; the message gives the reason for each.
    """
    cache = Path("~/.cache/ebbtide").expanduser()
    reasons: list[str] = []
    for candidate in (Path(tempfile.gettempdir()), Path("/var/tmp"), cache):
        try:
            if candidate == cache:
                candidate.mkdir(parents=True, exist_ok=True)
            return check_directory(candidate)
        except DiskPathError as error:
            reasons.append(error.found)
        except OSError as error:
            reasons.append(f"disk path {str(candidate)!r}: {error.strerror}")
    raise DiskPathError(
        "no directory for offloaded bytes: " + " · ".join(reasons),
        expected="a writable directory on a disk",
        hint="name one as disk_path",
    )
