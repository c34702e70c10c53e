"""Bytes that every rank holds and moves, for every wrapper: by formula from the saved bytes of ordinary training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist import sharded
from tests.dist.memory import Count, measure_all
from tests.dist.sharded import STRATEGIES, Setup, spelled
from tests.helpers.models import WIDTH
from tests.helpers.spawn import CaseResult, run_cases

BLOCKS, TOKENS = 2, 2 * 10
ON_FOUR = tuple(replace(s, schedule="one") for s in sharded.ON_FOUR)
SETUPS: dict[str, Setup] = {spelled(s): s for s in (*STRATEGIES, *ON_FOUR)}
FOUR = {spelled(s) for s in ON_FOUR}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected strategies: one group of processes for two ranks, one for four."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    found: dict[str, CaseResult] = {}
    for size in (2, 4):
        cases = {name: (measure_all, (SETUPS[name],)) for name in wanted if (name in FOUR) == (size == 4)}
        found |= run_cases(cases, size, timeout_seconds=60.0) if cases else {}
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in FOUR else ()) for n in SETUPS])
def test_a_rank_holds_and_moves_what_its_plan_says(results: dict[str, CaseResult], name: str) -> None:
    for counts in results[name].values():
        plain = counts.pop("plain")
        assert plain.saved == plain.alive > plain.inputs > 0
        if SETUPS[name].model == "decoder" and not SETUPS[name].mixed:
            # With adapters the input of the first block takes no gradient.
            assert plain.inputs == (BLOCKS - SETUPS[name].lora) * TOKENS * WIDTH * 4
        for policy, count in counts.items():
            _check_both_counts(policy, count, plain)
            _check_formula(policy, count, plain, narrowed=bool(SETUPS[name].mixed))


def _check_both_counts(policy: str, count: Count, plain: Count) -> None:
    """The handle's figures equal the independent count; weights never move."""
    said = count.stats
    assert said["unique"] == plain.saved, policy
    assert said["kept"] == count.alive, policy
    assert said["offloaded"] == said["store"] == count.offloaded == count.stored, policy
    assert said["kept"] + said["offloaded"] + said["recomputed"] == plain.saved, policy
    assert count.weights == 0, policy


def _check_formula(policy: str, count: Count, plain: Count, *, narrowed: bool) -> None:
    match policy:
        case "keep":
            assert (count.alive, count.offloaded) == (plain.saved, 0)
        case "inputs":
            assert count.alive == plain.saved - plain.inputs - plain.widened
            assert count.offloaded == plain.inputs + plain.widened // 2
            assert narrowed or not plain.widened
        case "offload":
            assert count.alive == 0
            # A tensor that was cast up is stored in its narrow type: fewer bytes, and recomputed from them.
            assert count.offloaded == plain.saved - count.stats["recomputed"]
            assert narrowed or count.stats["recomputed"] == 0
        case _:
            assert count.alive == 0 and 0 < count.offloaded < plain.saved
