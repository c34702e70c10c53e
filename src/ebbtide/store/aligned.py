"""Direct I/O straight between a tensor's own memory and a file without a name.

[Note: aligned interior]
Direct I/O moves bytes between memory and disk without the page cache, so offloading takes no RAM and few cycles; it
requires address, length and file offset to be multiples of the disk's block. A tensor's memory begins anywhere (with
glibc 64 bytes after a page boundary). So only the *interior* between the first and the last aligned address is written;
the bytes before and after it, less than a block each, are kept in RAM. To be read without a copy, the target begins at
the same distance from an aligned address as the source; kernels whose result depends on alignment then behave alike.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ebbtide.base.errors import DiskPathError
from ebbtide.store.buffers import Buffer, view_memory
from ebbtide.store.extents import PLACE_ALIGN_BYTES

_LOG = logging.getLogger("ebbtide.store")
_CHUNK_BYTES = 8 << 20
_MEMORY_ALIGN_BYTES = 512


def split(address: int, nbytes: int, align_bytes: int) -> tuple[int, int, int]:
    """Return the bytes before the interior, of it, and after it; a small source has none, and all are before it."""
    before = -address % align_bytes
    interior = max(nbytes - before, 0) // align_bytes * align_bytes
    return (before, interior, nbytes - before - interior) if interior else (nbytes, 0, 0)


class BackingFile:
    """An unlinked file: freed when its last descriptor is closed, even by ``kill -9``.

    Raises:
        DiskPathError: No file can be created or written there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.align_bytes = PLACE_ALIGN_BYTES
        self.fd, self.direct = -1, False
        try:
            self.fd, self.direct = _open_unnamed(directory)
            self.direct = self.direct and self._probe()
        except OSError as error:
            self.close()
            raise DiskPathError(
                f"cannot create a file in {str(directory)!r}: {error.strerror}",
                expected="a directory on a local disk",
                hint="name another directory as disk_path",
            ) from error
        if not self.direct:
            _LOG.warning(
                "direct I/O is refused in %s: offloaded bytes pass through the page cache, which uses RAM and "
                "CPU time; use a disk_path on a local ext4 or xfs disk",
                directory,
            )

    def _probe(self) -> bool:
        """Find the memory alignment by testing; return False, with a buffered descriptor, if direct I/O is refused."""
        page = Buffer(2 * PLACE_ALIGN_BYTES, 0)
        for align in (_MEMORY_ALIGN_BYTES, PLACE_ALIGN_BYTES):
            try:
                os.pwritev(self.fd, [view_memory(page.address + align, align)], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                continue
            self.align_bytes = align
            os.ftruncate(self.fd, 0)
            return True
        buffered = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        os.close(self.fd)
        self.fd = buffered
        return False

    def grow(self, offset: int, nbytes: int) -> None:
        """Allocate blocks for ``nbytes`` from ``offset``.

        Raises:
            OSError: ``ENOSPC``, or another error of the file system.
        """
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            # Not every file system can; there, a full disk is detected only by a write.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, offset)  # returns the blocks it got before it failed
                raise
            os.ftruncate(self.fd, offset + nbytes)

    def write(self, address: int, nbytes: int, offset: int, stopped: Callable[[], bool]) -> int:
        """Write memory to the file, in chunks, until done or ``stopped()``.

        Returns:
            The bytes that were written.

        Raises:
            OSError: The system's error, or ``EIO`` if it stops accepting bytes.
        """
        done = self._transfer(os.pwritev, "write", view_memory(address, nbytes), offset, stopped)
        if not self.direct:  # errors of the disk are raised here, and only clean pages can be dropped
            os.fdatasync(self.fd)
        self._forget(offset, nbytes)
        return done

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Fill memory from the file.

        Raises:
            OSError: The system's error, or ``EIO`` if the file ends early.
        """
        self._transfer(os.preadv, "read", view_memory(address, nbytes), offset, lambda: False)
        self._forget(offset, nbytes)

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        name: str,
        view: memoryview,
        offset: int,
        stopped: Callable[[], bool],
    ) -> int:
        """Call the system for one chunk after the other; return the bytes until the end, or until ``stopped()``."""
        done = 0
        while done < len(view) and not stopped():
            count = call(self.fd, [view[done : done + _CHUNK_BYTES]], offset + done)
            if self.direct:  # the rest must begin aligned: the last partial block of a short transfer is repeated
                count -= count % self.align_bytes
            if count <= 0:
                raise OSError(errno.EIO, f"short {name}: {done} of {len(view)} bytes")
            done += count
        return done

    def _forget(self, offset: int, nbytes: int) -> None:
        if not self.direct:  # else the page cache would grow by the offloaded bytes
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def disk_free_bytes(self) -> int:
        """Bytes that the file system has free for this user."""
        found = os.fstatvfs(self.fd)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Close the file and free its blocks, even while a forked child has it open. May be called repeatedly."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)


def _open_unnamed(directory: Path) -> tuple[int, bool]:
    """Return a descriptor of an unlinked file, and whether it uses direct I/O."""
    o_direct: int = getattr(os, "O_DIRECT", 0)
    o_tmpfile: int = getattr(os, "O_TMPFILE", 0)
    if o_tmpfile:
        for extra in (o_direct, 0):
            try:
                return os.open(directory, o_tmpfile | os.O_RDWR | os.O_CLOEXEC | extra, 0o600), bool(extra)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                    raise
    fd, name = tempfile.mkstemp(prefix="ebbtide-", dir=directory)
    try:
        direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | o_direct)
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(fd)
            raise
        return fd, False
    finally:
        os.unlink(name)
    os.close(fd)
    return direct, bool(o_direct)
