"""Without each guard of operands, trust and second forwards a test fails. The full table: run by make test-all.

The mutants of the store run on the simulated device, in ``tests/simdev/test_mutants.py``; that they match the code is
checked here, with or without a compiler.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mutant_table import MUTANTS
from tests.helpers.mutants import NO_END, ROOT, Mutant, apply, killed_by, known_killers
from tests.simdev.mutants import MUTANTS as OF_THE_STORE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_test_fails_without_it(mutant: Mutant) -> None:
    assert killed_by(mutant, known_killers().get(mutant.name, ""))


@pytest.mark.parametrize("mutant", (*MUTANTS, *OF_THE_STORE), ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant, tmp_path: Path) -> None:
    """Its text occurs once, the result is valid Python, and its tests exist."""
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests if not test.startswith("-"))
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / "src" / mutant.file).read_text())
    apply(mutant, tmp_path)
    assert copy.read_text() != (ROOT / "src" / mutant.file).read_text()


def test_a_text_that_does_not_occur_once_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 times"):
        apply(Mutant("gone", "ebbtide/engine/guard.py", "no such text", "", ()), ROOT / "src")


def test_a_mutant_under_which_the_tests_do_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.mutants.LIMIT_SECONDS", 0.01)
    assert killed_by(MUTANTS[0]) == NO_END


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in (*MUTANTS, *OF_THE_STORE)]
    assert len(names) == len(set(names))
