"""Plans that know the cost of hooks. All times are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.base.actions import Action
from ebbtide.planner.charges import Work, charged
from ebbtide.planner.hooked import shrink_hooked
from ebbtide.planner.profile import CHECKPOINT_HOOKS, RECOMPUTE_HOOKS, Profile, Rates
from ebbtide.planner.solve import Search
from tests.helpers.profiles import alike, shrink, unit

MB = 10**6
RATES = Rates(out_bytes_per_second=10 * MB, in_bytes_per_second=10 * MB)


def step(hook_seconds: float, count: int = 16) -> Profile:
    """Return blocks of 3 s that each save 200 MB, half of which is recomputed in 0.1 s."""
    profile = alike(count, (unit("light", 100 * MB, 0.1), unit("dear", 100 * MB)), RATES)
    return replace(profile, blocks=tuple(replace(block, hook_seconds=hook_seconds) for block in profile.blocks))


def treated(actions: tuple[Action, ...]) -> bool:
    return any(action is not Action.KEEP for action in actions)


def test_hooks_that_cost_nothing_change_nothing() -> None:
    assert shrink_hooked(step(0.0), 0.05).assignment == shrink(step(0.0), 0.05).assignment


@pytest.mark.parametrize("slowdown", [0.0, 0.01, 0.05, 0.15, 0.5])
@pytest.mark.parametrize("hook_seconds", [0.05, 0.3, 3.0])
def test_the_promise_holds_with_hooks(slowdown: float, hook_seconds: float) -> None:
    profile = step(hook_seconds)
    found = shrink_hooked(profile, slowdown)
    hooks = hook_seconds * sum(map(treated, found.assignment))
    bare = shrink(step(0.0), slowdown)
    assert found.predicted.overhead_seconds <= slowdown * profile.step_seconds * (1 + 1e-6)
    assert found.predicted.overhead_seconds >= hooks
    assert found.predicted.peak_bytes >= bare.predicted.peak_bytes


def test_where_hooks_on_all_blocks_cost_too_much_the_first_ones_get_them() -> None:
    found = shrink_hooked(step(0.3), 0.05)  # 2.4 s, and hooks on all blocks would cost 4.8 s
    which = list(map(treated, found.assignment))
    assert any(which) and not any(which[4:])
    assert found.predicted.kept_bytes < step(0.3).saved_bytes


def test_a_single_block_gets_hooks_where_two_would_cost_too_much() -> None:
    found = shrink_hooked(step(1.2), 0.05)  # 2.1 s with recomputes
    assert [treated(actions) for actions in found.assignment] == [True] + [False] * 15


def test_blocks_that_save_nothing_have_no_hooks_to_pay_for() -> None:
    """Frozen first blocks would be the first half, so no number of first blocks that is tried would be small enough."""
    trained = step(1.2)
    frozen = tuple(
        replace(block, name=f"frozen.{place}", units=(), backward_seconds=0.0)
        for place, block in enumerate(trained.blocks)
    )
    profile = replace(trained, blocks=(*frozen, *trained.blocks))
    found = shrink_hooked(profile, 0.05 * trained.step_seconds / profile.step_seconds)
    assert [treated(actions) for actions in found.assignment] == [False] * 16 + [True] + [False] * 15


def test_recomputes_are_left_out_where_they_make_the_hooks_too_expensive() -> None:
    """Hooks of two blocks take 2.3 s where nothing is recomputed, else 4.0 s; 2.4 s are promised."""
    rates = Rates(out_bytes_per_second=1000 * MB, in_bytes_per_second=1000 * MB)
    profile = alike(16, (unit("light", 100 * MB, 0.001), unit("dear", 100 * MB)), rates)
    profile = replace(profile, blocks=tuple(replace(block, hook_seconds=1.15) for block in profile.blocks))
    first, second, *others = shrink_hooked(profile, 0.05).assignment
    assert first == second == (Action.OFFLOAD, Action.OFFLOAD) and not any(map(treated, others))


def test_hooks_cost_more_where_something_is_recomputed() -> None:
    (block, *_) = step(2.0).blocks
    pairs = ((Action.OFFLOAD, Action.KEEP), (Action.OFFLOAD, Action.RECOMPUTE), (Action.KEEP, Action.KEEP))
    assert [block.hooks_under(pair) for pair in pairs] == [2.0, 2.0 * RECOMPUTE_HOOKS, 0.0]


def checkpointable(hook_seconds: float) -> Profile:
    profile = step(hook_seconds)
    return replace(profile, blocks=tuple(replace(block, checkpointable=True) for block in profile.blocks))


def test_where_hooks_cost_more_than_a_second_forward_the_first_blocks_are_checkpointed() -> None:
    """A checkpointed block has a third of the hooks: one costs 1 s + 1 s of the 4.8 s that were promised."""
    found = shrink_hooked(checkpointable(3.0), 0.1)
    assert [Action.CHECKPOINT in actions for actions in found.assignment] == [True] * 2 + [False] * 14
    assert found.predicted.overhead_seconds == pytest.approx(2 * (1.0 + 3.0 * CHECKPOINT_HOOKS))
    assert not any(map(treated, shrink_hooked(step(6.0), 0.1).assignment)), "recipes have the hooks of all tensors"


def test_within_a_budget_hooks_count_too() -> None:
    """Recipes cost 0.1 s a block, a second forward 1 s; with hooks of 3 s they cost 3.1 s and 2 s."""
    budget = 16 * 100 * MB + 100 * MB
    for hook_seconds, cheaper in ((0.0, Action.RECOMPUTE), (3.0, Action.CHECKPOINT)):
        found = Search(checkpointable(hook_seconds)).fit(budget)
        assert found.predicted.peak_bytes <= budget
        assert any(cheaper in actions for actions in found.assignment), hook_seconds


def test_where_no_hook_can_be_paid_everything_is_kept() -> None:
    assert not any(map(treated, shrink_hooked(step(3.0), 0.01).assignment))


def test_time_that_is_not_explained_is_charged_to_hooks_too_where_their_price_may_be_wrong() -> None:
    """Two seconds of recomputes and as many of hooks took eight: each costs twice as much."""
    profile = step(0.5)
    for hook_seconds, after in ((2.0, (1.0, 0.2)), (0.0, (0.5, 0.3))):
        work = Work(recompute_seconds=2.0, moved_bytes=0, crossings=0, hook_seconds=hook_seconds)
        found = charged(profile, work, 4.0)
        assert found is not None
        block = found.blocks[0]
        assert (block.hook_seconds, block.units[0].recompute_seconds) == pytest.approx(after)
