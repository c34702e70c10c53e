"""``Minimal`` weighs recipes against checkpoints, per kind of block. All times are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from ebbtide.base.actions import Action
from ebbtide.base.events import Bus
from ebbtide.config import Minimal
from ebbtide.engine.timed import TimedBlock, TimedStep
from ebbtide.profiling.minimal import MinimalPlan, every_other
from tests.unit.profiling.test_promise import step, tier


def action(plan: MinimalPlan, kind: str = "Layer") -> Action:
    return plan.block_action(kind, 0, input_bytes=100, must_keep_bytes=0)


def stack(count: int, *, able: bool = True, kind: str = "Layer") -> TimedStep:
    block = replace(step().blocks[0], kind=kind, checkpointable=able)
    return replace(step(), blocks=tuple(replace(block, name=f"{kind}.{i}") for i in range(count)))


def tried(found: TimedStep, recipes: Sequence[float], second: Sequence[float]) -> TimedStep:
    """Return a step with every other block checkpointed."""
    times = [iter(recipes), iter(second)]

    def block(place: int, one: TimedBlock) -> TimedBlock:
        seconds = next(times[place % 2])
        return replace(one, checkpointed=place % 2 == 1, forward_seconds=seconds / 4, backward_seconds=seconds * 3 / 4)

    return replace(found, blocks=tuple(block(place, one) for place, one in enumerate(found.blocks)))


def watched() -> tuple[MinimalPlan, Any]:
    """Return a plan and the timer through which it sees steps."""
    plan = MinimalPlan(Minimal(), tier(), Bus())
    engine: Any = Mock(timer=None)
    plan.watch(engine)
    return plan, engine.timer


def seen(recipes: Sequence[float], second: Sequence[float]) -> MinimalPlan:
    """Return a plan that has seen blocks take these times in the step that counts."""
    plan, timer = watched()
    first = stack(len(recipes) + len(second))
    assert plan.saw_step(first)
    assert timer.checkpointed == every_other(first)
    assert plan.saw_step(tried(first, [1.0] * len(recipes), [9.0] * len(second)))  # warms up
    assert not plan.saw_step(tried(first, recipes, second))
    assert timer.checkpointed == frozenset()
    return plan


def test_every_other_block_that_can_be_is_checkpointed() -> None:
    found = stack(5)
    assert every_other(found) == {"Layer.1", "Layer.3"}
    both = replace(found, blocks=found.blocks + stack(2, kind="Stem").blocks)
    assert every_other(both) == {"Layer.1", "Layer.3", "Stem.1"}
    assert every_other(stack(1)) == every_other(stack(5, able=False)) == frozenset()


def test_recipes_that_cost_more_than_a_second_run_give_way_to_it() -> None:
    plan = seen([5.0, 5.1, 5.2, 5.1], [4.0, 4.1, 4.0, 4.2])
    assert action(plan) is Action.CHECKPOINT
    assert action(plan, "Other") is Action.KEEP
    assert "Layer blocks are checkpointed: a block took 4.05 s" in plan.explain()
    assert ") checkpointed and 5.1 s (" in plan.explain() and plan.explain().count("with recipes") == 1


def test_recipes_that_cost_less_stay() -> None:
    assert action(seen([4.0, 4.1, 4.0, 4.2], [5.0, 5.1, 5.2, 5.1])) is Action.KEEP


@pytest.mark.parametrize("apart", [0.0, 0.4])
def test_what_noise_may_have_decided_is_checkpointed(apart: float) -> None:
    """Medians half a second apart: certain if blocks are equal, not if they differ by as much."""
    recipes, second = ([middle - apart, middle, middle, middle + apart] for middle in (4.0, 4.3))
    assert action(seen(recipes, second)) is (Action.CHECKPOINT if apart else Action.KEEP)


def test_nothing_is_measured_where_no_block_can_be_checkpointed() -> None:
    plan, timer = watched()
    assert not plan.saw_step(stack(4, able=False))
    assert timer.checkpointed == frozenset()
    assert action(plan) is Action.KEEP


def test_a_later_step_decides_nothing() -> None:
    plan = seen([4.0, 4.0, 4.0], [5.0, 5.0, 5.0])
    assert not plan.saw_step(tried(stack(6), [9.0] * 3, [1.0] * 3))
    assert action(plan) is Action.KEEP


def test_blocks_that_refused_are_compared_with_nobody() -> None:
    plan, _ = watched()
    for _ in range(3):
        plan.saw_step(stack(4))
    assert action(plan) is Action.KEEP
