"""The pages on the accelerator path: every test that they name exists, and every mutant has a row."""

from __future__ import annotations

import ast
import re

import pytest

from tests.helpers.mutant_table import MUTANTS
from tests.helpers.mutants import PAGE, ROOT, known_killers
from tests.simdev.mutants import MUTANTS as OF_THE_STORE

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)")


PAGES = {
    "accelerator.md": [PAGE.with_name("accelerator.md"), ROOT / "tests/simdev/README.md"],
    "mutants.md": [PAGE],
}
"""The page that users read, and the one next to the tests, name tests together."""


def named(page: str) -> list[tuple[str, str]]:
    return sorted({found for path in PAGES[page] for found in NAMED.findall(path.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("page", [*PAGES])
def test_the_tests_it_names_exist(page: str) -> None:
    found = named(page)
    assert len(found) > 20
    for path, name in found:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], f"{path}::{name}"


def test_every_mutant_was_found_by_a_test() -> None:
    known = known_killers()
    assert sorted(known) == sorted(m.name for m in (*MUTANTS, *OF_THE_STORE)), "run `python -m tests.helpers.mutants`"
    assert all(known.values())
