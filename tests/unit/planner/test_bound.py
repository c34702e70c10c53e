"""The lower bound that no schedule can beat."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.base.actions import Action
from ebbtide.planner.bound import Bound, lower_bound
from ebbtide.planner.checkpointing import checkpointed
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.simulate import simulate
from ebbtide.planner.solve import Search
from tests.helpers.profiles import alike, profiles, qwen3_8b, unit

SLOW = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0)


def test_the_cheapest_per_byte_is_recomputed_first() -> None:
    bound = Bound(alike(1, (unit("dear", 10, 10.0), unit("cheap", 100, 1.0), unit("never", 5)), SLOW))
    assert bound.seconds(115, 0) == 0
    assert bound.seconds(65, 0) == pytest.approx(0.5)
    assert bound.seconds(10, 0) == pytest.approx(1.0 + 5.0)
    assert bound.seconds(5, 0) == pytest.approx(11.0)
    assert bound.seconds(4, 0) == math.inf
    assert bound.seconds(4, 1) == pytest.approx(11.0)


def test_what_crosses_in_a_narrower_type_is_worth_twice_its_crossing() -> None:
    units = (unit("wide", 100, 3.0), unit("narrow", 100, 2.0, narrow=True))
    bound = Bound(alike(1, units, SLOW))
    # 50 bytes can cross: half of one, or all of the other, which is cheaper per byte to recompute.
    assert bound.seconds(0, 50) == pytest.approx(3.0)
    assert bound.seconds(100, 50) == 0
    prices = bound.prices(0, 50)
    assert prices.rank(units[0]) < prices.rank(units[1])


def test_time_of_the_head_hides_no_copy() -> None:
    """The bytes that leave during the head are on the device when it begins."""
    profile = alike(2, (unit("a", 10, 1.0),), SLOW, head_seconds=1000.0)
    assert Bound(profile).least(0)[0] > 0


def test_everything_kept_costs_nothing() -> None:
    profile = qwen3_8b(8192)
    assert Bound(profile).least(profile.saved_bytes)[0] == 0


def test_what_must_stay_cannot_leave() -> None:
    rates = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0)
    profile = alike(1, (unit("stays", 10, movable=False), unit("leaves", 10)), rates)
    assert Bound(profile).least(9)[0] == math.inf
    assert Bound(profile).least(10)[0] < math.inf


def test_no_more_crosses_than_the_store_holds() -> None:
    profile = alike(2, (unit("a", 10, 1.0), unit("never", 10)), SLOW, forward=100.0)
    assert Bound(profile).least(0) == (0, 40)
    recomputed, moved = Bound(replace(profile, store_bytes=30)).least(0)
    assert moved == 30 and recomputed == pytest.approx(1.0)
    assert Bound(replace(profile, store_bytes=19)).least(0)[0] == math.inf


@given(profiles(), st.floats(0, 1))
def test_it_is_the_minimum_over_what_crosses(profile: Profile, share: float) -> None:
    bound = Bound(profile)
    kept = profile.must_keep_bytes + share * (profile.saved_bytes - profile.must_keep_bytes)
    least, moved = bound.least(kept)
    assert 0 <= moved <= profile.saved_bytes + 1e-6
    others = [bound.overhead(kept, profile.saved_bytes * i / 400) for i in range(401)]
    assert least <= min(others) + 1e-9 * max(1.0, least)


def test_experts_of_hundreds_of_sizes_are_few_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(0)
    units = tuple(
        unit(f"{number}", size, size * 1e-3 * random.uniform(0.9, 1.1), narrow=number % 2 == 0)
        for number, size in enumerate(random.sample(range(100, 10_000, 2), 300))
    )
    rates = Rates(out_bytes_per_second=5e3, in_bytes_per_second=5e3)
    profile = alike(1, units, rates, forward=sum(u.nbytes for u in units) / 4e4)
    coarse = Bound(profile)
    monkeypatch.setattr("ebbtide.planner.bound.PRICE_GRAIN", 1e-9)
    exact = Bound(profile)
    assert len(coarse._sorts) < 50 < 250 < len(exact._sorts)
    for share in (0.0, 0.2, 0.5, 0.8):
        least = exact.least(share * profile.saved_bytes)[0]
        assert (1 - 0.01) * least <= coarse.least(share * profile.saved_bytes)[0] <= least * (1 + 1e-9)
    assert exact.least(0)[0] > 0


def test_what_is_held_back_in_a_narrower_type_takes_that_much() -> None:
    """So no schedule is faster than the bound of another that has as much on the device."""
    search = Search(alike(1, (unit("wide", 50, 0.1), unit("narrow", 100, 0.2, narrow=True)), SLOW, window_bytes=1000))
    keeps, holds = (
        search.simulated([actions]) for actions in ((Action.KEEP, Action.RECOMPUTE), (Action.RECOMPUTE, Action.OFFLOAD))
    )
    assert keeps.predicted.levels_bytes[1] == holds.predicted.levels_bytes[1] == 50
    assert 0.09 < keeps.bound_seconds == holds.bound_seconds <= holds.predicted.overhead_seconds == pytest.approx(0.1)
    assert keeps.predicted.overhead_seconds == pytest.approx(0.2)


@settings(max_examples=60)
@given(profiles())
def test_no_simulated_schedule_is_faster(profile: Profile) -> None:
    bound, head = lower_bound(profile), len(profile.blocks)
    sites = [(place, number, unit) for place, number, unit in profile.units()][:5]
    choices = [
        [Action.KEEP]
        + [Action.OFFLOAD] * unit.movable
        + [Action.RECOMPUTE] * (unit.recompute_seconds is not None)
        for _, _, unit in sites
    ]  # fmt: skip
    for actions in product(*choices):
        assignment = [[Action.KEEP] * len(block.units) for block in profile.blocks]
        for (place, number, _), action in zip(sites, actions, strict=True):
            assignment[place][number] = action
        found = simulate(profile, assignment)
        assert found.overhead_seconds >= bound.least(found.levels_bytes[head])[0] - 1e-9


@settings(max_examples=60)
@given(profiles(), st.sampled_from([Action.KEEP, Action.OFFLOAD]), st.booleans())
def test_no_simulated_schedule_with_checkpoints_is_faster(profile: Profile, inputs: Action, offloads: bool) -> None:
    able = replace(profile, blocks=tuple(replace(block, checkpointable=True) for block in profile.blocks))
    bound = lower_bound(able)
    for count in range(1, len(able.blocks) + 1):
        actions = [list(found) for found in checkpointed(able, count, inputs)]
        for place, number, each in able.units():
            if offloads and place >= count and each.movable:
                actions[place][number] = Action.OFFLOAD
        found = simulate(able, actions)
        assert found.overhead_seconds >= bound.least(found.levels_bytes[len(able.blocks)])[0] - 1e-9
