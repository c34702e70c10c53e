"""Hints for names that a command does not know: the nearest ones, and the page that lists all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from ebbtide.base.errors import nearest_names

COUNT = 3
"""Names in a hint."""

_LIKE = 0.7
"""Likeness of two last parts of keys from which on one is suggested for the other."""


def near_flags(written: str, names: Iterable[str], aliases: Mapping[str, str]) -> str:
    """Return ``did you mean ...?`` for an unknown flag, or an empty string.

    Args:
        written: The name, without hyphens at its front.
        names: Names that are taken as they are.
        aliases: Other programs' names, and what they are here.
    """
    close = nearest_names(written.replace("-", "_").lower(), dict.fromkeys((*names, *aliases)), count=COUNT)
    return _question(f"{name!r} (here {aliases[name]!r})" if name in aliases else repr(name) for name in close)


def near_keys(written: str, keys: Iterable[str], flags: Iterable[str]) -> str:
    """Return ``did you mean ...?`` for an unknown ``section.key``, or an empty string.

    The last part has to be alike, and the same if any is: keys of one section are alike in all of their first parts.

    Args:
        written: The key.
        keys: The dotted keys that are known.
        flags: The flags, suggested for a last part that is like one of them.
    """
    last = written.lower().rpartition(".")[2]
    shown = {key: repr(key) for key in keys} | {flag: f"--{flag}" for flag in flags}
    likeness = {key: _likeness(last, key.rpartition(".")[2]) for key in shown}
    least = 1.0 if 1.0 in likeness.values() else _LIKE
    close = [key for key, value in likeness.items() if value >= least]
    close.sort(key=lambda key: likeness[key] + _likeness(written.lower(), key), reverse=True)
    return _question(shown[key] for key in close[:COUNT])


def _question(shown: Iterable[str]) -> str:
    listed = ", ".join(shown)
    return f"did you mean {listed}?" if listed else ""


def _likeness(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()
