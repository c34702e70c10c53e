"""Extract the answer from a text: GSM8K's convention first, then those of other data sets. No torch here.

[Note: where an answer stands]
The first of these that exists: what follows the last ``####`` (GSM8K), the contents of the last ``<answer>`` tag
(DeepSeek-R1), the contents of the last ``\\boxed{}`` (MATH). Without a mark, an expected answer is its whole text, and
a completion's is the last number, or fraction, of its text.

An answer is compared as a number if it is one number or fraction, with or without a unit; what stands before a last
``=`` is left out. Any other one (a pair, a time, words) is compared as text.
"""

from __future__ import annotations

import math
import re

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_VALUE = re.compile(rf"(?P<sign>-?)(?P<above>{_DIGITS})(?:\s*/\s*(?P<below>{_DIGITS}))?")
_MARKS = (re.compile(r"####\s*([^\n]+)"), re.compile(r"<answer>(.*?)</answer>", re.DOTALL))
_BOXED = "\\boxed{"
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\left|\\right|\\[!,;: ]|\\text\s*\{([^{}]*)\}|\$")
_SPACES = re.compile(r"\s*([,/():=+*^{}\[\]-])\s*|\s+(?=\\)")
_TAGS = re.compile(r"\s*<think>(?:(?!<think>).)*?</think>\s*<answer>(?:(?!<answer>).)*?</answer>\s*", re.DOTALL)


def answer_in(text: str) -> str | None:
    """Return the answer that is marked in a text, see [Note: where an answer stands]; ``None``: none is."""
    for mark in _MARKS:
        found = mark.findall(text)
        if found:
            return str(found[-1]).strip()
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth, begin = 1, begin + len(_BOXED)
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[begin:end].strip()
    return None  # cut off inside


def number_in(text: str) -> float | None:
    """Return the number that a text's answer is, else the last number of the text; ``None``: there is none."""
    answer = answer_in(text)
    if answer is not None:
        return _number(answer)
    values = list(_VALUE.finditer(_FRACTION.sub(r"\1/\2", text)))
    return _value(values[-1]) if values else None


def same_answer(text: str, expected: str) -> bool:
    """Whether a text has the expected answer: the same number, or where that is no number the same text."""
    marked, answer = answer_in(expected), answer_in(text)
    wanted = expected if marked is None else marked
    number = _number(wanted)
    if number is not None:
        return number_in(text) == number
    return _plain(text if answer is None else answer) == _plain(wanted)


def has_tags(text: str) -> bool:
    """Whether a text is one ``<think>...</think>`` followed by one ``<answer>...</answer>``, and nothing else."""
    return _TAGS.fullmatch(text) is not None


def _number(answer: str) -> float | None:
    """Return the number that an answer is; ``None``: it has none, or several."""
    values = list(_VALUE.finditer(_plain(answer).rpartition("=")[2]))
    return _value(values[0]) if len(values) == 1 else None


def _value(found: re.Match[str]) -> float | None:
    above, below = (float((found[name] or "1").replace(",", "")) for name in ("above", "below"))
    value = above / below if below else math.nan
    return (-value if found["sign"] else value) if math.isfinite(value) else None


def _plain(text: str) -> str:
    """Return a text in lower case, without layout, full stop at its end and spaces that do not matter."""
    text = _LAYOUT.sub(lambda found: found[1] or "", _FRACTION.sub(r"\1/\2", text))
    return _SPACES.sub(lambda found: found[1] or "", " ".join(text.lower().split())).rstrip(".").strip()
