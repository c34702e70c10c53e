"""Places in a growing file: a first-fit free list."""

from __future__ import annotations

import bisect

PLACE_ALIGN_BYTES = 4096
"""Every place begins at, and is rounded up to, a multiple of this, which no disk's block exceeds."""


def round_up(nbytes: int, multiple: int = PLACE_ALIGN_BYTES) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class Extents:
    """The free places of a file of ``size_bytes``, in order of offset, neighbours always merged.

    First fit keeps the file short: a training step frees its places in the reverse order of reserving them, so the
    same few offsets serve every step.
    """

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self.size_bytes = 0
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that no place uses."""
        return self.size_bytes - self.used_bytes

    @property
    def tail_bytes(self) -> int:
        """Free bytes at the very end of the file: growing it by less than is needed can use them."""
        if self._offsets and self._offsets[-1] + self._lengths[-1] == self.size_bytes:
            return self._lengths[-1]
        return 0

    def reserve(self, nbytes: int) -> int | None:
        """Take a place.

        Args:
            nbytes: Bytes that the place must hold; rounded up to the alignment.

        Returns:
            Its offset in the file, or ``None`` if no free place is large enough.
        """
        need = round_up(nbytes)
        for index, length in enumerate(self._lengths):
            if length < need:
                continue
            offset = self._offsets[index]
            if length == need:
                del self._offsets[index], self._lengths[index]
            else:
                self._offsets[index] += need
                self._lengths[index] -= need
            self.used_bytes += need
            return offset
        return None

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the place that ``reserve(nbytes)`` returned at ``offset``.

        Raises:
            ValueError: The place overlaps one that is free: it was given back twice.
        """
        length = round_up(nbytes)
        self._insert(offset, length)
        self.used_bytes -= length

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` (a multiple of the alignment) at the end of the file."""
        offset = self.size_bytes
        self.size_bytes += nbytes
        self._insert(offset, nbytes)

    def _insert(self, offset: int, length: int) -> None:
        index = bisect.bisect_left(self._offsets, offset)
        before = index > 0 and self._offsets[index - 1] + self._lengths[index - 1]
        after = index < len(self._offsets) and self._offsets[index]
        if (before is not False and before > offset) or (after is not False and after < offset + length):
            raise ValueError(f"place at {offset} of {length} bytes overlaps one that is free")
        joins_before = before is not False and before == offset
        joins_after = after is not False and after == offset + length
        if joins_before and joins_after:
            self._lengths[index - 1] += length + self._lengths[index]
            del self._offsets[index], self._lengths[index]
        elif joins_before:
            self._lengths[index - 1] += length
        elif joins_after:
            self._offsets[index] = offset
            self._lengths[index] += length
        else:
            self._offsets.insert(index, offset)
            self._lengths.insert(index, length)
