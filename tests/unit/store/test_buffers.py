"""Memory of reads is reused, within a bound."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import re
import resource
import threading
import weakref
from pathlib import Path

import pytest
import torch

from ebbtide.store.buffers import CHUNK_BYTES as CHUNK
from ebbtide.store.buffers import Buffer, BufferPool
from ebbtide.store.pages import HUGE_PAGE_BYTES, fetch_pages, give_pages

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no huge pages"
)


def test_memory_of_a_dead_tensor_is_used_again() -> None:
    pool = BufferPool()
    first = Buffer(5000, 64, pool).tensor()
    address, view = first.data_ptr(), first.view(torch.int32)
    del first
    other = Buffer(6000, 128, pool)
    assert abs(other.address - address) >= 5000  # the view still holds it
    del view
    again = Buffer(6000, 128, pool)
    assert again.address == address + 64
    assert pool.size_bytes == CHUNK


def test_tensors_of_all_sizes_share_chunks() -> None:
    pool = BufferPool()
    tensors = [Buffer(nbytes, 64, pool).tensor().fill_(n) for n, nbytes in enumerate((3 << 20, 100, 900_000, 1 << 20))]
    assert pool.size_bytes == CHUNK
    assert [int(t[-1]) for t in tensors] == [0, 1, 2, 3]
    spans = sorted((t.data_ptr() // mmap.PAGESIZE, -(-(t.data_ptr() + t.numel()) // mmap.PAGESIZE)) for t in tensors)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "they share a page"
    large = Buffer(CHUNK + 1, 0, pool)
    assert pool.size_bytes == CHUNK + 2 * CHUNK
    del large


@needs_huge_pages
@pytest.mark.parametrize(("pooled", "reclaimed"), [(True, True), (True, False), (False, True), (False, False)])
def test_chunks_may_have_huge_pages_and_begin_at_one(
    pooled: bool, reclaimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used once has none where their first use is costly."""
    monkeypatch.setattr("ebbtide.store.pages.host_reclaims_pages", lambda: reclaimed)
    buffer = Buffer(4 << 20, 64, BufferPool() if pooled else None)
    assert (buffer.address - 64) % HUGE_PAGE_BYTES == 0
    assert ("hg" in _flags_at(buffer.address)) == (pooled or not reclaimed)


def _flags_at(address: int) -> list[str]:
    """Return what the kernel notes of the mapping at an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            here = begin <= address < end
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


@pytest.fixture
def host_keeps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.buffers.host_reclaims_pages", lambda: False)


@pytest.mark.usefixtures("host_keeps_pages")
def test_chunks_stay_for_the_next_backward_up_to_an_eighth_of_what_was_read() -> None:
    pool = BufferPool()
    buffers = [Buffer(CHUNK // 2, 0, pool) for _ in range(4)]
    address = buffers[0].address
    assert pool.size_bytes == 2 * CHUNK
    while buffers:
        buffers.pop()
    for _ in range(12):  # one after the other: together eight times a chunk
        assert Buffer(CHUNK // 2, 0, pool).address == address
    pool.trim()
    assert pool.size_bytes == CHUNK
    assert Buffer(CHUNK // 2, 0, pool).address == address
    pool.trim()  # less was read
    assert pool.size_bytes == 0


def test_used_chunks_stay_where_the_host_takes_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.buffers.host_reclaims_pages", lambda: True)
    pool = BufferPool()
    for _ in range(2):
        buffers = [Buffer(CHUNK // 2, 0, pool) for _ in range(4)]
        del buffers
        pool.trim()
        assert pool.size_bytes == 2 * CHUNK
    Buffer(CHUNK // 2, 0, pool)
    pool.trim()  # less was read at once
    assert pool.size_bytes == CHUNK
    pool.trim()  # nothing was read
    assert pool.size_bytes == 0
    Buffer(CHUNK // 2, 0, pool)
    pool.trim(all_chunks=True)
    assert pool.size_bytes == 0


@pytest.fixture(params=[True, False])
def any_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that reclaims pages, and one that does not."""
    monkeypatch.setattr("ebbtide.store.buffers.host_reclaims_pages", lambda: request.param)


@pytest.mark.usefixtures("any_host")
def test_chunks_that_are_too_small_for_the_next_read_do_not_stay() -> None:
    """As in the backward of a network whose tensors shrink: each read is larger than the ones before it."""
    pool = BufferPool()
    for size in range(1, 9):
        Buffer(size * CHUNK, 0, pool)
        assert pool.size_bytes == size * CHUNK
    kept = Buffer(8 * CHUNK, 0, pool)
    Buffer(9 * CHUNK, 0, pool)
    assert pool.size_bytes == 17 * CHUNK, "one is in use"
    del kept
    pool.trim()
    assert pool.size_bytes <= 8 * CHUNK


@pytest.mark.usefixtures("any_host")
def test_the_chunk_of_one_large_read_does_not_stay_for_small_ones() -> None:
    pool = BufferPool()
    Buffer(20 * CHUNK, 0, pool)
    pool.trim()
    for _ in range(2):
        Buffer(4096, 0, pool)
        pool.trim()
    assert pool.size_bytes <= CHUNK


def test_a_tensor_outlives_its_pool_and_then_its_memory_is_unmapped() -> None:
    pool = BufferPool()
    kept = Buffer(4096, 0, pool).tensor().fill_(7)
    memory = weakref.ref(pool._chunks[0].memory)
    pool.trim(all_chunks=True)
    assert pool.size_bytes == 0 and int(kept.sum()) == 7 * 4096
    del kept
    gc.collect()
    assert memory() is None


def test_places_return_from_any_thread() -> None:
    pool = BufferPool()
    for _ in range(3):
        held = [Buffer(1 << 20, 0, pool).tensor() for _ in range(2)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    assert pool.size_bytes == CHUNK


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
