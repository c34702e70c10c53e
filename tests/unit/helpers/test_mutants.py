"""Each guard of operands, trust and second runs is missed by a test. The whole table: run by make test-all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mutant_table import MUTANTS
from tests.helpers.mutants import ROOT, Mutant, apply, killed_by


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_test_fails_without_it(mutant: Mutant) -> None:
    assert killed_by(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant, tmp_path: Path) -> None:
    """Its text is there once, and what comes of it is Python."""
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / "src" / mutant.file).read_text())
    apply(mutant, tmp_path)
    assert copy.read_text() != (ROOT / "src" / mutant.file).read_text()


def test_a_text_that_is_not_there_once_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 times"):
        apply(Mutant("gone", "ebbtide/engine/guard.py", "no such text", "", ()), ROOT / "src")
