"""Engines that no forward uses now."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable

from ebbtide.engine.engine import Engine

MOST_SETTINGS = 8
"""Settings with idle engines. A window that follows each batch would leave an engine, with its pinned memory, for every
one, until none of the host memory that they share is left."""


class IdleEngines:
    """Engines with the same settings, for the next forward; their live graphs may still restore saved tensors.

    Pinned memory is expensive to register, so an engine of host memory is kept. On disk it would keep its file and its
    threads: such an engine lasts only as long as others hold it, as each of its live graphs does.
    """

    def __init__(self) -> None:
        self._found: list[Callable[[], Engine | None]] = []  # as many as forwards ran at once, at most

    def add(self, engine: Engine) -> None:
        """Add an engine whose forward has ended."""
        self._found.append(weakref.ref(engine) if engine.tier.name == "disk" else lambda: engine)

    def take(self) -> Engine | None:
        """Remove and return an engine; None if there is none. Forgets those that it finds dead."""
        with contextlib.suppress(IndexError):  # no check before it: another thread may take the last one
            while True:
                if (engine := self._found.pop()()) is not None:
                    return engine
        return None


def idle_engines(known: dict[Hashable, IdleEngines], settings: Hashable) -> IdleEngines:
    """Return the idle engines of some settings; forget those of the settings that were used the longest ago.

    Args:
        known: Idle engines by settings; updated in place.
        settings: The settings.
    """
    found = known.pop(settings, None) or IdleEngines()
    for oldest in list(known)[: max(len(known) + 1 - MOST_SETTINGS, 0)]:
        known.pop(oldest, None)  # another thread may have done it
    known[settings] = found
    return found
