"""Reads boxes of tensors out of files, several at a time, into the local shards or through a small staging buffer each.

[Note: one read of what is needed]
A box of a tensor lies in its file as runs of bytes. A box is halved until a piece spans at most a staging buffer and
holds few bytes that are not wanted; then its span is read at once. A span that is byte for byte what the shard holds is
read straight into it: one copy, from the page cache. Any other goes through the staging buffer, which stays in the
processor's cache, and is copied from there with the dtype converted: no tensor is ever in memory twice, in any dtype.

[Note: through the page cache]
Files are read through the page cache while the checkpoint fits into half of the free memory: the kernel reads ahead
while threads copy, several ranks of a machine read the disk once, and the next load finds the files in memory. These
pages belong to no process, and the kernel drops them when memory is needed. Larger checkpoints are read with direct I/O
where the page cache holds less than half of a file and no other rank wants the same bytes. Files are not mapped: a
mapped file that shrinks kills the process instead of raising, and its pages count as the process's memory.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from ebbtide.base.errors import DataError
from ebbtide.load.header import CheckpointEntry, state_of
from ebbtide.load.layout import Box, Piece
from ebbtide.store.buffers import Buffer, view_memory
from ebbtide.store.pages import give_pages, resident_pages
from ebbtide.store.share import free_memory_bytes

ALIGN_BYTES = 4096
CHUNK_BYTES = 2 << 20
BATCH_BYTES = 8 << 20
"""Wanted bytes from which on spans become a job of a thread: handing jobs over costs as much as reading little ones."""
READERS = 4
"""Threads; each has a staging buffer of ``CHUNK_BYTES``."""
OPEN_FILES = 16
"""Files that stay open while no thread reads them: a checkpoint may have more files than a process may open."""
RUN_BYTES = 64 << 10
"""Runs at least this long are read by themselves; shorter ones with what lies between them."""
SLACK = 1.25
CACHED_SHARE = 0.5
"""Part of a file in the page cache from which on it is read through it."""
FREE_SHARE = 0.5
"""Part of the free memory that a checkpoint may take in the page cache."""
_SAMPLES = 64


class CheckpointFile:
    """One file, open in the way that suits it. See [Note: one read of what is needed].

    Args:
        path: The file.
        direct: Read with direct I/O what the page cache lacks.
        ahead: The kernel may read ahead: this machine needs the bytes between the slices, too.
        state: As ``state_of`` returned it when the header was read; empty: not known.

    Raises:
        OSError: It cannot be opened, or has changed since its header was read.
    """

    def __init__(self, path: str, *, direct: bool = False, ahead: bool = True, state: tuple[int, ...] = ()) -> None:
        self.path, self._state = path, state
        self.readers = 0  # threads that read it now: it must not be closed
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct = False
        try:
            self.check()
        except OSError:
            self.close()
            raise
        o_direct: int = getattr(os, "O_DIRECT", 0)
        if o_direct and direct and cached_share(self.fd) < CACHED_SHARE:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | o_direct)
                os.close(self.fd)
                self.fd, self.direct = fd, True
        if not self.direct and not ahead:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def check(self) -> None:
        """Raise ``OSError`` if the file is not as it was when its header was read: offsets and values may differ."""
        if self._state and state_of(self.fd) != self._state:
            raise OSError(errno.ESTALE, "it was written or replaced after its header was read")

    def read(self, address: int, offset_bytes: int, nbytes: int) -> int:
        """Read a span into memory at an address; return how far from there the span begins.

        With direct I/O the address has to be that of a page, and up to two pages more than the span are written.

        Raises:
            OSError: The system's own, or ``EIO`` where the file ends before the span.
        """
        direct, end = self.direct, offset_bytes + nbytes  # another thread may leave direct I/O meanwhile
        begin = offset_bytes // ALIGN_BYTES * ALIGN_BYTES if direct else offset_bytes
        length = -(-(end - begin) // ALIGN_BYTES) * ALIGN_BYTES if direct else nbytes
        view = view_memory(address, length)
        done = 0
        while begin + done < end:
            try:
                count = os.preadv(self.fd, [view[done:length]], begin + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._leave_direct()
                    direct = False
                    continue
                raise
            if direct and begin + done + count < end:
                count -= count % ALIGN_BYTES  # what is left must begin aligned
            if count <= 0:
                raise OSError(errno.EIO, "the file ends inside the tensor")
            done += count
        return offset_bytes - begin

    def _leave_direct(self) -> None:
        """Go on through the page cache: some file systems open for direct I/O and then refuse it."""
        buffered = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(buffered, self.fd, inheritable=False)  # other threads keep using the same descriptor
        os.close(buffered)
        self.direct = False

    def close(self) -> None:
        """Close it. Harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SliceReader:
    """Reads pieces out of a checkpoint's files in a few threads. Used as a context manager.

    Args:
        entries: Where tensors lie.
        shared: Tensors of which other ranks of this machine read the same bytes.
        ahead: This machine's ranks need the whole checkpoint, so that the kernel may read ahead.
        pinned: Staging memory that an accelerator copies from at its full rate.
    """

    def __init__(
        self,
        entries: Mapping[str, CheckpointEntry],
        *,
        shared: Collection[str] = (),
        ahead: bool = True,
        pinned: bool = False,
    ) -> None:
        self._entries, self._shared, self._ahead, self._pinned = entries, shared, ahead, pinned
        self._direct = not fits_page_cache(entries.values())
        self._files: dict[tuple[str, bool], CheckpointFile] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="ebbtide-load")
        self._stopped = False

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the threads and close the files."""
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, pieces: Iterable[Piece], done: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read pieces into their views and return when all are read; ``done`` receives the bytes of each job.

        Raises:
            DataError: A file cannot be read, or changed since its header was read.
        """
        waiting: set[Future[int]] = set()
        try:
            for batch in self._batches(pieces):
                if len(waiting) >= 2 * READERS:
                    waiting = self._wait_for_some(waiting, done)
                waiting.add(self._pool.submit(self._read_batch, batch))
            while waiting:
                waiting = self._wait_for_some(waiting, done)
            for file in self._files.values():
                _check(file)
        except BaseException:
            self._stopped = True  # targets die with the caller's frame: nobody may write into them any more
            wait(waiting)
            raise

    def _wait_for_some(self, waiting: set[Future[int]], done: Callable[[int], None]) -> set[Future[int]]:
        ended, left = wait(waiting, return_when=FIRST_COMPLETED)
        for future in ended:
            done(future.result())
        return left

    def _batches(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Yield spans in lists that are worth a job each."""
        batch, wanted_bytes = list[Piece](), 0
        for piece in pieces:
            entry = self._entries[piece.key]
            for span in spans_of(piece, entry):
                batch.append(span)
                wanted_bytes += span.box.numel * entry.dtype.itemsize
                if wanted_bytes >= BATCH_BYTES:
                    yield batch
                    batch, wanted_bytes = [], 0
        if batch:
            yield batch

    def _read_batch(self, batch: list[Piece]) -> int:
        return sum([self._read(piece) for piece in batch])

    def _read(self, piece: Piece) -> int:
        """Read a piece; returns its bytes."""
        if self._stopped:
            return 0
        entry = self._entries[piece.key]
        try:
            strides = _strides(entry.shape)
            span, place = _span(piece.box, strides) * entry.dtype.itemsize, place_of(piece.box, entry)
            with self._opened(entry, piece.key in self._shared) as file:
                if piece.into.device.type == "cpu" and piece.into.is_contiguous():
                    give_pages(piece.into.data_ptr(), piece.into.nbytes)
                    if not file.direct and piece.into.dtype == entry.dtype and piece.into.nbytes == span:
                        file.read(piece.into.data_ptr(), place, span)
                        return span
                staging = self._staging(span)
                at = file.read(staging.data_ptr(), place, span)
        except OSError as error:
            raise _unread(f"{entry.file!r} cannot be read at {piece.key!r}", error) from error
        data = staging[at : at + span]
        if data.data_ptr() % entry.dtype.itemsize:  # a file may put tensors at odd places
            data = data.clone()
        widens = entry.dtype.itemsize < piece.into.dtype.itemsize
        if widens and span < piece.into.nbytes:  # fewer bytes to copy if the device converts
            data = data.to(piece.into.device)
        piece.into.copy_(data.view(entry.dtype).as_strided(piece.box.size, strides))
        return piece.box.numel * entry.dtype.itemsize

    @contextlib.contextmanager
    def _opened(self, entry: CheckpointEntry, shared: bool) -> Generator[CheckpointFile]:
        """Open an entry's file, or find it open; it stays so at least until the context ends."""
        with self._lock:
            file = self._files.pop((entry.file, shared), None)
            if file is None:
                self._close_idle()
                direct = self._direct and not shared
                file = CheckpointFile(entry.file, direct=direct, ahead=self._ahead, state=entry.state)
            self._files[entry.file, shared] = file  # the last one is the most recently used
            file.readers += 1
        try:
            yield file
        finally:
            with self._lock:
                file.readers -= 1

    def _close_idle(self) -> None:
        """Make room for one more file: close those that no thread reads, the least recently used first."""
        idle = [key for key, file in self._files.items() if not file.readers]
        for key in idle[: max(0, len(self._files) + 1 - OPEN_FILES)]:
            file = self._files.pop(key)
            try:
                _check(file)
            finally:
                file.close()

    def _staging(self, span_bytes: int) -> torch.Tensor:
        """Return this thread's staging memory, which begins on a page."""
        needed = max(span_bytes, CHUNK_BYTES) + 2 * ALIGN_BYTES
        found: torch.Tensor | None = getattr(self._local, "staging", None)
        if found is None or found.numel() < needed:
            if self._pinned:
                found = torch.empty(needed + ALIGN_BYTES, dtype=torch.uint8, pin_memory=True)
                found = found[-found.data_ptr() % ALIGN_BYTES :]
            else:
                found = Buffer(needed, 0).tensor()
            self._local.staging = found
        return found


def _check(file: CheckpointFile) -> None:
    try:
        file.check()
    except OSError as error:
        raise _unread(f"{file.path!r} cannot be used", error) from error


def _unread(found: str, error: OSError) -> DataError:
    return DataError(
        f"{found} ({error.strerror or error})",
        expected="a file that does not change while it is loaded",
        hint="raise the limit on open files (ulimit -n)"
        if error.errno == errno.EMFILE
        else "check the system log, and that nobody writes the checkpoint",
    )


def spans_of(piece: Piece, entry: CheckpointEntry, *, exact: bool = False) -> Iterator[Piece]:
    """Halve a piece until each part is worth one read. See [Note: one read of what is needed].

    Args:
        piece: A box of the tensor.
        entry: The tensor.
        exact: Until each part is one run of bytes, as writing needs it.
    """
    strides = _strides(entry.shape)
    waiting = [piece]
    while waiting:
        one = waiting.pop()
        nbytes = one.box.numel * entry.dtype.itemsize
        if nbytes == 0:
            continue
        span = _span(one.box, strides) * entry.dtype.itemsize
        dense = span == nbytes if exact else span <= nbytes * SLACK or _run(one.box, entry) < RUN_BYTES
        dim = next((d for d, n in enumerate(one.box.size) if n > 1), None)
        if dim is None or (span <= CHUNK_BYTES and dense):
            yield one
            continue
        half = one.box.size[dim] // 2
        for start, length in ((half, one.box.size[dim] - half), (0, half)):
            box, into = one.box.narrow(dim, start, length), one.into.narrow(dim, start, length)
            waiting.append(Piece(key=one.key, box=box, into=into))


def place_of(box: Box, entry: CheckpointEntry) -> int:
    """Return where in its file the first byte of a box lies."""
    first = sum(s * n for s, n in zip(box.start, _strides(entry.shape), strict=True))
    return entry.offset_bytes + first * entry.dtype.itemsize


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _span(box: Box, strides: tuple[int, ...]) -> int:
    """Elements from the first of a box to its last, in the order of the file."""
    return 1 + sum((n - 1) * s for n, s in zip(box.size, strides, strict=True))


def _run(box: Box, entry: CheckpointEntry) -> int:
    """Bytes of a box that follow each other in the file."""
    run = entry.dtype.itemsize
    for size, full in zip(reversed(box.size), reversed(entry.shape), strict=True):
        run *= size
        if size != full:
            break
    return run


def fits_page_cache(entries: Collection[CheckpointEntry]) -> bool:
    """Whether tensors may stay in the page cache. See [Note: through the page cache]."""
    return sum(entry.nbytes for entry in entries) <= free_memory_bytes() * FREE_SHARE


def cached_share(fd: int) -> float:
    """Return which part of a file is in the page cache; all of it where that is unknown.

    ``mincore`` reports every page as resident to users who neither own the file nor may write it: samples verify that.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        return 1.0
    if (pages := resident_pages(fd, size_bytes)) is None:
        return 1.0
    share = sum(pages) / len(pages)
    return share if share < 1 else _sampled_share(fd, size_bytes)


def _sampled_share(fd: int, size_bytes: int) -> float:
    """Return which part of a sample of places in a file can be read without waiting; 1 where that is unknown."""
    draw, cached = random.Random(), 0
    for sample in range(_SAMPLES):
        try:  # places drawn apart: a read that fails still makes the kernel fetch its page, for the next look
            place = int((sample + draw.random()) * size_bytes / _SAMPLES)
            cached += os.preadv(fd, [bytearray(1)], place, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except (OSError, AttributeError):  # the file system or the platform has no such reads
            return 1.0
    return cached / _SAMPLES
