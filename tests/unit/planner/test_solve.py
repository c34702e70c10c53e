"""Choosing a plan: budgets and slowdowns hold, and neither costs more than necessary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.base.actions import Action
from ebbtide.base.errors import BudgetError
from ebbtide.planner import solve
from ebbtide.planner.bound import Bound
from ebbtide.planner.profile import Profile, Rates, _spread
from ebbtide.planner.simulate import simulate
from ebbtide.planner.solve import Search
from tests.helpers.profiles import alike, fit, profiles, qwen3_8b, shrink, unit

FAST = Rates(out_bytes_per_second=1e12, in_bytes_per_second=1e12)


def peak_of_everything_kept(profile: Profile) -> int:
    return simulate(profile, [[Action.KEEP] * len(b.units) for b in profile.blocks]).peak_bytes


@settings(max_examples=60)
@given(profiles(), st.floats(0, 1.2))
def test_a_budget_holds_or_is_refused(profile: Profile, share: float) -> None:
    budget = int(share * peak_of_everything_kept(profile))
    try:
        found = fit(profile, budget)
    except BudgetError as error:
        assert "smallest peak" in str(error) and "hint:" in str(error)
        return
    assert found.predicted.peak_bytes <= budget
    assert simulate(profile, found.assignment) == found.predicted


@settings(max_examples=60)
@given(profiles(), st.sampled_from([0.0, 0.05, 0.5, 10.0]))
def test_a_slowdown_holds(profile: Profile, slowdown: float) -> None:
    found = shrink(profile, slowdown)
    assert found.predicted.overhead_seconds <= slowdown * profile.step_seconds * (1 + 1e-6) + 1e-9
    assert found.predicted.kept_bytes <= profile.saved_bytes


@settings(max_examples=60)
@given(profiles(), st.sampled_from([0, 1, 64, 500, 2000]), st.floats(0, 1.2), st.sampled_from([0.0, 0.5, 10.0]))
def test_no_plan_offloads_more_than_the_store_holds(
    profile: Profile, store_bytes: int, share: float, slowdown: float
) -> None:
    """Not even if executions of one block share their actions; with an empty store there is still a plan."""
    blocks = [replace(block, name=f"b{place % 2}") for place, block in enumerate(profile.blocks)]
    for step in (profile, replace(profile, blocks=tuple(blocks))):
        step = replace(step, store_bytes=store_bytes)
        found = [Search(step).smallest, shrink(step, slowdown)]
        found += [fit(step, max(int(share * peak_of_everything_kept(step)), found[0].predicted.peak_bytes))]
        for each in found:
            assert each.predicted.moved_bytes <= store_bytes
            assert each.bound_seconds <= each.predicted.overhead_seconds + 1e-9
            assert simulate(step, each.assignment) == each.predicted


@pytest.mark.parametrize("part", [0.5, 0.25, 0.0])
def test_within_a_small_store_there_is_a_plan_that_recomputes(part: float) -> None:
    profile = qwen3_8b(32768)
    free = shrink(profile, 0.05)
    store_bytes = int(part * free.predicted.moved_bytes)
    found = shrink(replace(profile, store_bytes=store_bytes), 0.05).predicted
    assert 0.95 * store_bytes <= found.moved_bytes <= store_bytes < free.predicted.moved_bytes
    assert found.overhead_seconds <= 0.05 * profile.step_seconds * (1 + 1e-6)
    assert free.predicted.peak_bytes < found.peak_bytes < 0.9 * peak_of_everything_kept(profile)


@given(profiles())
def test_a_budget_that_holds_everything_keeps_everything(profile: Profile) -> None:
    found = fit(profile, peak_of_everything_kept(profile))
    assert found.predicted.kept_bytes == profile.saved_bytes
    assert found.predicted.overhead_seconds == pytest.approx(0)


def test_no_slowdown_at_all_still_takes_what_is_free() -> None:
    profile = alike(8, (unit("a", 1000),), FAST, window_bytes=1000)
    found = shrink(profile, 0.0)
    assert found.predicted.kept_bytes == 0
    assert found.predicted.overhead_seconds == pytest.approx(0, abs=1e-6)


def test_small_steps_whose_handling_does_not_pay_keep_everything() -> None:
    rates = Rates(out_bytes_per_second=1e9, in_bytes_per_second=1e9, handling_seconds=1e-3)
    found = shrink(alike(4, (unit("a", 1000), unit("b", 10)), rates, forward=1e-3), 0.05)
    assert found.predicted.kept_bytes == 4 * 1010


def test_cheap_recomputes_are_recomputed_and_costly_ones_offloaded() -> None:
    rates = Rates(out_bytes_per_second=100.0, in_bytes_per_second=1e12)
    profile = alike(8, (unit("light", 100, 1e-4), unit("dear", 100, 5.0)), rates, window_bytes=400)
    found = shrink(profile, 0.01)
    assert all(actions[0] is Action.RECOMPUTE for actions in found.assignment)
    assert Action.RECOMPUTE not in {actions[1] for actions in found.assignment}
    assert sum(actions[1] is Action.OFFLOAD for actions in found.assignment) >= 6


def test_what_may_not_move_is_recomputed_or_stays() -> None:
    units = (unit("fixed", 100, movable=False), unit("recomputed", 100, 0.0, movable=False), unit("free", 100))
    found = shrink(alike(4, units, FAST), 10.0)
    assert {actions[:2] for actions in map(tuple, found.assignment)} == {(Action.KEEP, Action.RECOMPUTE)}


@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_the_chosen_schedule_is_near_the_bound(tokens: int, share: float) -> None:
    profile = qwen3_8b(tokens)
    found = fit(profile, int(share * profile.saved_bytes))
    kept_bytes, overhead_seconds = found.predicted.kept_bytes, found.predicted.overhead_seconds
    assert overhead_seconds >= found.bound_seconds - 1e-9
    # Against the bound of a schedule that serves nothing from where it was saved.
    assert 100 * (overhead_seconds - Bound(profile).least(kept_bytes)[0]) / profile.step_seconds <= 1.5


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_a_plan_simulates_few_candidates(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Profile] = []
    monkeypatch.setattr(solve, "simulate", lambda *given: simulated.append(given[0]) or simulate(*given))
    profile = qwen3_8b(tokens)
    search = Search(profile)
    search.fit(int(0.1 * profile.saved_bytes))
    one = len(simulated)
    assert 1 < one <= 110
    search.fit(int(0.1 * profile.saved_bytes))
    assert len(simulated) == one


def test_tighter_budgets_cost_more() -> None:
    profile = qwen3_8b(8192, layers=12)
    costs = [
        fit(profile, int(share * profile.saved_bytes)).predicted.overhead_seconds for share in (0.2, 0.4, 0.6, 0.8, 1.1)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(0)


@given(st.integers(0, 80))
def test_every_beginning_of_the_spread_is_spread(count: int) -> None:
    order = _spread(count)
    assert sorted(order) == list(range(count))
    for taken in range(1, count):
        chosen = sorted(order[:taken])
        gaps = [b - a for a, b in zip([-1, *chosen], [*chosen, count], strict=True)]
        assert max(gaps) <= 3 * (count + 1) / (taken + 1) + 1
