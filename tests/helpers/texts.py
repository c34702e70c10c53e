"""What a test of an error's text holds: the facts and the presence of a hint, not the prose."""

from __future__ import annotations


def lacks(text: str, facts: tuple[str, ...]) -> list[str]:
    """Return the facts that a text does not have, and ``hint`` where it has none."""
    hint = text.rpartition("\nhint: ")
    return [fact for fact in facts if fact not in text] + ([] if hint[1] and hint[2].strip() else ["hint"])
