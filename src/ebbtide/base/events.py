"""Events: what happens in a run, as plain values, for whoever listens.

[Note: events]
The engine, the recipes and the sampler emit; ``track`` listens and writes the run file; nobody else needs to exist.
An event is a kind and JSON-able fields. With no listener an emit costs one ``if``. The kinds and their fields are
listed in ``docs/reference/run-file.md``.

A source answers for what lasts: the plan that is in force, the figures so far. Who begins to listen in the middle of
a training asks for it, instead of waiting for an event that was emitted before.
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
        """Whether anybody listens: ask before building costly fields."""
        return bool(self._listeners)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Tell every listener that ``kind`` happened."""
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
        """Return what every source of ``kind`` has to say now."""
        answers = [source() for name, source in self._sources if name == kind]
        return [answer for answer in answers if answer is not None]


BUS = Bus()
"""The process's own bus."""
