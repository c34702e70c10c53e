"""Make the C allocator return freed tensors to the system.

On a CPU-only machine the memory to be saved is the process's. glibc allocates blocks below a threshold from its heap,
and raises the threshold, up to 32 MiB, each time a larger block is freed; memory freed into the heap stays with the
process and is reused in the next step. A fixed threshold returns such blocks at once, but the kernel must clear fresh
pages for each new one: several times the page faults of a step. So it is set only with a memory budget, see
docs/decisions/0016-the-allocator-is-the-users.md. Setting the threshold also stops its growth.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def return_freed_memory(threshold_bytes: int = 1 << 20) -> bool:
    """Return blocks of ``threshold_bytes`` and more to the system when they are freed.

    This holds for the whole process from now on; in return the kernel must clear each new block.

    Args:
        threshold_bytes: Smallest separately mapped block; also the most free memory at the heap's top.

    Returns:
        Whether it was possible: Linux with glibc's allocator.
    """
    if sys.platform != "linux":
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  another C library may have a mallopt that does nothing
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, threshold_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, threshold_bytes))
