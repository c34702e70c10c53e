"""Derive findings from facts: problems, notes, and their remedies."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.doctor import device_rules, store_rules  # noqa: F401  # pyright: ignore[reportUnusedImport]
from ebbtide.doctor.facts import Facts
from ebbtide.doctor.rules import DEFINED, Severity

RULES = tuple(sorted(DEFINED, key=lambda rule: rule.code))
"""All rules, by code; the modules imported above define them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem or a note.

    Attributes:
        code: Such as ``"EBB010"``. See [Note: a code's life].
        severity: ``"problem"`` or ``"note"``.
        what: The observation.
        hint: The remedy.
    """

    code: str
    severity: Severity
    what: str
    hint: str


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings: problems first, then by code."""
    found: list[Finding] = []
    for rule in RULES:
        texts = rule.check(facts)
        if texts is not None:
            found.append(Finding(code=rule.code, severity=rule.severity, what=texts[0], hint=texts[1]))
    return tuple(sorted(found, key=lambda finding: (finding.severity != "problem", finding.code)))
