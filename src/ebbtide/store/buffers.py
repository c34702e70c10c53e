"""Memory for bytes that come back from disk.

Fresh pages cost more than the read itself: the kernel must clear each one and map it in (measured: 60 to 70 ms of
processor time for 256 MiB read into fresh memory, 10 ms into memory used before). So when a tensor dies, its memory is
kept for the next read of that size, up to a bound, until ``trim``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ebbtide.store.extents import round_up

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later; Python's ``mmap`` does not name it."""


@functools.lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Return the type of an array of bytes; making one anew for each transfer costs more than asking for it."""
    return ctypes.c_ubyte * nbytes


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable view of ``nbytes`` at ``address``; whoever calls keeps that memory alive."""
    return memoryview(_array(nbytes).from_address(address))


def populate_memory(address: int, nbytes: int) -> None:
    """Have the system map in memory that is about to be written, at once instead of page by page.

    A trap for each page costs as much as clearing it. Contents stay as they are. A system that cannot do it (Linux
    before 5.14) refuses, and the pages come one by one.

    Args:
        address: Of memory that stays mapped during the call.
        nbytes: Its bytes.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(begin, address + nbytes - begin, _MADV_POPULATE_WRITE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


class Buffer:
    """Page-aligned memory, outside the C heap, that becomes one tensor.

    Args:
        nbytes: Bytes of the tensor.
        shift: Distance of its first byte from a page boundary.
        pool: Where the memory goes when the tensor's storage dies; ``None``: back to the system.
    """

    def __init__(self, nbytes: int, shift: int, pool: BufferPool | None = None) -> None:
        mapped = round_up(shift + nbytes, mmap.PAGESIZE)
        memory = pool.find(mapped) if pool else None
        if memory is None:
            memory = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The array, not the map, is what the storage keeps alive: its death tells that the map can be used again.
        self._loan = _array(mapped).from_buffer(memory)
        if pool:
            weakref.finalize(self._loan, pool.give, memory).atexit = False
        self._nbytes, self._shift = nbytes, shift
        self.address = ctypes.addressof(self._loan) + shift

    def tensor(self) -> torch.Tensor:
        """Return the memory as a ``uint8`` tensor whose storage is exactly these bytes and keeps them alive."""
        return torch.frombuffer(self._loan, dtype=torch.uint8, count=self._nbytes, offset=self._shift)


class BufferPool:
    """Spare maps, newest last, at most ``limit_bytes``.

    Storages die in any thread, through the garbage collector inside ``find`` too, and an interrupt may strike at any
    of these moments: so there is no lock to wait for, or to be left locked. One step of a ``deque`` is atomic; the
    byte count may drift a little between them, until ``trim``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._spare: deque[mmap.mmap] = deque()
        self._spare_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """Bytes kept for later."""
        return sum(map(len, self._spare.copy()))

    def find(self, mapped_bytes: int) -> mmap.mmap | None:
        """Return a spare map of exactly this size, or ``None``."""
        for memory in reversed(self._spare.copy()):
            if len(memory) == mapped_bytes:
                try:
                    self._spare.remove(memory)
                except ValueError:  # it was dropped meanwhile, being the oldest
                    continue
                self._spare_bytes -= mapped_bytes
                return memory
        return None

    def give(self, memory: mmap.mmap) -> None:
        """Keep a map that nobody uses any more; the oldest go back to the system when there are too many."""
        self._spare.append(memory)
        self._spare_bytes += len(memory)
        while self._spare_bytes > self._limit_bytes:
            try:
                self._spare_bytes -= len(self._spare.popleft())
            except IndexError:
                self._spare_bytes = 0

    def trim(self, *, limit_bytes: int | None = None) -> None:
        """Give every spare map back to the system.

        Args:
            limit_bytes: The bound from now on; ``None``: as before.
        """
        if limit_bytes is not None:
            self._limit_bytes = limit_bytes
        self._spare.clear()
        self._spare_bytes = 0
