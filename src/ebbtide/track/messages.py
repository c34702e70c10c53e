"""ebbtide's warnings, in the record of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_OURS = "ebbtide"
_TRACK = "ebbtide.track"
"""Loggers of which the last also reports that a record cannot be written: that is not written into it."""


class Messages(logging.Handler):
    """Writes what ebbtide logs at warning level or above into a record.

    A logger without handlers prints its warnings; one with this handler alone still does.

    Args:
        hear: Receives an event, of a type and with fields.
    """

    def __init__(self, hear: Callable[[str, dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear

    def attach(self) -> Callable[[], None]:
        """Begin; returns a function that ends it."""
        ours = logging.getLogger(_OURS)
        ours.addHandler(self)
        return lambda: ours.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record."""
        if not record.name.startswith(_TRACK):
            fields = {"level": record.levelname.lower(), "code": record.name, "text": record.getMessage()}
            self._hear("message", fields)
        handlers = [*logging.getLogger(_OURS).handlers, *logging.getLogger().handlers]
        if handlers[0] is self and all(isinstance(one, Messages) for one in handlers) and logging.lastResort:
            logging.lastResort.handle(record)
