"""Return freed memory from the C allocator to the system, so that resident size is memory in use.

On a CPU-only machine the memory to be saved is the process's. glibc keeps what is freed into its heap for the next
step: that is fast, and resident size stays at the largest step so far. With a memory budget the heap is trimmed after
each backward. glibc maps larger blocks separately, and raises that threshold, up to 32 MiB, whenever one is
freed. A fixed size returns each freed tensor at once, but the kernel must clear fresh pages for every new one: several
times the page faults of a step. See docs/decisions/0016-the-allocator-is-the-users.md.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20
"""The smallest block that is mapped separately; also the most free memory at the heap's top."""


def trim_heap() -> bool:
    """Return the free pages of glibc's heap to the system.

    Using them again costs page faults: the next forward is some percent slower.

    Returns:
        Whether it was possible: Linux with glibc's allocator.
    """
    library = _glibc()
    if library is None:
        return False
    library.malloc_trim.argtypes, library.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
    library.malloc_trim(0)
    return True


def return_large_blocks() -> None:
    """Return large blocks to the system when they are freed, from now on, where the allocator is glibc's."""
    library = _glibc()
    if library is not None:
        library.mallopt.argtypes, library.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(threshold, _LARGE_BYTES)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is another one, which may have a ``mallopt`` that does nothing."""
    try:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
    except OSError:
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None
