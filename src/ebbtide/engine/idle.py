"""Engines that no forward uses now."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

from ebbtide.engine.engine import Engine


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
