"""Reading a checkpoint into the page cache ahead of the reader: each byte by one rank; nothing depends on it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ebbtide.load import ahead as ahead_module
from ebbtide.load.ahead import ReadAhead
from ebbtide.load.header import CheckpointEntry, read_header
from ebbtide.store.pages import fetch_pages

SMALL_BLOCK = 1 << 20


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CheckpointEntry]:
    monkeypatch.setattr(ahead_module, "cached_share", lambda fd: 0.0)
    monkeypatch.setattr(ahead_module, "BLOCK_BYTES", SMALL_BLOCK)
    save_file({"a": torch.ones(SMALL_BLOCK // 4 * 3 + 5), "b": torch.ones(7)}, tmp_path / "1.safetensors")
    save_file({"c": torch.ones(1001, dtype=torch.uint8)}, tmp_path / "2.safetensors")
    return [e for n in (1, 2) for e in read_header(tmp_path / f"{n}.safetensors").values()]


def finished(ahead: ReadAhead) -> None:
    with ahead:
        for thread in [t for t in threading.enumerate() if t.name == "ebbtide-load-ahead"]:
            thread.join()


def noting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record the fetched parts of files."""
    spans: list[tuple[str, int, int]] = []

    def noted(fd: int, offset_bytes: int, nbytes: int) -> int:
        spans.append((os.readlink(f"/proc/self/fd/{fd}"), offset_bytes, offset_bytes + nbytes))
        return fetch_pages(fd, offset_bytes, nbytes)

    monkeypatch.setattr(ahead_module, "fetch_pages", noted)
    return spans


def fetched_bytes(spans: list[tuple[str, int, int]]) -> int:
    return sum(end - begin for _, begin, end in spans)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_ranks_together_fetch_every_byte_once(
    entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    spans, by_part = noting(monkeypatch), list[int]()
    for part in range(parts):
        before = fetched_bytes(spans)
        finished(ReadAhead(entries, part, parts))
        by_part.append(fetched_bytes(spans) - before)
    assert sum(by_part) == sum(e.nbytes for e in entries)
    assert max(by_part) - min(by_part) <= 2 * SMALL_BLOCK  # a file's blocks are distributed from the first rank on
    assert all(end - begin <= SMALL_BLOCK for _, begin, end in spans)
    for file in {e.file for e in entries}:
        found = sorted((begin, end) for path, begin, end in spans if path == os.path.realpath(file) and end > begin)
        first = min(e.offset_bytes for e in entries if e.file == file)
        assert [begin for begin, _ in found] == [first, *(end for _, end in found[:-1])]
        assert found[-1][1] == os.path.getsize(file)


def test_tensors_that_are_not_needed_are_left_out(
    entries: list[CheckpointEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({name: torch.ones(SMALL_BLOCK // 4) for name in "xyz"}, tmp_path / "3.safetensors")
    x, y, z = (read_header(tmp_path / "3.safetensors")[name] for name in "xyz")
    spans = noting(monkeypatch)
    finished(ReadAhead([z, x], 0, 1))
    assert [(begin, end) for _, begin, end in spans] == [(e.offset_bytes, e.offset_bytes + e.nbytes) for e in (x, z)]
    assert x.offset_bytes < y.offset_bytes < z.offset_bytes


def test_it_ends_with_its_context(entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    ahead, sizes = ReadAhead(entries, 0, 1), list[int]()

    def slow(fd: int, offset_bytes: int, nbytes: int) -> int:
        sizes.append(nbytes)
        begun.set()
        ahead._stop.wait(10)  # the context ends during the first block
        return fetch_pages(fd, offset_bytes, nbytes)

    monkeypatch.setattr(ahead_module, "fetch_pages", slow)
    with pytest.raises(KeyError), ahead:
        assert begun.wait(10)
        raise KeyError
    assert sizes == [SMALL_BLOCK]
    assert not [t for t in threading.enumerate() if t.name == "ebbtide-load-ahead"]


def test_a_system_that_cannot_fetch_leaves_it_to_the_reader(
    entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(fd: int, offset_bytes: int, nbytes: int) -> int:
        tried.append(os.readlink(f"/proc/self/fd/{fd}"))
        return errno.EINVAL

    monkeypatch.setattr(ahead_module, "fetch_pages", refuse)
    finished(ReadAhead(entries, 0, 1))
    assert tried == [os.path.realpath(file) for file in dict.fromkeys(e.file for e in entries)]  # one block of each


@pytest.mark.parametrize(("function", "value"), [("cached_share", 1.0), ("fits_page_cache", False)])
def test_cached_files_and_a_checkpoint_that_does_not_fit_are_left_to_the_reader(
    entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch, function: str, value: object
) -> None:
    monkeypatch.setattr(ahead_module, function, lambda _: value)
    spans = noting(monkeypatch)
    finished(ReadAhead(entries, 0, 1))
    assert spans == []


def test_a_deleted_file_is_left_to_the_reader(entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    os.unlink(entries[0].file)
    spans = noting(monkeypatch)
    finished(ReadAhead(entries, 0, 1))
    assert fetched_bytes(spans) == 1001
