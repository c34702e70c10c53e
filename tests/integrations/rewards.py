"""Reward functions that tests name as ``path.py:function``: a random model earns rewards from each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbtide_recipes.grpo.rewards import text_of

NAME = f"{Path(__file__)}:vowels"


def vowels(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the share of vowels."""
    texts = map(text_of, completions)
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


def nothing(completions: list[str]) -> list[float]:
    """Return the same reward for all."""
    return [0.5] * len(completions)


def broken(completions: list[str]) -> list[float]:
    """Raise."""
    return [1 / 0 for _ in completions]


def none(completions: list[str]) -> list[None]:
    """Judge nothing."""
    return [None] * len(completions)


def marked(completions: list[str], mark: list[int], **kwargs: Any) -> list[float]:
    """Return the column ``mark`` of the rows."""
    return [float(number) for number in mark]
