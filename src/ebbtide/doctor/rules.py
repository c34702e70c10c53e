"""What makes a function a rule of ``ebbtide doctor``.

[Note: a code's life]
Codes are stable, because people search for them and scripts match them; the number of a removed rule is not reused.
Tens are topics: 00 versions and devices, 10 the disk, 20 host memory and limits, 30 the link, 40 the environment. A
*problem* keeps offloading from working, or makes it useless; a *note* is worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ebbtide.doctor.facts import Facts

Severity = Literal["problem", "note"]
Advice = tuple[str, str]
"""The observation and the remedy."""

Check = Callable[[Facts], Advice | None]
"""Facts → observation and remedy; ``None``: no finding."""


@dataclass(frozen=True, slots=True)
class FindingRule:
    """A check for one finding.

    Attributes:
        code: See [Note: a code's life].
        severity: Severity of its finding.
        about: Description on the page of codes.
        check: Facts → observation and remedy; ``None``: no finding.
    """

    code: str
    severity: Severity
    about: str
    check: Check


DEFINED: list[FindingRule] = []
"""All rules, in the order of definition."""


def rule(code: str, severity: Severity, about: str) -> Callable[[Check], Check]:
    """Make the decorated function a rule; arguments as for ``FindingRule``."""

    def register(check: Check) -> Check:
        DEFINED.append(FindingRule(code, severity, about, check))
        return check

    return register
