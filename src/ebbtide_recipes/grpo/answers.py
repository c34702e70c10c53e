"""Extract the answer from a text: GSM8K's convention first, then those of other data sets. No torch here.

[Note: where an answer stands]
The first of these that exists: what follows the last ``####`` (GSM8K), the contents of the last ``<answer>`` tag
(DeepSeek-R1), the contents of the last ``\\boxed{}`` (MATH). Without a mark, an expected answer is its whole text, and
a completion's is the last number, or fraction, of its text.

An answer is compared as a number if it is one number, fraction or mixed number and nothing else but a currency, words
or a unit; what stands before a last ``=`` is left out. Any other one (a pair, a time, words, an expression such as
``2\\pi``, ``5x`` or ``\\sqrt{3}``) is compared as text.
"""

from __future__ import annotations

import math
import re

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\w))?"
_VALUE = re.compile(rf"(?P<sign>(?:(?<![\w)}}\]])-)?)(?P<above>{_DIGITS})(?:\s*/\s*(?P<below>{_DIGITS}))?")
_FUNCTIONS = r"(?!(?:sqrt|root|log|ln|exp|sin|cos|tan|pi|max|min|mod)\b)"
_BEFORE = re.compile(rf"(?:{_FUNCTIONS}[a-z]+[: ]+)*[$€£¥]?\s*")
_ONE_UNIT = r"(?:[a-z]{2,}|[mgshl])(?:\^?\{?[23]\}?)?"
_AFTER = re.compile(
    rf"\s*(?:\\?%|°|\^\{{?\\circ\}}?|[€£¥]|(?:k?m|cm|mm|kg|mg|ml|lb|oz|ft|hrs?|min|sec|mph|usd|eur)\b)?"
    rf"(?:[ /]{_FUNCTIONS}{_ONE_UNIT}\b)*"
)
_MARKS = (re.compile(r"####\s*([^\n]+)"), re.compile(r"<answer>(.*?)</answer>", re.DOTALL))
_BOXED = "\\boxed{"
_FRACTION = re.compile(r"(\d?)\s*\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_MIXED = re.compile(r"(?<![\d/.,^])(\d+)\s+(\d+)/(\d+)(?![\d/])")
_LAYOUT = re.compile(r"\\left|\\right|\\[!,;: ]|\\text\s*\{([^{}]*)\}|\\?\$")
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
    values = list(_VALUE.finditer(_fractions(text)))
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
    """Return the number that an answer is; ``None``: it is none, or more than one."""
    text = _plain(answer).rpartition("=")[2]
    found = _VALUE.search(text)
    if found is None or not _BEFORE.fullmatch(text, 0, found.start()) or not _AFTER.fullmatch(text, found.end()):
        return None
    return _value(found)


def _value(found: re.Match[str]) -> float | None:
    above, below = (float((found[name] or "1").replace(",", "")) for name in ("above", "below"))
    value = above / below if below else math.nan
    return (-value if found["sign"] else value) if math.isfinite(value) else None


def _plain(text: str) -> str:
    """Return a text in lower case, without layout, full stop at its end and spaces that do not matter."""
    text = _LAYOUT.sub(lambda found: found[1] or "", _fractions(text).replace("{,}", ","))
    return _SPACES.sub(lambda found: found[1] or "", " ".join(text.lower().split())).lstrip("* ").rstrip("*. ")


def _fractions(text: str) -> str:
    """Return a text with fractions and mixed numbers as ``a/b``."""
    text = _FRACTION.sub(lambda f: f"{f[1]} {f[2] or f[3] or ''}/{f[4] or f[5] or ''}".lstrip(), text)
    return _MIXED.sub(lambda f: f"{int(f[1]) * int(f[3]) + int(f[2])}/{f[3]}", text)
