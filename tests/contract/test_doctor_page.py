"""The page of the doctor: its table of codes is the code's own."""

from __future__ import annotations

import re
from pathlib import Path

from ebbtide.doctor.findings import RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/doctor.md").read_text(encoding="utf-8")


def told(page: str) -> list[tuple[str, str, str]]:
    """Return code, severity and meaning of each row of the page's table of codes."""
    return re.findall(r"^\| `(EBB\d+)` \| (\w+) \| (.+?) \|$", page, re.MULTILINE)


def test_the_codes_are_those_of_the_rules() -> None:
    assert told(PAGE) == [(rule.code, rule.severity, rule.about) for rule in RULES]


def test_no_other_code_is_named() -> None:
    assert set(re.findall(r"EBB\d+", PAGE)) == {rule.code for rule in RULES}


def test_a_row_that_differs_would_be_found() -> None:
    assert told("| code | severity | what it finds |\n| --- | --- | --- |\n| `EBB999` | note | x |\n") == [
        ("EBB999", "note", "x")
    ]
