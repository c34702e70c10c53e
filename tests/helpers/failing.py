"""System calls that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def failing(number: int) -> Callable[..., int]:
    """Return a function that raises the system error of this number for any arguments."""

    def fail(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail
