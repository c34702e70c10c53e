"""Making the C allocator give freed tensors back to the system.

On a CPU-only machine the memory to be spared is the process's own. glibc serves blocks below a threshold from its heap,
and raises that threshold by itself, up to 32 MiB, each time a larger block is freed; what is freed into the heap stays
with the process, and serves the next step. A fixed threshold makes such blocks leave at once, and the kernel has to
clear fresh pages for each next one: several times the page faults of a step. So this is done only for those who ask for
a memory budget, see docs/decisions/0016-the-allocator-is-the-users.md. Setting the threshold also ends its rising.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def return_freed_memory(threshold_bytes: int = 1 << 20) -> bool:
    """Let blocks of ``threshold_bytes`` and more leave the process when they are freed.

    The price is that fresh blocks must be cleared by the kernel each time; holds for the whole process, from now on.

    Args:
        threshold_bytes: Smallest block that is mapped on its own; also the most that stays free at the heap's top.

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
