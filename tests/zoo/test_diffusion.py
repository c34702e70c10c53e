"""Models that generate images and video, in every precision under every policy."""

from __future__ import annotations

import pytest

from tests.helpers.diffusion_families import DIFFUSION
from tests.zoo.cases import cases, check_case


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@cases(tuple(DIFFUSION))
def test_a_family_under_a_policy(name: str, precision: str, policy: str) -> None:
    check_case(name, precision, policy)
