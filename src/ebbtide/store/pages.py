"""Pages of memory: back it with them before it is used, huge ones too; and the pages of files in the page cache.

Registering memory faults its pages in on one thread, under a lock of the driver: tenths of a second per GiB, in the
middle of the first step. ``MADV_POPULATE_WRITE`` (Linux 5.14) does that part beforehand, without the GIL; on older
kernels zeros are written. Pages are placed on the memory node of the thread that touches them first, so the threads
stay on the processors of the caller's node.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ebbtide.store.share import ranks_of

HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGE, _POPULATE_READ, _POPULATE_WRITE = 14, 22, 23
_HUGE_ORDER = 9
"""Power of two: the pages in a huge one."""
_PIECE_BYTES = 64 << 20
_MOST_THREADS = 8
_LOW_BIT = bytes(i & 1 for i in range(256))
_PROCESSORS = Path("/sys/devices/system/cpu")
_REPORTED_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_FREE_PIECES = Path("/proc/buddyinfo")


def populate(address: int, nbytes: int, memory: object) -> None:
    """Back fresh memory with pages; not for less than one piece, nor on systems other than Linux.

    Args:
        address: Its first byte, at the beginning of a page.
        nbytes: Its size.
        memory: The object that keeps it mapped, held until the last thread is done.

    Raises:
        RuntimeError: The system has no pages.
    """
    if sys.platform != "linux" or nbytes <= _PIECE_BYTES:
        return
    pieces = [(address + first, min(_PIECE_BYTES, nbytes - first)) for first in range(0, nbytes, _PIECE_BYTES)]
    near = near_processors()
    threads = max(1, min(_MOST_THREADS, len(pieces), len(near) // ranks_of(os.environ)))
    stay = functools.partial(os.sched_setaffinity, 0, near)  # of the calling thread
    with ThreadPoolExecutor(threads, "ebbtide-pages", stay) as pool:
        for problem in pool.map(lambda piece: _back(piece[0], piece[1], memory), pieces):
            if problem:
                raise RuntimeError(f"cannot back memory with pages: {os.strerror(problem)}")


def map_memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map fresh memory that begins at a huge page, if it is as large as one.

    Args:
        nbytes: Its size, a multiple of the page size.

    Returns:
        The map, which has room for it, and where in the map it begins.

    Raises:
        OSError: The system has no addresses for it.
    """
    spare = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0  # never touched
    memory = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -address % HUGE_PAGE_BYTES if spare else 0


def near_processors(root: Path = _PROCESSORS) -> set[int]:
    """Return the processors on which the caller may run that share its memory node; if unknown, all on which it may
    run.
    """
    allowed = os.sched_getaffinity(0)
    node = next((root / f"cpu{_libc().sched_getcpu()}").glob("node[0-9]*"), None)
    found = [] if node is None else [path.name.removeprefix("cpu") for path in node.glob("cpu[0-9]*")]
    return allowed & {int(number) for number in found if number.isdecimal()} or allowed


def give_pages(address: int, nbytes: int) -> int:
    """Back memory that is about to be written with pages, in one call instead of one fault per page.

    A page fault costs as much as clearing the page. Contents are unchanged; the memory must stay mapped meanwhile.

    Returns:
        0, or the system's error number; then pages are faulted in one by one. ``EINVAL``: Linux before 5.14;
        ``ENOSYS``: another system.
    """
    if sys.platform != "linux":  # the advice's number may differ there
        return errno.ENOSYS
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(address + nbytes - begin)
    return 0 if _libc().madvise(ctypes.c_void_p(begin), length, _POPULATE_WRITE) == 0 else ctypes.get_errno()


def use_huge_pages(address: int, nbytes: int, *, often: bool = False) -> bool:
    """Let the system back memory that was not used yet with huge pages, where whole ones fit in.

    One fault then clears 2 MiB instead of 4 KiB: a fifth to a half of the time, except where the host has to back them
    first. No other memory is backed.

    Args:
        address: Address of memory that is mapped.
        nbytes: Its size.
        often: It will be used again and again, so that it hardly matters what the first use costs.

    Returns:
        Whether the system accepted that; it may still use small pages, and does if huge ones are off (``"never"``).
    """
    if sys.platform != "linux":  # the advice's number may differ there
        return False
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length < HUGE_PAGE_BYTES or (host_reclaims_pages() and not often):
        return False
    return _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _HUGE_PAGE) == 0


@functools.cache
def host_reclaims_pages(order: Path = _REPORTED_ORDER) -> bool:
    """Whether the host takes free huge pages back from this virtual machine, and backs and clears them on next use.

    Args:
        order: Holds the order of the smallest free page that the kernel reports to the host; -1 if unset.
    """
    try:
        return 0 <= int(order.read_text()) <= _HUGE_ORDER
    except (OSError, ValueError):
        return False


def small_free_bytes(pieces: Path = _FREE_PIECES) -> int:
    """Return how much of the free memory lies in pieces smaller than a huge page; 0 where that is unknown.

    Args:
        pieces: Lists, for each zone of memory, the number of its free pieces of 1, 2, 4, ... pages.
    """
    try:
        zones = [line.partition("zone")[2].split()[1:] for line in pieces.read_text().splitlines()]
        pages = sum(int(number) << order for zone in zones for order, number in enumerate(zone[:_HUGE_ORDER]))
    except (OSError, ValueError):
        return 0
    return pages * mmap.PAGESIZE


def fetch_pages(fd: int, offset_bytes: int, nbytes: int) -> int:
    """Have the system fetch a part of a file into the page cache, without copying it anywhere.

    The part is mapped for that time only, and nothing of it is accessed: a file that has become shorter is an error
    number, not a signal.

    Returns:
        0, or the number of the system's error. ``EINVAL``: Linux before 5.14; ``ENOSYS``: another system.
    """
    if sys.platform != "linux":
        return errno.ENOSYS
    begin = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(offset_bytes + nbytes - begin)
    return _on_mapped_file(fd, begin, length, lambda address: _libc().madvise(address, length, _POPULATE_READ))


def resident_pages(fd: int, nbytes: int) -> bytes | None:
    """Return 0 or 1 for each page of a file that is not empty: whether ``mincore`` has it as cached; None: unknown."""
    found, length = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))(), ctypes.c_size_t(nbytes)
    problem = _on_mapped_file(fd, 0, length, lambda address: _libc().mincore(address, length, found))
    return None if problem else bytes(found).translate(_LOW_BIT)


def _on_mapped_file(fd: int, begin: int, length: ctypes.c_size_t, call: Callable[[ctypes.c_void_p], int]) -> int:
    """Call the system with a part of a file mapped; returns 0, or the number of its error."""
    address = _libc().mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(begin))
    if address == ctypes.c_void_p(-1).value:
        return ctypes.get_errno()
    try:
        return ctypes.get_errno() if call(ctypes.c_void_p(address)) else 0
    finally:
        _libc().munmap(ctypes.c_void_p(address), length)


def _back(address: int, nbytes: int, memory: object) -> int:
    """Back a piece of fresh memory with pages; returns 0, or the system's error number."""
    problem = give_pages(address, nbytes)
    if problem == errno.EINVAL:  # an older kernel
        ctypes.memset(address, 0, nbytes)
        return 0
    return problem


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc
