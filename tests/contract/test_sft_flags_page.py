"""The page of flags is written from the config, and never by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide_recipes.sft.config import SftConfig
from tests.contract.sft_flags_page import PAGE, page


def test_the_page_is_what_the_config_gives() -> None:
    hint = "run `python -m tests.contract.sft_flags_page > docs/reference/sft-flags.md`"
    assert PAGE.read_text() == page(), hint


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SftConfig)])
def test_every_flag_says_what_it_does(name: str) -> None:
    row = next(line for line in page().splitlines() if line.startswith(f"| `--{name}` |"))
    assert len(row.split("|")[4].strip()) > 10
