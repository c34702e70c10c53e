"""Memory of reads is reused, within a bound."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from ebbtide.store.buffers import Buffer, BufferPool
from ebbtide.store.pages import fetch_pages, give_pages


def test_memory_of_a_dead_tensor_is_used_again() -> None:
    pool = BufferPool(1 << 20)
    first = Buffer(5000, 64, pool).tensor()
    address, view = first.data_ptr(), first.view(torch.int32)
    del first
    assert pool.spare_bytes == 0  # the view still holds it
    del view
    assert pool.spare_bytes == 8192
    again = Buffer(6000, 128, pool)
    assert again.address == address + 64
    assert pool.spare_bytes == 0


def test_the_oldest_go_when_there_are_too_many() -> None:
    pool = BufferPool(3 * 4096)
    buffers = [Buffer(4096, 0, pool) for _ in range(3)] + [Buffer(8192, 0, pool)]
    while buffers:
        buffers.pop(0)
    gc.collect()
    assert pool.spare_bytes == 3 * 4096
    assert pool.find(8192) is not None and pool.find(4096) is not None and pool.find(4096) is None


def test_a_map_that_is_dropped_while_it_is_looked_for_is_not_found() -> None:
    pool = BufferPool(1 << 20)
    Buffer(4096, 0, pool)

    class Taken(type(pool._spare)):  # type: ignore[misc]
        def copy(self) -> Taken:
            found = Taken(self)
            self.clear()  # like another thread's ``give``, which drops the oldest
            return found

    pool._spare = Taken(pool._spare)
    assert pool.find(4096) is None


def test_trim_empties_and_can_close() -> None:
    pool = BufferPool(1 << 20)
    kept = Buffer(4096, 0, pool)
    Buffer(4096, 0, pool)
    assert pool.spare_bytes == 4096
    pool.trim(limit_bytes=0)
    del kept
    assert pool.spare_bytes == 0


def test_memory_is_mapped_in_at_once_and_keeps_its_contents() -> None:
    memory = Buffer(4 << 20, 0).tensor()
    memory[5000:5003] = 7
    give_pages(memory.data_ptr() + 4097, (4 << 20) - 4097)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(memory.data_ptr() + (1 << 20), 1, 3 << 20)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert int(memory.sum()) == 21 + (3 << 20)
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        assert faults < 200, "of 768 pages"


def test_memory_of_another_is_not_touched() -> None:
    assert give_pages(mmap.PAGESIZE, 100)  # nothing is mapped there: the system refuses


def test_other_systems_than_linux_are_not_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("ebbtide.store.pages._libc", lambda: None)
    assert give_pages(mmap.PAGESIZE, 100) == errno.ENOSYS
    assert fetch_pages(0, 0, 100) == errno.ENOSYS


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="needs Linux 5.14")
def test_a_part_of_a_file_is_fetched_and_nothing_stays_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    with path.open("rb") as file:
        assert fetch_pages(file.fileno(), 4097, (2 << 20) + 1) == 0
        assert str(path) not in Path("/proc/self/maps").read_text()
        os.truncate(path, 100)
        assert fetch_pages(file.fileno(), 1 << 20, 1 << 20) == errno.EFAULT  # instead of a signal
        assert str(path) not in Path("/proc/self/maps").read_text()
    assert fetch_pages(-1, 0, 100) == errno.EBADF
