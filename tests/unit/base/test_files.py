"""Files that a user names: the contents of errors, and early detection of a file that cannot be written."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from ebbtide.base.errors import DataError
from ebbtide.base.files import check_json_name, check_replaceable, check_writable, json_object, replacing, write_text


@pytest.mark.parametrize(
    ("text", "found"), [("{", "x is not JSON: "), ("[" * 99999, "x is not JSON: "), ("[1]", r"x is \[1\]")]
)
def test_text_that_is_no_object_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "a.json").write_text(text)
    for source in (text, tmp_path / "a.json"):
        with pytest.raises(DataError, match=f"{found}.*; expected an object\nhint: do this"):
            json_object(source, "x", expected="an object", hint="do this")


def test_a_missing_file_is_compared_with_its_neighbors(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text("{}")
    with pytest.raises(DataError, match=r"x cannot be read \(No such file.*\nhint: did you mean 'machine.json'"):
        json_object(tmp_path / "machin.json", "x", expected="an object", hint="do this")
    with pytest.raises(DataError, match="hint: do this"):
        json_object(tmp_path / "none" / "machine.json", "x", expected="an object", hint="do this")


def test_a_file_that_may_not_be_written_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "a.json", "x", hint="do this")
    with pytest.raises(DataError, match="x is a folder; .*\nhint: do this"):
        check_writable(tmp_path, "x", hint="do this")
    with pytest.raises(DataError, match="x cannot be written: there is no folder"):
        check_writable(tmp_path / "none" / "a.json", "x", hint="do this")
    with pytest.raises(DataError, match=r"a.json' cannot be written \(No such file"):
        write_text(tmp_path / "none" / "a.json", "")
    with pytest.raises(DataError, match="x cannot be written; expected a writable file\nhint: do this"):
        check_writable(Path("/proc/a.json"), "x", hint="do this")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")  # to a missing file
    check_writable(tmp_path / "link.json", "x", hint="do this")
    assert (tmp_path / "link.json").is_symlink() and not (tmp_path / "a.json").exists()
    (tmp_path / "a.json").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataError, match="x cannot be written; expected a writable file\nhint: do this"):
        check_writable(tmp_path / "a.json", "x", hint="do this")


def test_only_an_earlier_result_is_replaced(tmp_path: Path) -> None:
    def check(name: str, content: str | None) -> None:
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        check_replaceable(path, "x", {"rows", "name"}, hint="do this")

    check("new.json", None)
    check("old.json", '{"rows": 1, "name": 2, "more": 3}')
    check("empty.json", "")
    with pytest.raises(DataError, match="x has another ending; expected a name that ends in .json\nhint: do this"):
        check("old.txt", '{"rows": 1, "name": 2}')
    for content in ('{"hidden_size": 1, "name": 2}', "import os", "[1]"):
        with pytest.raises(DataError, match="expected a new file, or an earlier result\nhint: do this"):
            check("config.json", content)
    with pytest.raises(
        DataError, match="x holds something else; expected a new file, or an earlier result\nhint: do this"
    ):
        check_replaceable(tmp_path / "config.json", "x", "<svg ", hint="do this")
    with pytest.raises(DataError, match="ends in .json"):
        check_json_name(Path("plan"), "x", hint="do this")


def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for name, result in (("plan.svg", "<svg "), ("plan.json", {"rows"})):
        (tmp_path / name).write_text("<svg ")
        monkeypatch.setattr(Path, "open", refuse)
        monkeypatch.setattr(Path, "read_text", refuse)
        with pytest.raises(DataError, match=r"x cannot be read \(Permission denied\); expected .*\nhint: do this"):
            check_replaceable(tmp_path / name, "x", result, hint="do this")
        monkeypatch.undo()


def test_a_file_that_cannot_be_written_to_its_end_is_not_left(tmp_path: Path) -> None:
    """A part of a page or plan looks like one, and would not be replaced without --force."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(DataError, match="cannot be written .File too large."):
            write_text(tmp_path / "new", "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_at_once_and_stays_if_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order = tmp_path / "a.json", list[str]()
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda one, other: (order.append(str(other)), replace(one, other))[1])
    for text in ("old", "new"):
        with replacing(path) as draft:
            draft.write_text(text)
    assert path.read_text() == "new" and order == [f"{path}.part", str(path)] * 2
    for error in (OSError(errno.ENOSPC, ""), KeyboardInterrupt()):
        with pytest.raises(type(error)), replacing(path) as draft:
            draft.write_text("half")
            raise error
        assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]
