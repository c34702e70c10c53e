"""Memory for bytes read back from disk.

Fresh pages cost more than the read itself: the kernel must clear and map each one (measured: 60 to 70 ms of processor
time for 256 MiB read into fresh memory, 10 ms into used memory). So when a tensor dies, its memory is kept for the next
read of that size, up to a limit, until ``trim``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections import deque

import torch

from ebbtide.store.extents import round_up


@functools.lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Return the type of an array of bytes, cached: creating one per transfer costs more."""
    return ctypes.c_ubyte * nbytes


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable view of ``nbytes`` at ``address``; the caller keeps that memory alive."""
    return memoryview(_array(nbytes).from_address(address))


class Buffer:
    """Page-aligned memory, outside the C heap, that becomes one tensor.

    Args:
        nbytes: Bytes of the tensor.
        shift: Distance of its first byte from a page boundary.
        pool: Receives the memory when the tensor's storage dies; ``None``: the system does.
    """

    def __init__(self, nbytes: int, shift: int, pool: BufferPool | None = None) -> None:
        mapped = round_up(shift + nbytes, mmap.PAGESIZE)
        memory = pool.find(mapped) if pool else None
        if memory is None:
            memory = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The storage keeps the array alive, not the map: when the array dies, the map can be reused.
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

    Storages die in any thread, even through the garbage collector inside ``find``, and an interrupt may come at any
    point, so there is no lock. Operations of a ``deque`` are atomic; the byte count may drift a little until ``trim``.
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
                except ValueError:  # dropped meanwhile as the oldest
                    continue
                self._spare_bytes -= mapped_bytes
                return memory
        return None

    def give(self, memory: mmap.mmap) -> None:
        """Keep an unused map; the oldest are freed when there are too many."""
        self._spare.append(memory)
        self._spare_bytes += len(memory)
        while self._spare_bytes > self._limit_bytes:
            try:
                self._spare_bytes -= len(self._spare.popleft())
            except IndexError:
                self._spare_bytes = 0

    def trim(self, *, limit_bytes: int | None = None) -> None:
        """Free all spare maps.

        Args:
            limit_bytes: The limit from now on; ``None``: unchanged.
        """
        if limit_bytes is not None:
            self._limit_bytes = limit_bytes
        self._spare.clear()
        self._spare_bytes = 0
