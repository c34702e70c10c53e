"""Vision and audio models, in every precision under every policy."""

from __future__ import annotations

import pytest

from tests.helpers.media_families import MEDIA
from tests.zoo.cases import cases, check_case


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@cases(tuple(MEDIA))
def test_a_family_under_a_policy(name: str, precision: str, policy: str) -> None:
    check_case(name, precision, policy)
