"""Bound methods that do not keep their object alive: a cycle would leave its threads and files to the collector."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, bool]) -> Callable[P, bool]:
    """Return a function that calls a bound method while its object lives, and returns False afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> bool:
        bound = reference()
        return bound is not None and bound(*args, **kwargs)

    return call
