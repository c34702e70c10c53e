"""Restricts ``Minimal`` to its recipes, in tests of recipes and of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock


@contextmanager
def minimal_by_heuristic() -> Iterator[None]:
    """Keep ``Minimal`` from trying to checkpoint blocks, or to offload them entirely.

    In tiny blocks a recipe always takes longer than a second forward: half of the blocks or all of them would do
    without from the second step on, and no test of recipes would meet any.
    """
    from ebbtide.profiling import minimal

    with mock.patch.object(minimal, "trials", partial(_none, minimal.trials)):
        yield


@contextmanager
def measured_minimal() -> Iterator[None]:
    """Within ``minimal_by_heuristic``: ``Minimal`` as users have it."""
    from ebbtide.profiling import minimal

    patched: Any = minimal.trials
    with mock.patch.object(minimal, "trials", patched.args[0]):
        yield


def _none(real: Callable[..., list[Any]], *arguments: object, **named: object) -> list[Any]:
    return []
