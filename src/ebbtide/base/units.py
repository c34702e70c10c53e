"""Sizes in bytes: parse and format."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from ebbtide.base.errors import ConfigError, nearest

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int | float, *, name: str = "size", least: Literal[0, 1] = 1) -> int:
    """Read a size such as ``"40GiB"``, ``"40 GB"``, ``"512MiB"`` or ``1048576``.

    Args:
        text: A number of bytes, or a number with a unit (``KB`` = 1000, ``KiB`` and ``K`` = 1024, and so on).
        name: The name of the size, for the error.
        least: The smallest size that is allowed.

    Returns:
        The size in bytes.

    Raises:
        ConfigError: The text is not a size, the size is too small, or it is not a whole number of bytes.
    """
    match = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    factor = _UNITS.get(match.group(2).lower()) if match else None
    size = Fraction(match.group(1)) * factor if match and factor else Fraction(-1)
    if size < least or (factor == 1 and size.denominator != 1):
        raise ConfigError(
            f"{name} is {text!r:.80}",
            expected=f"a size {'above zero' if least else 'of 0 or more'}, such as '40GiB', '40 GB', '512MiB' or a "
            "whole number of bytes",
            hint=_advice(text, match, "one byte" if least else "0"),
        )
    return int(size)


def _advice(text: object, match: re.Match[str] | None, least: str) -> str:
    """Return the hint for a size that cannot be used."""
    if match and match.group(2) and match.group(2).lower() not in _UNITS:
        units = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
        return nearest(match.group(2), units) or f"units are {', '.join(units)}"
    if match and Fraction(match.group(1)) > 1:
        return "a byte has no parts: pass a whole number, or a unit, as in '1.5KiB'"
    if match or re.fullmatch(r"\s*-.*", str(text)):
        return f"the smallest size is {least}: pass a larger size, or leave it out"
    return "KB, MB, GB count in thousands; KiB, MiB, GiB (and K, M, G) in 1024s"


def format_size(size_bytes: float, *, digits: int = 1) -> str:
    """Format a size: ``1536`` → ``'1.5 KiB'``; ``digits`` after the point."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(value, 0 if unit == "B" else digits)) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.{digits}f} TiB"
