"""Events of a run, as plain values for listeners.

[Note: events]
The engine, the recipes and the sampler emit; ``track`` listens and writes the run file. An event is a kind and
JSON-able fields. Without a listener an emit costs one ``if``. The kinds and their fields are listed in
``docs/reference/run-file.md``.

A source provides current state, such as the plan and the figures so far, to listeners that start in the middle of
training and have missed earlier events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]
Source = Callable[[], Mapping[str, Any] | None]
"""Returns the current fields of an event, or None."""


class Bus:
    """Sends every event to every listener, in the caller's thread."""

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
        """Add a listener; the returned function removes it and may be called repeatedly."""
        self._listeners = (*self._listeners, listener)

        def remove() -> None:
            self._listeners = tuple(x for x in self._listeners if x is not listener)

        return remove

    def provide(self, kind: str, source: Source) -> Callable[[], None]:
        """Add a source of the fields of ``kind``; the returned function removes it and may be called repeatedly."""
        entry = (kind, source)
        self._sources = (*self._sources, entry)

        def remove() -> None:
            self._sources = tuple(other for other in self._sources if other is not entry)

        return remove

    def ask(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the current fields of every source of ``kind``."""
        answers = [source() for name, source in self._sources if name == kind]
        return [answer for answer in answers if answer is not None]


BUS = Bus()
"""The process's own bus."""
