"""Memory for bytes that come back from disk.

Fresh pages cost more than the read itself: the kernel must clear each one and map it in (measured: 60 to 70 ms of
processor time for 256 MiB read into fresh memory, 10 ms into memory used before). So when a tensor dies, its memory is
kept for the next read of that size, up to a bound, until ``trim``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref

import torch

from ebbtide.store.extents import round_up


@functools.lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Return the type of an array of bytes; making one anew for each transfer costs more than asking for it."""
    return ctypes.c_ubyte * nbytes


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable view of ``nbytes`` at ``address``; whoever calls keeps that memory alive."""
    return memoryview(_array(nbytes).from_address(address))


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
    """Spare maps, newest first, at most ``limit_bytes``.

    Storages die in any thread, and through the garbage collector inside ``find`` too: so ``give`` never waits for the
    lock. A map that finds it taken goes back to the system.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []
        self._spare_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """Bytes kept for later."""
        return self._spare_bytes

    def find(self, mapped_bytes: int) -> mmap.mmap | None:
        """Return a spare map of exactly this size, or ``None``."""
        with self._lock:
            for index in range(len(self._spare) - 1, -1, -1):
                if len(self._spare[index]) == mapped_bytes:
                    self._spare_bytes -= mapped_bytes
                    return self._spare.pop(index)
        return None

    def give(self, memory: mmap.mmap) -> None:
        """Keep a map that nobody uses any more; the oldest go back to the system when there are too many."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._spare.append(memory)
            self._spare_bytes += len(memory)
            while self._spare_bytes > self._limit_bytes:
                self._spare_bytes -= len(self._spare.pop(0))
        finally:
            self._lock.release()

    def trim(self, *, limit_bytes: int | None = None) -> None:
        """Give every spare map back to the system.

        Args:
            limit_bytes: The bound from now on; ``None``: as before.
        """
        with self._lock:
            spare, self._spare, self._spare_bytes = self._spare, [], 0
            if limit_bytes is not None:
                self._limit_bytes = limit_bytes
        spare.clear()
