"""Encoders, encoder-decoders and recurrent models, in every precision under every policy."""

from __future__ import annotations

import pytest

from tests.helpers.models import STACKS
from tests.helpers.text_families import ENCODERS, RECURRENT
from tests.zoo.cases import cases, check_case


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@cases((*ENCODERS, *RECURRENT, *STACKS))
def test_a_family_under_a_policy(name: str, precision: str, policy: str) -> None:
    check_case(name, precision, policy)
