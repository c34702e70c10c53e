"""Lets ``Minimal`` keep to its recipes, in tests of recipes and of hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def minimal_by_rule() -> Iterator[None]:
    """Have ``Minimal`` measure no checkpointed block.

    In tiny blocks a recipe always takes longer than a second forward: some blocks of its second and third step and all
    from its fourth would be checkpointed, and no test of recipes would meet any.
    """
    from ebbtide.profiling import minimal

    with mock.patch.object(minimal, "every_other", lambda step: frozenset[str]()):
        yield
