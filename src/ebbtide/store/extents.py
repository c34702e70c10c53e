"""Places in a growing file or in host memory: a first-fit free list."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable

PLACE_ALIGN_BYTES = 4096
"""A place on disk begins at, and is rounded up to, a multiple of this, which no disk's block exceeds."""


def round_up(nbytes: int, multiple: int = PLACE_ALIGN_BYTES) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class Extents:
    """The free places of a file of ``size_bytes``, in order of offset, neighbours always merged.

    First fit keeps the file short: a training step frees its places in the reverse order of reserving them, so the
    same few offsets serve every step.

    Args:
        align_bytes: Every place begins at, and is rounded up to, a multiple of this.
    """

    def __init__(self, align_bytes: int = PLACE_ALIGN_BYTES) -> None:
        self._align_bytes = align_bytes
        # Pairs of offset and length in one list: an interrupt between two lists would tear them apart.
        self._free: list[tuple[int, int]] = []
        self.size_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that no place uses."""
        return sum(map(operator.itemgetter(1), self._free))

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that places use."""
        return self.size_bytes - self.free_bytes

    @property
    def free_end_bytes(self) -> int:
        """Free bytes at the end of the file; with them it need not grow by the full size."""
        if self._free and sum(self._free[-1]) == self.size_bytes:
            return self._free[-1][1]
        return 0

    def reserve(self, nbytes: int) -> int | None:
        """Take a place.

        Args:
            nbytes: Bytes that the place must hold; rounded up to the alignment.

        Returns:
            Its offset in the file, or ``None`` if no free place is large enough.
        """
        need = round_up(nbytes, self._align_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length < need:
                continue
            if length == need:
                del self._free[index]
            else:
                self._free[index] = offset + need, length - need
            return offset
        return None

    def gather(self, nbytes: int) -> list[tuple[int, int]] | None:
        """Take several places, the largest free ones first, to have few.

        Args:
            nbytes: Bytes that they must hold together; rounded up to the alignment.

        Returns:
            Their offsets and lengths, or ``None``, with nothing taken, if there are too few free bytes.
        """
        need = round_up(nbytes, self._align_bytes)
        found: list[tuple[int, int]] = []
        for offset, length in sorted(self._free, key=lambda place: -place[1]):
            found.append((offset, min(length, need)))
            need -= found[-1][1]
            if not need:
                break
        if need:
            return None
        taken = dict(found)
        self._free = [
            (offset + taken.get(offset, 0), length - taken.get(offset, 0))
            for offset, length in self._free
            if taken.get(offset, 0) < length
        ]
        return found

    def release(self, offset: int, nbytes: int) -> None:
        """Free the place that ``reserve(nbytes)`` returned at ``offset``.

        Raises:
            ValueError: The place overlaps a free one: it was freed twice.
        """
        self._insert(offset, round_up(nbytes, self._align_bytes))

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` (a multiple of the alignment) at the end of the file."""
        offset = self.size_bytes
        self.size_bytes += nbytes
        self._insert(offset, nbytes)

    def cut(self, size_bytes: int) -> None:
        """Remove free bytes from the end.

        Args:
            size_bytes: The new size, at least the old one less ``free_end_bytes``.

        Raises:
            ValueError: A place is in the removed part.
        """
        if size_bytes < self.size_bytes - self.free_end_bytes:
            raise ValueError(
                f"cannot cut {self.size_bytes} bytes to {size_bytes}: {self.free_end_bytes} at the end are free"
            )
        if size_bytes == self.size_bytes:
            return
        offset, _ = self._free[-1]
        self._free[-1:] = [(offset, size_bytes - offset)] if size_bytes > offset else []
        self.size_bytes = size_bytes

    def keep(self, places: Iterable[tuple[int, int]]) -> None:
        """Free all but these places.

        Args:
            places: Offsets, and bytes as they were reserved.
        """
        free: list[tuple[int, int]] = []
        end = 0
        for offset, nbytes in sorted(places):
            if offset > end:
                free.append((end, offset - end))
            end = offset + round_up(nbytes, self._align_bytes)
        if end < self.size_bytes:
            free.append((end, self.size_bytes - end))
        self._free = free

    def _insert(self, offset: int, length: int) -> None:
        index = bisect.bisect_left(self._free, (offset, 0))
        first, last, end = index, index, offset + length
        if index > 0:
            before, before_length = self._free[index - 1]
            if before + before_length > offset:
                raise ValueError(f"place at {offset} of {length} bytes overlaps one that is free")
            if before + before_length == offset:
                first, offset = index - 1, before
        if index < len(self._free):
            after, after_length = self._free[index]
            if after < end:
                raise ValueError(f"place at {offset} of {length} bytes overlaps one that is free")
            if after == end:
                last, end = index + 1, after + after_length
        self._free[first:last] = [(offset, end - offset)]
