"""The page of model families: generated from the newest results folder, never written by hand."""

from __future__ import annotations

import pytest

from benchmarks.suites.families import PAGE, cases_of, newest, page, readme
from tests.helpers.models import FAMILIES, PRECISIONS


def test_the_page_is_what_the_results_folder_gives() -> None:
    hint = "run `python -m benchmarks.suites.families --page`"
    assert PAGE.read_text() == page(newest()), hint
    assert (newest() / "README.md").read_text() == readme(cases_of(newest())), hint


def test_the_results_hold_every_family_in_every_precision() -> None:
    cases = cases_of(newest())
    assert [(c["family"], c["precision"]) for c in cases] == [(f, p) for f in FAMILIES for p in PRECISIONS]


@pytest.mark.parametrize("policy", ["keep", "offload", "inputs", "minimal", "auto"])
def test_the_shares_of_every_case_make_the_whole(policy: str) -> None:
    for case in cases_of(newest()):
        found = case["policies"][policy]
        whole = sum(found[what] for what in ("kept", "moved", "recomputed")) / case["naive_bytes"]
        assert 0.9 < whole < 1.1, (case["family"], case["precision"])
        assert found["checkpointed"] <= found["recomputed"]
