"""Events of a run, as plain values for listeners.

[Note: events]
The engine, the recipes and the sampler emit; ``track`` listens and writes the run file. An event is a kind and
JSON-able fields. Without a listener an emit costs one ``if``. The kinds and their fields are listed in
``docs/reference/run-file.md``.

A source provides lasting state: the current plan, the figures so far. A listener that starts in the middle of
training asks it, instead of waiting for an event that was emitted before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]
Source = Callable[[], Mapping[str, Any] | None]
"""Returns the fields of an event as of now; None if there is nothing to say."""


class Bus:
    """Hands every event to every listener, in the caller's thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._sources: tuple[tuple[str, Source], ...] = ()

    @property
    def active(self) -> bool:
        """Whether there is a listener: check before building costly fields."""
        return bool(self._listeners)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Send an event of ``kind`` to every listener."""
        for listener in self._listeners:
            listener(kind, fields)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener; the returned function removes it (again and again is harmless)."""
        self._listeners = (*self._listeners, listener)

        def remove() -> None:
            self._listeners = tuple(x for x in self._listeners if x is not listener)

        return remove

    def provide(self, kind: str, source: Source) -> Callable[[], None]:
        """Add a source of the fields of ``kind``; the returned function removes it (again and again is harmless)."""
        entry = (kind, source)
        self._sources = (*self._sources, entry)

        def remove() -> None:
            self._sources = tuple(other for other in self._sources if other is not entry)

        return remove

    def ask(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the present fields of every source of ``kind``."""
        answers = [source() for name, source in self._sources if name == kind]
        return [answer for answer in answers if answer is not None]


BUS = Bus()
"""The process's own bus."""
