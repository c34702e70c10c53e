"""Restricts ``Minimal`` to its recipes, in tests of recipes and of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock


@contextmanager
def minimal_by_rule() -> Iterator[None]:
    """Keep ``Minimal`` from measuring checkpointed blocks.

    In tiny blocks a recipe always takes longer than a second forward: some blocks of its second and third step and all
    from its fourth would be checkpointed, and no test of recipes would meet any.
    """
    from ebbtide.profiling import minimal

    with mock.patch.object(minimal, "every_other", partial(_none, minimal.every_other)):
        yield


@contextmanager
def measured_minimal() -> Iterator[None]:
    """Within ``minimal_by_rule``: ``Minimal`` as users have it."""
    from ebbtide.profiling import minimal

    by_rule: Any = minimal.every_other
    with mock.patch.object(minimal, "every_other", by_rule.args[0]):
        yield


def _none(real: Callable[..., frozenset[str]], step: object) -> frozenset[str]:
    return frozenset()
