"""Reading boxes from files: the right elements, from few bytes, by either kind of input."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ebbtide.base.errors import DataError
from ebbtide.load import reader as reader_module
from ebbtide.load.header import CheckpointEntry, read_header
from ebbtide.load.layout import Box, Piece
from ebbtide.load.reader import CHUNK_BYTES, READERS, CheckpointFile, SliceReader, cached_share, place_of, spans_of
from ebbtide.store.pages import resident_pages

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]


def written(path: Path, **tensors: torch.Tensor) -> dict[str, CheckpointEntry]:
    save_file(tensors, path)
    return read_header(path)


def read_directly(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Have files read with direct I/O, or through the page cache."""
    monkeypatch.setattr(reader_module, "fits_page_cache", lambda entries: not direct)
    monkeypatch.setattr(reader_module, "cached_share", lambda fd: 0.0)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boxes_are_what_the_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, direct: bool
) -> None:
    read_directly(monkeypatch, direct)
    whole = torch.randint(0, 200, (301, 37, 5)).to(dtype)
    entries = written(tmp_path / "x.safetensors", odd=torch.ones(3, dtype=torch.uint8), x=whole)
    found: list[tuple[Box, torch.Tensor]] = []
    for start, size in [((0, 0, 0), (301, 37, 5)), ((17, 0, 0), (100, 37, 5)), ((3, 5, 1), (250, 7, 3)),
                        ((300, 36, 4), (1, 1, 1))]:  # fmt: skip
        found.append((Box(start=start, size=size), torch.zeros(size, dtype=dtype)))
    turned = torch.zeros(5, 301, 37, dtype=dtype).permute(1, 2, 0)
    found.append((Box.full(whole.shape), turned))
    counted: list[int] = []
    with SliceReader(entries) as reader:
        reader.read([Piece(key="x", box=box, into=into) for box, into in found], counted.append)
    assert sum(counted) == sum(box.numel for box, _ in found) * dtype.itemsize
    assert all(torch.equal(into, box.of(whole)) for box, into in found)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16], ids=str)
def test_values_are_converted_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, direct: bool
) -> None:
    read_directly(monkeypatch, direct)
    whole = torch.randn(100, 30, dtype=torch.bfloat16)
    entries = written(tmp_path / "x.safetensors", x=whole)
    into = torch.empty(100, 30, dtype=dtype)
    with SliceReader(entries) as reader:
        reader.read([Piece(key="x", box=Box.full(whole.shape), into=into)])
    assert torch.equal(into, whole.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["same", "converted"])
def test_bytes_that_stay_as_they_are_are_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    whole = torch.randn(64, 4096, dtype=torch.bfloat16)
    entries = written(tmp_path / "x.safetensors", x=whole)
    into, box = torch.empty(16, 4096, dtype=dtype), Box(start=(8, 0), size=(16, 4096))
    real, addresses, sizes = os.preadv, list[int](), list[int]()

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        addresses.append(torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr())
        sizes.append(real(fd, buffers, offset))
        return sizes[-1]

    read_directly(monkeypatch, False)
    monkeypatch.setattr(os, "preadv", counted)
    with SliceReader(entries) as reader:
        reader.read([Piece(key="x", box=box, into=into)])
    assert sizes == [16 * 4096 * 2]
    assert torch.equal(into, box.of(whole).to(dtype))
    assert len(addresses) == 1
    assert (addresses == [into.data_ptr()]) == (dtype is torch.bfloat16)


def test_little_tensors_share_a_job_and_large_ones_have_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 2 * CHUNK_BYTES)
    values = {f"{i:02}": torch.full((100,), float(i)) for i in range(50)}
    values["large"] = torch.arange(CHUNK_BYTES, dtype=torch.float32)  # four chunks
    entries = written(tmp_path / "x.safetensors", **values)
    into = {key: torch.empty_like(value) for key, value in values.items()}
    counted: list[int] = []
    with SliceReader(entries) as reader:
        pieces = [Piece(key=key, box=Box.full(one.shape), into=one) for key, one in into.items()]
        reader.read(pieces, counted.append)
    assert {key: torch.equal(into[key], value) for key, value in values.items()} == dict.fromkeys(values, True)
    assert sorted(counted) == [2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 50 * 400]


def test_columns_of_the_same_dtype_are_not_read_as_if_they_were_rows(tmp_path: Path) -> None:
    whole = torch.arange(64 * 64, dtype=torch.int64).view(64, 64)
    entries = written(tmp_path / "x.safetensors", x=whole)
    columns, turned = torch.empty(64, 16, dtype=torch.int64), torch.empty(64, 64, dtype=torch.int64)
    with SliceReader(entries) as reader:
        reader.read([Piece(key="x", box=Box(start=(0, 8), size=(64, 16)), into=columns)])
        reader.read([Piece(key="x", box=Box.full(whole.shape), into=turned.t())])
    assert torch.equal(columns, whole[:, 8:24])
    assert torch.equal(turned, whole.t())


def test_the_page_cache_takes_what_fits_into_half_of_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = written(tmp_path / "x.safetensors", x=torch.ones(1000), y=torch.ones(1000))
    found: list[tuple[bool, bool]] = []
    real = reader_module.CheckpointFile
    monkeypatch.setattr(
        reader_module,
        "CheckpointFile",
        lambda path, **options: (found.append((options["direct"], options["ahead"])), real(path, **options))[1],
    )
    pieces = [Piece(key=key, box=Box.full((1000,)), into=torch.empty(1000)) for key in ("x", "y")]
    for free, ahead in ((16_000, True), (15_999, True), (15_999, False)):
        monkeypatch.setattr(reader_module, "free_memory_bytes", lambda free=free: free)
        with SliceReader(entries, shared={"y"}, ahead=ahead) as reader:
            for piece in pieces:
                reader.read([piece])
        assert all((piece.into == 1).all() for piece in pieces)
    assert found == [*[(False, True)] * 2, (True, True), (False, True), (True, False), (False, False)]


def test_without_reading_ahead_the_kernel_fetches_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: advised.append(advice))
    CheckpointFile(str(tmp_path / "x"), ahead=True).close()
    assert advised == []
    CheckpointFile(str(tmp_path / "x"), ahead=False).close()
    assert advised == [os.POSIX_FADV_RANDOM]


def boxes_read(shape: tuple[int, ...], box: Box) -> list[Box]:
    """Return the boxes that are read at once for a box of a tensor in bfloat16."""
    piece = Piece(key="x", box=box, into=torch.empty(box.size, device="meta"))
    return [span.box for span in spans_of(piece, CheckpointEntry(shape=shape, dtype=torch.bfloat16))]


def test_a_half_of_the_rows_costs_half_of_the_bytes() -> None:
    box = Box(start=(2048, 0), size=(2048, 4096))
    found = boxes_read((4096, 4096), box)
    assert sum(one.numel for one in found) == box.numel
    assert all(one.numel * 2 <= CHUNK_BYTES for one in found)
    assert len(found) == box.numel * 2 // CHUNK_BYTES


def test_long_runs_are_read_without_what_lies_between() -> None:
    found = boxes_read((8, 1 << 20), Box(start=(0, 1 << 19), size=(8, 1 << 19)))
    assert found == [Box(start=(row, 1 << 19), size=(1, 1 << 19)) for row in range(8)]


def test_short_runs_are_read_together() -> None:
    box = Box(start=(0, 0), size=(1024, 32))
    assert boxes_read((1024, 64), box) == [box]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_exact_spans_are_runs_that_tile_the_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(start=start, size=tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)))
    entry = CheckpointEntry(shape=shape, dtype=torch.uint8, offset_bytes=8)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).view(shape)
    memory = torch.zeros(8 + whole.numel(), dtype=torch.uint8)
    for run in spans_of(Piece(key="x", box=box, into=box.of(whole)), entry, exact=True):
        at = place_of(run.box, entry)
        memory[at : at + run.box.numel] = run.into.flatten()
    expected = torch.zeros_like(whole)
    box.of(expected).copy_(box.of(whole))
    assert torch.equal(memory[8:].view(shape), expected)


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def resident_share(fd: int) -> float:
    """Return which part of a file is in the page cache; its owner is told the truth."""
    pages = resident_pages(fd, os.fstat(fd).st_size)
    assert pages is not None
    return sum(pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root takes another user's rights")
def test_how_much_is_cached_of_a_file_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(64 << 20))
    looks, cached, resident = list[float](), 0.0, 0.0
    with (tmp_path / "x").open("rb", buffering=0) as file:
        fd = file.fileno()
        os.fsync(fd)
        try:
            os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            pytest.skip(f"this file system has no reads without waiting ({error})")
        while resident < 1:  # the kernel may take the memory for others, also before the look
            os.preadv(fd, [bytearray(64 << 20)], 0)
            with another_user():
                cached = cached_share(fd)
            resident = resident_share(fd)
        for _ in range(40):  # a second look must not find the pages of the first one: one of 16 at each place
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while resident_share(fd) > 0.02:  # the kernel keeps pages that it uses itself, such as to find free memory
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with another_user():
                looks += [cached_share(fd), cached_share(fd)]
    assert cached == 1
    assert max(looks) < 0.6  # also of the second rank that looks


@pytest.mark.parametrize(("error", "share"), [(errno.EAGAIN, 0.0), (errno.EOPNOTSUPP, 1.0)])
def test_a_file_that_seems_cached_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, share: float
) -> None:
    (tmp_path / "x").write_bytes(bytes(100_000))

    def refusing(fd: int, buffers: object, offset: int, flags: int) -> int:
        raise OSError(error, os.strerror(error))

    with open(tmp_path / "x", "rb") as file:
        assert cached_share(file.fileno()) == 1
        monkeypatch.setattr(os, "preadv", refusing)
        assert cached_share(file.fileno()) == share


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "cached_share", lambda fd: 0.0)
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 64)
    file = CheckpointFile(str(path), direct=True)
    real = os.preadv

    def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if file.direct:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    staging = torch.zeros(3 * 4096, dtype=torch.uint8)
    staging = staging[-staging.data_ptr() % 4096 :]
    at = file.read(staging.data_ptr(), 5, 300)
    file.close()
    assert staging[at : at + 300].tolist() == [i % 256 for i in range(5, 305)]
    assert not file.direct


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_a_file_that_shrinks_meanwhile_is_an_error_and_no_thread_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    read_directly(monkeypatch, direct)
    entries = written(tmp_path / "x.safetensors", x=torch.ones(100_000), y=torch.ones(100_000))
    real = os.preadv

    def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(tmp_path / "x.safetensors", 601_000)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    into = torch.zeros(100_000)
    with pytest.raises(DataError, match=r"cannot be read at 'y' \(the file ends"), SliceReader(entries) as r:
        r.read([Piece(key=k, box=Box.full((100_000,)), into=into) for k in ("y", "x")])
    assert not [t for t in threading.enumerate() if t.name.startswith("ebbtide-load")]


@pytest.mark.parametrize("moment", ["before it is opened", "while it is read"])
def test_a_file_that_is_replaced_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "x.safetensors"
    entries = written(path, x=torch.ones(1000))
    into, real = torch.zeros(1000), os.preadv

    def replacing(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        path.write_bytes(path.read_bytes()[:-4000] + bytes(4000))
        return count

    if moment == "while it is read":
        monkeypatch.setattr(os, "preadv", replacing)
    else:
        save_file({"x": torch.zeros(1000)}, tmp_path / "other")
        os.utime(tmp_path / "other", (1, 1))  # a file system's clock may tick only every 4 ms
        (tmp_path / "other").replace(path)
    found = r"\(it was written or replaced after.*expected a file that does not change"
    with pytest.raises(DataError, match=found), SliceReader(entries) as reader:
        reader.read([Piece(key="x", box=Box.full((1000,)), into=into)])


def test_another_owner_or_link_of_a_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = written(path, x=torch.ones(1000))
    into = torch.zeros(1000)
    path.chmod(0o600)
    (tmp_path / "link").hardlink_to(path)
    with SliceReader(entries) as reader:
        reader.read([Piece(key="x", box=Box.full((1000,)), into=into)])
    assert torch.equal(into, torch.ones(1000))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(50_000)
    entries = written(tmp_path / "x.safetensors", x=whole)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: real(fd, [b[0][:9001]], at))
    for direct in (True, False):
        read_directly(monkeypatch, direct)
        into = torch.zeros(50_000)
        with SliceReader(entries) as reader:
            reader.read([Piece(key="x", box=Box.full((50_000,)), into=into)])
        assert torch.equal(into, whole)


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    import resource

    entries: dict[str, CheckpointEntry] = {}
    for number in range(64):
        entries |= written(tmp_path / f"{number}.safetensors", **{str(number): torch.full((3,), float(number))})
    pieces = [Piece(key=key, box=Box.full((3,)), into=torch.empty(3)) for key in entries]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(1))
    with SliceReader(entries) as reader:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + reader_module.OPEN_FILES + READERS + 8, limits[1]))
        try:
            for _ in range(2):
                reader.read(pieces)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [piece.into.tolist() for piece in pieces] == [[float(piece.key)] * 3 for piece in pieces]


def test_files_in_use_by_other_threads_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "OPEN_FILES", 0)
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 1)
    values = {str(number): torch.full((5,), float(number)) for number in range(8)}
    entries: dict[str, CheckpointEntry] = {}
    for key, value in values.items():
        entries |= written(tmp_path / f"{key}.safetensors", **{key: value})
    pieces = [Piece(key=key, box=Box.full((5,)), into=torch.empty(5)) for _ in range(50) for key in values]
    with SliceReader(entries) as reader:
        reader.read(pieces)
    assert all(torch.equal(piece.into, values[piece.key]) for piece in pieces)


def test_a_file_that_is_written_while_it_is_read_is_named_though_it_is_closed_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "OPEN_FILES", 1)
    entries = written(tmp_path / "a.safetensors", a=torch.ones(3)) | written(
        tmp_path / "b.safetensors", b=torch.ones(3)
    )
    plain = CheckpointFile.read

    def read(self: CheckpointFile, address: int, offset_bytes: int, nbytes: int) -> int:
        found = plain(self, address, offset_bytes, nbytes)
        if self.path.endswith("a.safetensors"):
            os.utime(self.path, ns=(1, 1))
        return found

    monkeypatch.setattr(CheckpointFile, "read", read)
    pieces = [Piece(key=key, box=Box.full((3,)), into=torch.empty(3)) for key in entries]
    with SliceReader(entries) as reader, pytest.raises(DataError, match=r"a\.safetensors' cannot be used"):
        reader.read(pieces)
