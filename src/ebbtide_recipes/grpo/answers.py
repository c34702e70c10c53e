"""Extract the answer from a text: GSM8K's convention first, then those of other data sets. No torch here.

[Note: where an answer stands]
The first of these that exists: what follows the last ``####`` (GSM8K), the contents of the last ``<answer>`` tag
(DeepSeek-R1), the contents of the last ``\\boxed{}`` (MATH), the last number of the text.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_MARKS = (
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"\\boxed\{([^{}]*)\}"),
)
_TAGS = re.compile(r"\s*<think>(?:(?!<think>).)*?</think>\s*<answer>(?:(?!<answer>).)*?</answer>\s*", re.DOTALL)


def answer_in(text: str) -> str:
    """Return the answer in a text, see [Note: where an answer stands]; empty: there is none."""
    for mark in _MARKS:
        found = mark.findall(text)
        if found:
            return str(found[-1]).strip()
    numbers = _NUMBER.findall(text)
    return str(numbers[-1]) if numbers else ""


def number_in(text: str) -> float | None:
    """Return the last number of a text's answer; ``None``: it has none."""
    numbers = _NUMBER.findall(answer_in(text))
    value = float(numbers[-1].replace(",", "")) if numbers else math.nan
    return value if math.isfinite(value) else None


def same_answer(text: str, expected: str) -> bool:
    """Whether a text has the expected answer: the same number, or without numbers the same words."""
    wanted = number_in(expected)
    if wanted is not None:
        return number_in(text) == wanted
    return _words(answer_in(text) or text) == _words(answer_in(expected) or expected)


def has_tags(text: str) -> bool:
    """Whether a text is one ``<think>...</think>`` followed by one ``<answer>...</answer>``, and nothing else."""
    return _TAGS.fullmatch(text) is not None


def _words(text: str) -> str:
    """Return a text in lower case with single spaces and without a full stop at its end."""
    return " ".join(text.lower().split()).rstrip(".")
