"""Where ebbtide may do otherwise than plain training: the documented limits, each by name.

A limit is a debt. ``tests/property/test_training_loops.py`` holds a program for each and fails when the limit no longer
shows: then it is to be struck out here and in ``docs/concepts/correctness.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.helpers.loop_programs import Program, Setting


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something that plain training allows.

    Attributes:
        name: What it is, in the words of the documentation.
        features: A program that holds one of them may meet it.
        settings: Whether it may be met under a setting.
        errors: Names of the errors that ebbtide may raise; empty: the gradients may be others, without an error.
        example: A program that meets it.
        setting: Under this setting.
    """

    name: str
    features: frozenset[str]
    settings: Callable[[Setting], bool]
    errors: frozenset[str] = frozenset()
    example: Program
    setting: Setting


LIMITS: tuple[Limit, ...] = ()


def excuse(program: Program, setting: Setting, error: str | None) -> str:
    """Return ``excused: <limit>`` if what came may have come by a documented limit; else an empty text.

    Args:
        program: What was trained.
        setting: What ebbtide was told.
        error: Name of the error that was raised where plain training trains; None: other bits.
    """
    for limit in LIMITS:
        wanted = error in limit.errors if error is not None else not limit.errors
        if wanted and limit.settings(setting) and limit.features & program.features:
            return f"excused: {limit.name}"
    return ""
