"""Check the text of an error for its facts and the presence of a hint, not for its prose."""

from __future__ import annotations


def lacks(text: str, facts: tuple[str, ...]) -> list[str]:
    """Return the facts that a text lacks, and ``hint`` if it has none."""
    hint = text.rpartition("\nhint: ")
    return [fact for fact in facts if fact not in text] + ([] if hint[1] and hint[2].strip() else ["hint"])
