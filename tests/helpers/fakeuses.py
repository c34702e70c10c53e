"""Last writes and reads of the fake device's bytes, as stream name → number of the operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Use:
    first: int
    end: int
    stream: str
    number: int
    writes: bool


class Uses:
    """The uses of one storage that a later use may have to wait for."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []

    def written(self, first: int, end: int) -> bool:
        """Whether a writer of any of these bytes is known."""
        return any(True for use in self._over(first, end) if use.writes)

    def write(self, stream: str, number: int, first: int, end: int) -> None:
        """Record a write; earlier uses of these bytes are forgotten."""
        self._put(_Use(first, end, stream, number, True), lambda use: True)

    def read(self, stream: str, number: int, first: int, end: int) -> None:
        """Record a read; earlier reads of these bytes by the same stream are forgotten."""
        self._put(_Use(first, end, stream, number, False), lambda use: use.stream == stream and not use.writes)

    def before_read(self, first: int, end: int) -> Iterator[tuple[str, int]]:
        """Return the operations that a read of these bytes must follow."""
        return ((use.stream, use.number) for use in self._over(first, end) if use.writes)

    def before_write(self, first: int, end: int) -> Iterator[tuple[str, int]]:
        """Return the operations that a write of these bytes must follow."""
        return ((use.stream, use.number) for use in self._over(first, end))

    def _over(self, first: int, end: int) -> Iterator[_Use]:
        return (use for use in self._uses if use.first < end and first < use.end)

    def _put(self, made: _Use, replaces: Callable[[_Use], bool]) -> None:
        kept: list[_Use] = []
        for use in self._uses:
            if use.end <= made.first or made.end <= use.first or not replaces(use):
                kept.append(use)
                continue
            if use.first < made.first:
                kept.append(_Use(use.first, made.first, use.stream, use.number, use.writes))
            if use.end > made.end:
                kept.append(_Use(made.end, use.end, use.stream, use.number, use.writes))
        self._uses = [*kept, made]
