"""Extract the answer from a text: GSM8K's convention first, then those of other data sets. No torch here.

[Note: where an answer stands]
The first of these that exists: what follows the last ``####`` (GSM8K) unless another mark comes later, as after a
heading; the contents of the last ``<answer>`` tag (DeepSeek-R1); those of the last ``\\boxed{}`` (MATH). Without a
mark, an expected answer is its whole text, and a completion's is the last number, or fraction, of its text.

An answer is compared as a number if it has one number, fraction or mixed number, and besides it only words, units,
currencies and punctuation; what stands before a last ``=`` is left out, unless it has another value of a variable
(``x = 5, y = 6``). Any other one (a pair, a time, words, a number that a word changes such as ``5 million``, an
expression such as ``2\\pi``, ``5x`` or ``\\sqrt{3}``) is compared as text.
"""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\w))?"
_VALUE = re.compile(rf"(?P<sign>(?:(?<![\w)}}\]])[+-])?)(?P<above>{_DIGITS})(?:\s*/\s*(?P<below>{_DIGITS}))?")
_HASHES = re.compile(r"####\s*([^\n]+)")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = "\\boxed{"
_FRACTION = re.compile(r"(?:(\d)\s{0,4})?\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_MIXED = re.compile(r"(?<![\d/.,^])(\d{1,99})\s{1,4}(\d{1,99})/(\d{1,99})(?![\d/])")  # Python bounds what int() reads
_BRACKETED = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
_LISTED = re.compile(
    r"(?<![\w*/+^-])(?<![*/+^-] )[a-z](?:_\w*)?\s*[=<>][^=<>]*?\d[^=<>]*?(?:,(?!\d{3}(?!\d))|[;，；、]|\b(?:and|or)\b)"
)  # x=5, y
_LAYOUT = re.compile(
    r"\\left|\\right|\\[!,;: ()\[\]]|\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}|\\?\$|\\(?=%)|\*\*|`"
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree")
_SPACES = re.compile(r"\s*([,/():=+*^{}\[\]-])\s*|\s+(?=\\)")
_TAGS = re.compile(r"\s*<think>(?:(?!<think>).)*?</think>\s*<answer>(?:(?!<answer>).)*?</answer>\s*", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_SQUARES = re.compile(r"(?<![a-z])([a-z]{2,}|m)\s*\^\s*\{?[23]\}?")  # of units: cm^2
_PER = re.compile(r"(?<=[^\W\d_])\s*/\s*(?=[^\W\d_])")  # km/h
_PUNCTUATION = frozenset(" .,;:!?'\"()[]%€£¥°~≈")
_LETTERS = frozenset("aimghsl")
"""Single letters that are words or units; any other is a variable."""
_CHANGING = frozenset(
    {"sqrt", "root", "log", "ln", "exp", "sin", "cos", "tan", "pi", "max", "min", "mod", "gcd", "lcm", "factorial",
     "negative", "minus", "plus", "times", "less", "more", "than", "not", "least", "most", "over", "under", "below",
     "above", "or", "half", "hundred", "thousand", "million", "billion", "trillion", "dozen", "squared", "cubed",
     "百", "千", "万", "亿"}
)  # fmt: skip
"""Words next to which a number is not the answer's value."""


def answer_in(text: str) -> str | None:
    """Return the answer that is marked in a text, see [Note: where an answer stands]; ``None``: none is."""
    hashes, tags = [*_HASHES.finditer(text)], _ANSWER.findall(text)
    if hashes:
        return answer_in(text[hashes[-1].end() :]) or _boxed(hashes[-1][1]) or hashes[-1][1].strip()
    return (_boxed(tags[-1]) or str(tags[-1]).strip()) if tags else _boxed(text)


def _boxed(text: str) -> str | None:
    """Return the contents of the last ``\\boxed{}``; ``None``: there is none, or it is cut off."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth, begin = 1, begin + len(_BOXED)
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[begin:end].strip()
    return None


def number_in(text: str) -> float | None:
    """Return the number that a text's answer is, else the last number of the text; ``None``: there is none."""
    answer = answer_in(text)
    if answer is not None:
        return _number(answer)
    values = list(_VALUE.finditer(_fractions(text.replace("\u2212", "-"))))
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
    text = _SQUARES.sub(r"\1", _without_layout(answer))
    before, _, after = text.rpartition("=")
    text = text if _LISTED.search(_BRACKETED.sub("", before)) else after
    values = list(_VALUE.finditer(text))
    if len(values) != 1:
        return None
    before, after = text[: values[0].start()], text[values[0].end() :]
    unit = _WORD.match(after)
    if before[-1:].isalpha() or after[:1] == "!" or (unit and len(unit[0]) == 1 and unit[0] in "ai"):  # x5, 5!, 5a
        return None
    around = f"{before} {_PER.sub(' ', after)}"
    words = set(_WORD.findall(around))
    variables = {word for word in words if len(word) == 1 and word.isascii()} - _LETTERS
    other = set(_WORD.sub("", around)) - _PUNCTUATION
    return None if words & _CHANGING or variables or other else _value(values[0])


def _value(found: re.Match[str]) -> float | None:
    """Return a number: an integer of any length is exact, another one is what a float has."""
    texts = [(found[name] or "1").lower().replace(",", "") for name in ("above", "below")]
    if any(len(text.partition("e")[2]) > len("+999") for text in texts):
        return None  # its digits alone would fill the memory
    try:
        value = Fraction(texts[0]) / Fraction(texts[1])
        rounded = float(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    exact = value.numerator if value.denominator == 1 else rounded
    return -exact if found["sign"] == "-" else exact


def _plain(text: str) -> str:
    """Return a text in lower case, without layout, full stop at its end and spaces that do not matter."""
    text = _SPACES.sub(lambda found: found[1] or "", _without_layout(text))
    return text.lstrip("* ").rstrip("*. ")


def _without_layout(text: str) -> str:
    """Return a text in lower case, with its fractions as ``a/b`` and single spaces, without what only sets type."""
    text = _fractions(_DEGREES.sub("°", text.replace("\u2212", "-"))).replace("{,}", ",")
    return " ".join(_LAYOUT.sub(lambda found: found[1] or "", text).lower().split())


def _fractions(text: str) -> str:
    """Return a text with fractions and mixed numbers as ``a/b``."""
    text = _FRACTION.sub(lambda f: f"{f[1] or ''} {f[2] or f[3] or ''}/{f[4] or f[5] or ''}".lstrip(), text)
    return _MIXED.sub(lambda f: f"{int(f[1]) * int(f[3]) + int(f[2])}/{f[3]}", text)
