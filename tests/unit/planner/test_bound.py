"""The bound: what no schedule can beat."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.base.actions import Action
from ebbtide.planner.bound import Bound, Recomputes
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.simulate import simulate
from tests.helpers.profiles import alike, profiles, qwen3_8b, unit


def test_the_cheapest_per_byte_is_recomputed_first() -> None:
    rates = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0)
    recomputes = Recomputes(alike(1, (unit("dear", 10, 10.0), unit("cheap", 100, 1.0), unit("never", 5)), rates))
    assert recomputes.seconds(0) == 0
    assert recomputes.seconds(50) == pytest.approx(0.5)
    assert recomputes.seconds(105) == pytest.approx(1.0 + 5.0)
    assert recomputes.seconds(110) == pytest.approx(11.0)
    assert recomputes.seconds(111) == math.inf


def test_everything_kept_costs_nothing() -> None:
    profile = qwen3_8b(8192)
    assert Bound(profile).least(profile.saved_bytes)[0] == 0


def test_what_must_stay_cannot_leave() -> None:
    rates = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0)
    profile = alike(1, (unit("stays", 10, movable=False), unit("leaves", 10)), rates)
    assert Bound(profile).least(9)[0] == math.inf
    assert Bound(profile).least(10)[0] < math.inf


@given(profiles(), st.floats(0, 1))
def test_it_is_the_minimum_over_what_is_offloaded(profile: Profile, share: float) -> None:
    bound = Bound(profile)
    kept = profile.stubborn_bytes + share * (profile.saved_bytes - profile.stubborn_bytes)
    leave = profile.saved_bytes - kept
    least, moved = bound.least(kept)
    assert 0 <= moved <= leave + 1e-6
    assert least <= min(bound._overhead(leave, leave * i / 400) for i in range(401)) + 1e-9


@settings(max_examples=60)
@given(profiles())
def test_no_simulated_schedule_is_faster(profile: Profile) -> None:
    bound = Bound(profile)
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
        # What had not left at the turn-around was kept.
        assert found.overhead_seconds >= bound.least(found.kept_bytes + found.served_bytes)[0] - 1e-9
