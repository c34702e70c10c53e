"""Events: what happens in a run, as plain values, for whoever listens.

[Note: events]
The engine, the recipes and the sampler emit; ``track`` listens and writes the run file; nobody else needs to exist.
An event is a kind and JSON-able fields. With no listener an emit costs one ``if``. The kinds and their fields are
listed in ``docs/reference/run-file.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]


class Bus:
    """Hands every event to every listener, in the caller's thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

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


BUS = Bus()
"""The process's own bus."""
