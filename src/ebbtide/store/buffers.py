"""Memory for bytes read back from disk.

[Note: memory for reads]
Fresh pages cost as much as the read itself: the kernel must clear and map each one. And a read into small pages, which
lie anywhere in memory, is many small transfers: into huge pages it is faster, and takes less time from compute (suite
``disk`` measures both). So reads share chunks of huge pages, and what dies makes room for the next read. A chunk that
is free and too small for the next read is forgotten, so that in a network whose tensors shrink not each size keeps
chunks. From one backward to the next chunks are kept up to a share of what the backward read, so that they take little
of the memory that offloading saves; and more if the host takes freed memory back: to back and clear a huge page again
takes it milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch

from ebbtide.store.claims import Claims
from ebbtide.store.extents import Extents, round_up
from ebbtide.store.pages import HUGE_PAGE_BYTES, host_reclaims_pages, map_memory, use_huge_pages

CHUNK_BYTES = 8 * HUGE_PAGE_BYTES
"""Of a chunk; only the pages in use take memory, since the first place that is free is taken."""

KEPT, KEPT_WHERE_RECLAIMED = 1 / 8, 1 / 4
"""Share of what a backward read that chunks may hold until the next one; the same where the host takes memory back."""

ALWAYS_KEPT_BYTES = 4 * CHUNK_BYTES
"""What they may hold there however little was read."""


_Memory = ctypes.c_ubyte * sys.maxsize
"""Memory of any size: of a class for each size, a cycle, the collector would have to free those that nobody needs."""


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable view of ``nbytes`` at ``address``; the caller keeps that memory alive."""
    return memoryview(_Memory.from_address(address))[:nbytes]


class Buffer:
    """Page-aligned memory, outside the C heap, that becomes one tensor.

    Args:
        nbytes: Bytes of the tensor.
        shift: Distance of its first byte from a page boundary.
        pool: Has the memory, and gets it back when the tensor's storage dies; ``None``: it comes from the system.
    """

    def __init__(self, nbytes: int, shift: int, pool: BufferPool | None = None) -> None:
        mapped = round_up(shift + nbytes, mmap.PAGESIZE)
        chunk, offset = (pool.chunk_for(mapped) if pool else None) or (_Chunk(mapped, often=False), 0)
        # The storage keeps the view alive, not the chunk: when the view dies, its place can be reused.
        begin = chunk.begin + offset
        self._loan = memoryview(chunk.memory)[begin : begin + mapped]
        chunk.places.add(self._loan, (offset, mapped))
        self._nbytes, self._shift = nbytes, shift
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._loan)) + shift

    def tensor(self) -> torch.Tensor:
        """Return the memory as a ``uint8`` tensor whose storage is exactly these bytes and keeps them alive."""
        return torch.frombuffer(self._loan, dtype=torch.uint8, count=self._nbytes, offset=self._shift)


class _Chunk:
    """Memory for several reads; unmapped when it is referenced no more, and the last of its tensors is dead.

    Attributes:
        memory: The map.
        begin: Where in it the chunk begins.
        extents: Its free places; of the thread that reads.
        places: Offset and size of each place that a tensor has, or had until it died: ``extents`` counts them as used.
        used: Whether a place was taken since the pool was trimmed.
    """

    __slots__ = ("begin", "extents", "memory", "places", "used")

    def __init__(self, nbytes: int, *, often: bool) -> None:
        self.memory, self.begin = map_memory(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, self.begin))
        use_huge_pages(address, nbytes, often=often)
        self.extents = Extents(mmap.PAGESIZE)
        self.extents.grow(nbytes)
        self.places: Claims[tuple[int, int]] = Claims()
        self.used = False

    def reserve(self, nbytes: int) -> int | None:
        """Return where a free place begins, now used; None if there is none."""
        self.places.release_dead(self._release)
        offset = self.extents.reserve(nbytes)
        self.used = self.used or offset is not None
        return offset

    def _release(self, place: tuple[int, int]) -> None:
        self.extents.release(*place)


class BufferPool:
    """Chunks for the reads of one thread. See [Note: memory for reads]."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._taken_bytes = 0  # since the last ``trim``

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunks, used or not."""
        return sum([chunk.extents.size_bytes for chunk in self._chunks.copy()])

    def chunk_for(self, nbytes: int) -> tuple[_Chunk, int]:
        """Return a chunk, and a place in it that is used from now on; ``nbytes`` is a multiple of the page size."""
        self._taken_bytes += nbytes
        for chunk in self._chunks.copy():
            if (offset := chunk.reserve(nbytes)) is not None:
                return chunk, offset
        for chunk in self._chunks.copy():
            if not chunk.extents.used_bytes:
                self._forget(chunk)
        chunk = _Chunk(round_up(nbytes, CHUNK_BYTES), often=True)
        self._chunks.append(chunk)
        return chunk, chunk.reserve(nbytes) or 0

    def trim(self, *, all_chunks: bool = False) -> None:
        """Forget chunks. See [Note: memory for reads].

        Args:
            all_chunks: Keep none, even if the next backward will need them.
        """
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        limit_bytes = KEPT * taken_bytes
        if host_reclaims_pages():
            limit_bytes = max(KEPT_WHERE_RECLAIMED * taken_bytes, ALWAYS_KEPT_BYTES)
        for chunk in reversed(self._chunks.copy()):  # the first ones are used first
            if all_chunks or not chunk.used or self.size_bytes > limit_bytes:
                self._forget(chunk)
            chunk.used = False

    def _forget(self, chunk: _Chunk) -> None:
        with contextlib.suppress(ValueError):  # forgotten in another thread, too
            self._chunks.remove(chunk)
