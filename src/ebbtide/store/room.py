"""Room on disk: a file without a name that grows, and the places in it."""

from __future__ import annotations

from collections.abc import Iterable

from ebbtide.base.errors import DiskFullError
from ebbtide.base.units import format_size
from ebbtide.store.aligned import BackingFile
from ebbtide.store.extents import PLACE_ALIGN_BYTES, Extents, round_up
from ebbtide.store.faults import FULL_ERRNOS, Fault

_EXTENT_BYTES = 256 << 20


class Room:
    """Places in a growing file. Not thread-safe: whoever shares it holds a lock.

    Args:
        file: The file.
        budget_bytes: Most bytes it may grow to; ``None``: as many as the disk gives.
    """

    def __init__(self, file: BackingFile, budget_bytes: int | None) -> None:
        self._file, self._budget_bytes = file, budget_bytes
        self._extents = Extents()

    @property
    def size_bytes(self) -> int:
        """Bytes the file takes."""
        return self._extents.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of places in use."""
        return self._extents.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of free places, and what budget and disk let the file grow by."""
        return self._extents.free_bytes + self._growth_bytes()

    def reserve(self, need_bytes: int) -> int:
        """Return the offset of a place that holds ``need_bytes``.

        Raises:
            DiskFullError: Budget or disk does not give it.
            DiskError: The file cannot be grown for another reason.
        """
        place = self._extents.reserve(need_bytes)
        if place is not None:
            return place
        least = round_up(need_bytes) - self._extents.tail_bytes
        growth = self._growth_bytes() // PLACE_ALIGN_BYTES * PLACE_ALIGN_BYTES
        cause: OSError | None = None
        # In large steps, so that the file system lays the bytes down in one piece; if that is too much, in small ones.
        for step in (min(max(least, _EXTENT_BYTES), growth), least):
            if not least <= step <= growth:
                continue
            try:
                self._file.grow(self._extents.size_bytes, step)
            except OSError as error:
                if error.errno not in FULL_ERRNOS:
                    raise Fault(f"growing the file in {self._file.directory}", error).error() from error
                cause = error
                continue
            self._extents.grow(step)
            place = self._extents.reserve(need_bytes)
            if place is not None:
                return place
        raise self._full(need_bytes) from cause

    def release(self, offset: int, need_bytes: int) -> None:
        """Give back the place that ``reserve(need_bytes)`` returned."""
        self._extents.release(offset, need_bytes)

    def keep(self, places: Iterable[tuple[int, int]]) -> None:
        """Give back all but these places (offset, and bytes as they were reserved)."""
        self._extents.keep(places)

    def _growth_bytes(self) -> int:
        disk = self._file.disk_free_bytes()
        return disk if self._budget_bytes is None else min(disk, max(0, self._budget_bytes - self.size_bytes))

    def _full(self, need_bytes: int) -> DiskFullError:
        budget = "" if self._budget_bytes is None else f" (budget {format_size(self._budget_bytes)})"
        return DiskFullError(
            f"{format_size(need_bytes)} needed, {format_size(self.free_bytes)} free in {self._file.directory}{budget}",
            expected="room in one piece for every offloaded storage",
            hint="make room there, give a larger disk with disk_path=..., raise the budget, or offload less",
        )
