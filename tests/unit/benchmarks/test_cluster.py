"""Many ranks that share links: alone a rank is the planner's simulated step, together they share fairly."""

from __future__ import annotations

import random

import pytest

from benchmarks.cluster import Nodes, simulate_ranks
from ebbtide.base.actions import Action, Site
from ebbtide.planner.profile import BlockProfile, Profile, Rates, Unit
from ebbtide.planner.simulate import simulate

ALONE = Nodes(ranks=1, host_bytes_per_second=(1e18,))
MIB = 2**20


def made(
    *, blocks: int = 4, units: int = 3, nbytes: int = 8 * MIB, seconds: float = 1.0, rate: float = 100 * MIB
) -> Profile:
    """A step of equal blocks."""
    each = [
        BlockProfile(
            name=f"layers.{place}", kind="Block", forward_seconds=seconds, backward_seconds=2 * seconds,
            units=tuple(
                Unit(site=Site("Block", "", "N", n), nbytes=nbytes) for n in range(units)
            ),
        )
        for place in range(blocks)
    ]  # fmt: skip
    return Profile(blocks=tuple(each), rates=Rates(out_bytes_per_second=rate, in_bytes_per_second=rate))


def all_offloaded(profile: Profile) -> list[list[Action]]:
    return [[Action.OFFLOAD] * len(block.units) for block in profile.blocks]


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_alone_is_the_planners_simulated_step(seed: int) -> None:
    draw = random.Random(seed)
    blocks = [
        BlockProfile(
            name=f"layers.{place}", kind="Block", forward_seconds=draw.uniform(0.1, 2),
            backward_seconds=draw.uniform(0.1, 3),
            units=tuple(
                Unit(
                    site=Site("Block", "", "N", n), nbytes=draw.randrange(MIB, 40 * MIB),
                    recompute_seconds=draw.uniform(0, 0.1),
                )
                for n in range(draw.randrange(1, 5))
            ),
        )
        for place in range(6)
    ]  # fmt: skip
    rates = Rates(out_bytes_per_second=draw.uniform(10, 90) * MIB, in_bytes_per_second=draw.uniform(10, 90) * MIB)
    profile = Profile(blocks=tuple(blocks), rates=rates, prologue_seconds=0.3, head_seconds=0.7, epilogue_seconds=0.2)
    kinds = [Action.OFFLOAD, Action.OFFLOAD, Action.KEEP, Action.RECOMPUTE]
    assignment = [[draw.choice(kinds) for _ in block.units] for block in blocks]
    expected = simulate(profile, assignment).step_seconds
    assert simulate_ranks([profile], assignment, ALONE) == [pytest.approx(expected, rel=1e-9)]


@pytest.mark.parametrize("shared", ["host", "switch"])
def test_ranks_that_share_a_rate_have_a_part_of_it_each(shared: str) -> None:
    profile, half = made(rate=16 * MIB), made(rate=8 * MIB)
    [alone] = simulate_ranks([half], all_offloaded(half), ALONE)
    nodes = Nodes(ranks=2, host_bytes_per_second=(16.0 * MIB,))
    if shared == "switch":
        nodes = Nodes(ranks=2, host_bytes_per_second=(1e18,), devices_a_switch=2, switch_bytes_per_second=16.0 * MIB)
    both = simulate_ranks([profile] * 2, all_offloaded(profile), nodes)
    assert both == pytest.approx([alone] * 2, rel=1e-9)
    assert alone > simulate_ranks([half], [[Action.KEEP] * 3] * 4, ALONE)[0]
    apart = Nodes(ranks=1, host_bytes_per_second=(16.0 * MIB,) * 2)
    assert simulate_ranks([profile] * 2, all_offloaded(profile), apart)[0] < alone


def test_all_wait_for_the_slowest_and_nobody_runs_further_ahead_than_a_block() -> None:
    usual, slow = made(rate=1000 * MIB), made(rate=1000 * MIB, seconds=1.5)
    nodes = Nodes(ranks=4, host_bytes_per_second=(1e18,))
    steps = simulate_ranks([usual, slow, usual, usual], all_offloaded(usual), nodes)
    [alone] = simulate_ranks([slow], all_offloaded(slow), ALONE)
    assert steps[1] == pytest.approx(alone, rel=1e-9)
    # The last backward of the others begins when the slow rank begins the previous one.
    assert [steps[n] for n in (0, 2, 3)] == pytest.approx([alone - 4.0] * 3, rel=1e-3)
    assert simulate_ranks([usual], all_offloaded(usual), ALONE)[0] < alone - 5.0


def test_a_node_with_a_slow_host_holds_up_the_others() -> None:
    profile = made(rate=32 * MIB)
    usual = Nodes(ranks=2, host_bytes_per_second=(64.0 * MIB, 64.0 * MIB))
    slow = Nodes(ranks=2, host_bytes_per_second=(64.0 * MIB, 16.0 * MIB))
    before, after = (simulate_ranks([profile] * 4, all_offloaded(profile), nodes) for nodes in (usual, slow))
    assert len(set(before)) == 1 and all(later > earlier for earlier, later in zip(before, after, strict=True))
