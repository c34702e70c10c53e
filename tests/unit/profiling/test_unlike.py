"""Steps that run other blocks each time, as with layers that are skipped at random. All times are made up."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ebbtide.base.actions import Action
from ebbtide.base.events import Bus
from ebbtide.base.runs import KeptBecause
from ebbtide.config import Auto
from ebbtide.engine.spans import BlockSpan, Span
from ebbtide.engine.timed import TimedBlock, TimedStep
from ebbtide.profiling.auto import AutoPlan
from ebbtide.profiling.promise import CHECKED
from ebbtide.profiling.unlike import UNLIKE, UnlikeSteps
from tests.helpers.profiles import candidate
from tests.unit.profiling.test_promise import MB, tier, unit

COUNT, PLAIN, HOOKED = 12, 2.5, 3.5
"""Blocks, and seconds of one without hooks and with them; a fifth of that is its forward."""


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake enough free memory."""
    for module in ("auto", "closed_loop"):
        monkeypatch.setattr(f"ebbtide.profiling.{module}.room_bytes", lambda tier: 10**12)


UNITS = unit("light", Action.RECOMPUTE, 0.25), unit("heavy", Action.OFFLOAD, 30.0)


def step(places: Iterable[int], plain: frozenset[str], speed: float) -> TimedStep:
    """Return a step of some blocks, some ``plain``, on a machine that takes ``speed`` times as long."""
    blocks = [
        TimedBlock(
            name=f"layers.{place}", kind="Layer", units=UNITS, forward_seconds=HOOKED / 5 * speed,
            backward_seconds=(HOOKED * 4 / 5 + 0.25) * speed, forward_peak_bytes=None, backward_peak_bytes=None,
        )
        for place in places
    ]  # fmt: skip
    blocks = [
        replace(block, units=(), plain=True, forward_seconds=PLAIN / 5 * speed, backward_seconds=PLAIN * 4 / 5 * speed)
        if block.name in plain
        else block
        for block in blocks
    ]
    return TimedStep(
        blocks=tuple(blocks), head_seconds=0.5, epilogue_seconds=0.25, head_peak_bytes=None,
        saved_bytes=len(blocks) * 200 * MB,
    )  # fmt: skip


def skipping(draw: random.Random) -> list[int]:
    return [place for place in range(COUNT) if draw.random() > 0.2]


def measured(policy: Auto, *, runs_plain: bool = True) -> tuple[AutoPlan, int]:
    """Return the plan of a model that skips blocks, and after how many steps it is made."""
    plan, draw = AutoPlan(policy, tier(), None, Bus()), random.Random(5)
    for number in range(1, 100):
        plain = plan._timer.plain if runs_plain else frozenset[str]()
        if not plan.saw_step(step(skipping(draw), plain, draw.choice([1.0, 1.3]))):
            return plan, number
    raise AssertionError("no plan was made")


def test_blocks_of_all_steps_are_compared_with_those_without_hooks_in_their_step() -> None:
    plan, steps = measured(Auto())
    assert steps <= 3 * UNLIKE
    assert plan.profile is not None and plan.table is not None
    assert [block.name for block in plan.profile.blocks] == [f"layers.{place}" for place in range(COUNT)]
    assert {name for name, _ in plan.table.actions} == {f"layers.{place}" for place in range(COUNT)}
    each = (plan.profile.step_seconds - 0.75) / COUNT
    assert each == pytest.approx(PLAIN), "at the speed of the faster steps"
    assert "plain step" in plan.explain() and "promised at most" in plan.explain()


@pytest.mark.parametrize(("slower", "kept"), [(1.04, True), (1.5, False)])
def test_a_promise_is_judged_in_passes_of_other_blocks(slower: float, kept: bool) -> None:
    plan, _ = measured(Auto(max_slowdown=0.2))
    judgement, draw = plan._judgement, random.Random(6)
    assert judgement is not None and plan.profile is not None and not judgement.keeps
    for _ in range(4 * CHECKED):
        places = skipping(draw)
        blocks = tuple(
            BlockSpan(
                name=block.name, plain=place % 3 == 0, forward_seconds=block.forward_seconds * factor,
                backward_seconds=block.backward_seconds * factor,
            )
            for place, block in enumerate(plan.profile.blocks)
            if place in places
            for factor in [1.0 if place % 3 == 0 else slower]
        )  # fmt: skip
        span = Span(
            seconds=sum(b.seconds for b in blocks) + 0.5, peak_bytes=None, saved_bytes=len(blocks) * 200 * MB,
            blocks=blocks,
        )  # fmt: skip
        if judgement.measured is None:
            plan.saw_span(span)
    assert judgement.measured is not None and judgement.too_slow is not kept


def test_without_a_block_without_hooks_nothing_is_promised_and_everything_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, steps = measured(Auto(), runs_plain=False)
    assert steps <= 2 * UNLIKE + 2
    assert plan._timer.unhooked == {f"layers.{place}" for place in range(COUNT)}
    shown = plan.explain()
    assert "blocks differ from step to step" in shown and plan.kept_because is KeptBecause.UNLIKE
    assert not any(word in shown for word in ("plain step", "promised at most", "measured 0", "bound"))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "blocks differ from step to step" in warnings[0]


def test_with_a_budget_a_plan_without_a_baseline_fits_it_and_shows_no_slowdown() -> None:
    plan, _ = measured(Auto(memory_budget=1500 * MB), runs_plain=False)
    assert plan.table is not None and plan.table.predicted.peak_bytes <= 1500 * MB
    text = plan.explain().splitlines()[1]
    assert "promised a peak" in text and "plain step" not in text and "%" not in text


@pytest.mark.parametrize("policy", [Auto(), Auto(memory_budget=1500 * MB)])
def test_a_block_without_a_row_keeps_everything_unless_there_is_a_budget(policy: Auto) -> None:
    plan, _ = measured(policy)
    heavy = candidate("heavy", block="layers.99", nbytes=100 * MB)
    keeps = policy.memory_budget is None
    table = plan.table
    assert table is not None
    assert (table.choose(heavy) is Action.KEEP) is keeps
    assert table.needs_recipe(heavy) is not keeps and table.recomputes_in("layers.99") is not keeps


def test_blocks_that_steps_run_in_other_orders_are_in_that_of_the_first() -> None:
    steps = UnlikeSteps()
    for places in ((2, 0), (0, 1, 2)):
        steps.add(step(places, frozenset(), 1.0))
    assert [block.name for block in steps.joined().blocks] == ["layers.2", "layers.0", "layers.1"]


def test_a_kind_without_a_backward_needs_no_baseline() -> None:
    """For example a frozen tower: it is as in ordinary training, and never runs without hooks to be compared."""
    steps = UnlikeSteps()
    for number in range(2 * UNLIKE):
        one = step((0, 1, 2 + number % 2), frozenset({"layers.0"} if number % 4 == 2 else ()), 1.0)
        frozen = replace(one.blocks[1], name="frozen", kind="Frozen", units=(), backward_seconds=0.0)
        steps.add(replace(one, blocks=(frozen, *one.blocks)))
        steps.differed += 1
    assert steps.suffice() and steps.baseline().known


def test_a_kind_that_ran_without_hooks_in_no_step_has_no_baseline() -> None:
    """For example where two towers run in turn: blocks of only one of them ran without hooks."""
    steps = UnlikeSteps()
    for number in range(2 * UNLIKE):
        one = step((0, 1), frozenset({"layers.0"} if number % 4 == 2 else ()), 1.0)
        other = replace(one, blocks=tuple(replace(b, name=f"{b.name}.other", kind="Other") for b in one.blocks))
        steps.add(other if number % 2 else one)
        steps.differed += 1
    assert steps.suffice() and not steps.baseline().known
