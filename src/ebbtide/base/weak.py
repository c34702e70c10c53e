"""Bound methods that do not keep their object alive: a cycle would leave its threads and files to the collector."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def weakly(method: Callable[[T], bool]) -> Callable[[T], bool]:
    """Return a function that calls a bound method while its object lives, and returns False afterwards."""
    reference = weakref.WeakMethod(method)

    def call(value: T) -> bool:
        bound = reference()
        return bound is not None and bound(value)

    return call
