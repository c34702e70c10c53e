"""Sizes in bytes: reading what people write, writing what people read."""

from __future__ import annotations

import re
from fractions import Fraction

from ebbtide.base.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int | float, *, name: str = "size") -> int:
    """Read a size such as ``"40GiB"``, ``"40 GB"``, ``"512MiB"`` or ``1048576``.

    Args:
        text: A number of bytes, or a number with a unit (``KB`` = 1000, ``KiB`` and ``K`` = 1024, and so on).
        name: What the size is for; stands in the error.

    Returns:
        The size in bytes, greater than zero.

    Raises:
        ConfigError: The text is not a size, or the size is not above zero.
    """
    match = _SIZE.fullmatch(str(text))
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or (size := int(Fraction(match.group(1)) * factor)) <= 0:
        raise ConfigError(
            f"{name} is {text!r}",
            expected="a size above zero, such as '40GiB', '40 GB', '512MiB' or a number of bytes",
            hint="KB, MB, GB count in thousands; KiB, MiB, GiB (and K, M, G) in 1024s",
        )
    return size


def format_size(size_bytes: float, *, digits: int = 1) -> str:
    """Write a size for people: ``1536`` → ``'1.5 KiB'``; ``digits`` behind the point."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.{digits}f} TiB"
