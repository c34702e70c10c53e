"""Each mutant of the store's stream code is caught by a test. Takes minutes: run by make test-all."""

from __future__ import annotations

import pytest

from tests.helpers.mutants import Mutant, killed_by, known_killers
from tests.simdev.mutants import MUTANTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_test_fails_without_it(mutant: Mutant) -> None:
    assert killed_by(mutant, known_killers().get(mutant.name, ""))
