"""``Minimal`` weighs recipes against a second run, per kind of block. All times are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.base.actions import Action
from ebbtide.base.events import Bus
from ebbtide.config import Minimal
from ebbtide.engine.timed import TimedStep
from ebbtide.profiling.minimal import MinimalPlan
from tests.unit.profiling.test_promise import step, tier, with_plain


def action(plan: MinimalPlan, kind: str = "Layer") -> Action:
    return plan.block_action(kind, 0, input_bytes=100, stubborn_bytes=0)


def seen(*steps: TimedStep) -> MinimalPlan:
    plan = MinimalPlan(Minimal(), tier(), Bus())
    wanted = [plan.saw_step(found) for found in (step(), *steps)]
    assert wanted == [True] * len(steps) + [False]
    return plan


def test_recipes_that_cost_more_than_a_second_run_give_way_to_it() -> None:
    # A block takes 3.5 s with hooks and 2.3 s without: 1.2 s for recipes where a second run takes 0.8 s.
    plan = seen(step(), with_plain(step(), forward=0.8, backward=1.5))
    assert action(plan) is Action.CHECKPOINT
    assert action(plan, "Other") is Action.KEEP
    assert "Layer blocks are checkpointed: recipes and copies took 1.2 s a block" in plan.explain()


def test_recipes_that_cost_less_stay() -> None:
    plan = seen(step(), with_plain(step(), forward=0.8, backward=2.0))  # 0.7 s
    assert action(plan) is Action.KEEP


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_difference_within_noise_decides_nothing(slower: float) -> None:
    """Recipes cost 1.25 times a second run: where steps differ twofold, that is no difference."""
    later = step(forward=1.0 * slower, backward=2.5 * slower)
    plain = with_plain(later, forward=0.8 * slower, backward=1.7 * slower)
    assert action(seen(step(), plain)) is (Action.CHECKPOINT if slower == 1.0 else Action.KEEP)


def test_nothing_is_decided_without_a_plain_block_and_only_once() -> None:
    plan = seen(step(), step())
    assert action(plan) is Action.KEEP
    assert not plan.saw_step(with_plain(step(), forward=0.1, backward=0.1))
    assert action(plan) is Action.KEEP


def test_steps_that_differ_are_not_compared() -> None:
    other = replace(step(), blocks=step().blocks[:3])
    plan = seen(other, step(), with_plain(step(), forward=0.8, backward=1.5))
    assert action(plan) is Action.CHECKPOINT
