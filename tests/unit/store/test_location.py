"""Which directories may hold offloaded bytes."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ebbtide.base.errors import DiskError
from ebbtide.doctor.facts import look_at_disk
from ebbtide.store.disk import DiskTier
from ebbtide.store.location import check_directory, default_directory, filesystem_of


def mounts(path: Path, *lines: tuple[str, str]) -> Path:
    path.write_text(
        "".join(
            f"{i} 1 8:{i} / {point} rw,noatime shared:1 - {kind} /dev/x rw\n" for i, (point, kind) in enumerate(lines)
        )
    )
    return path


def test_filesystem_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    table = mounts(
        tmp_path / "mountinfo", ("/", "ext4"), ("/ram", "tmpfs"), ("/ram/disk", "xfs"), ("/with\\040space", "ramfs")
    )
    cases = {"/a": "ext4", "/ram/x": "tmpfs", "/ram/disk/y": "xfs", "/ramble": "ext4", "/with space/z": "ramfs"}
    assert {p: filesystem_of(p, mountinfo=table) for p in cases} == cases
    assert filesystem_of("/a", mountinfo=tmp_path / "absent") == ""


def test_a_mount_whose_name_is_no_text_hides_no_other(tmp_path: Path) -> None:
    lines = [
        "1 0 0:1 / / rw - ext4 /dev/a rw",
        "2 1 0:2 / /b\xff rw - xfs /dev/b rw",
        "3 1 0:3 / /\xa0c rw - tmpfs c rw",
    ]
    table = tmp_path / "mountinfo"
    table.write_bytes("\n".join(lines).encode("latin-1"))
    for path, kind in {b"/a": "ext4", b"/b\xff/x": "xfs", b"/\xa0c/x": "tmpfs"}.items():
        assert filesystem_of(os.fsdecode(path), mountinfo=table) == kind
    table.write_bytes(lines[0].encode() + "\n3 1 0:3 / /\xa0c rw - tmpfs c rw".encode())
    assert filesystem_of("/\xa0c/x", mountinfo=table) == "tmpfs"


def test_the_last_mount_on_a_point_counts(tmp_path: Path) -> None:
    assert filesystem_of("/m/x", mountinfo=mounts(tmp_path / "m", ("/m", "tmpfs"), ("/m", "ext4"))) == "ext4"


@pytest.mark.skipif(filesystem_of("/dev/shm") != "tmpfs", reason="there is no /dev/shm")
def test_ram_is_refused() -> None:
    with pytest.raises(DiskError, match="is on tmpfs, which is RAM") as caught:
        DiskTier("/dev/shm")
    assert "hint: " in str(caught.value)


def test_missing_and_not_writable_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="does not exist"):
        check_directory(tmp_path / "absent")
    with pytest.raises(DiskError, match="not a directory"):
        check_directory(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(DiskError, match="not writable"):
        check_directory(tmp_path)


def test_a_directory_in_a_folder_that_may_not_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path.is_dir`` raises the system's error for it."""
    stat = os.stat

    def closed(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if os.fspath(path).startswith("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *given, **named)

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(DiskError, match="disk path '/closed/scratch' does not exist"):
        check_directory("/closed/scratch")
    found = look_at_disk("/closed/scratch")
    assert found.free_bytes is None and found.refused == "disk path '/closed/scratch' does not exist"


def test_a_directory_stays_the_same_when_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_directory("scratch") == tmp_path / "scratch"


def test_default_is_the_first_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "absent"))
    monkeypatch.setattr("ebbtide.store.location.check_directory", _only(tmp_path / ".cache" / "ebbtide"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "ebbtide"


def test_no_default_says_why_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.location.check_directory", _only(tmp_path / "other"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DiskError) as caught:
        default_directory()
    assert "/var/tmp" in str(caught.value) and ".cache/ebbtide" in str(caught.value)


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number without an account."""

    def expanduser(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert default_directory().is_dir()
    with pytest.raises(DiskError, match="'~/scratch' is in a home directory that is not known"):
        check_directory("~/scratch")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(DiskError) as caught:
        default_directory()
    assert "/var/tmp" in str(caught.value) and "is in a home directory that is not known" in str(caught.value)


def _only(good: Path):
    def check(path: str) -> Path:
        if Path(path).expanduser() != good:
            raise DiskError(f"disk path {str(path)!r} is refused")
        return good

    return check
