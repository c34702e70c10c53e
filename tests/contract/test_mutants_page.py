"""The pages next to the tests: every test that they name exists, and every mutant has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.mutant_table import MUTANTS
from tests.helpers.mutants import PAGE, ROOT, known_killers
from tests.simdev.mutants import MUTANTS as OF_THE_STORE

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)")


@pytest.mark.parametrize("page", [PAGE, ROOT / "tests/simdev/README.md"], ids=lambda page: page.name)
def test_the_tests_it_names_exist(page: Path) -> None:
    found = NAMED.findall(page.read_text(encoding="utf-8"))
    assert len(found) > 20
    for path, name in sorted({*found}):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], f"{path}::{name}"


def test_every_mutant_was_found_by_a_test() -> None:
    known = known_killers()
    assert sorted(known) == sorted(m.name for m in (*MUTANTS, *OF_THE_STORE)), "run `python -m tests.helpers.mutants`"
    assert all(known.values())
