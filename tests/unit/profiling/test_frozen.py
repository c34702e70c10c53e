"""Frozen blocks: they have no backward and save nothing, or a shorter one in the graph. All times are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ebbtide.base.actions import Action
from ebbtide.base.events import Bus
from ebbtide.config import Auto
from ebbtide.engine.spans import BlockSpan, Span
from ebbtide.engine.timed import TimedBlock, TimedStep
from ebbtide.planner.solve import Search, Solution
from ebbtide.profiling.auto import AutoPlan
from ebbtide.profiling.block_times import from_blocks
from ebbtide.profiling.closed_loop import YARDSTICKS, kept_blocks
from ebbtide.profiling.promise import Judgement
from tests.unit.profiling.test_promise import tier, unit

COUNT = 24
FORWARD, BACKWARD = 1.0, 2.0
"""Seconds of a trained block without hooks; with them, each takes a tenth more."""
FROZEN, OTHERS = 0.95, 0.75
"""Seconds of a frozen block, and of the head and the epilogue together."""
UNITS = unit("light", Action.RECOMPUTE, 0.25), unit("dear", Action.OFFLOAD, 30.0)
FIRST, LAST = range(COUNT // 2), range(COUNT // 2, COUNT)


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake enough free memory."""
    for module in ("auto", "closed_loop"):
        monkeypatch.setattr(f"ebbtide.profiling.{module}.room_bytes", lambda tier: 10**12)


def without_backward(block: TimedBlock) -> TimedBlock:
    return replace(block, units=(), forward_seconds=FROZEN, backward_seconds=0.0)


def in_the_graph(block: TimedBlock) -> TimedBlock:
    """Return a block of frozen weights whose input takes a gradient: no gradients of weights, so it saves less."""
    return replace(block, units=block.units[:1], backward_seconds=1.1 * BACKWARD / 2 + 0.25)


def measured(frozen: range, freeze: Callable[[TimedBlock], TimedBlock]) -> tuple[AutoPlan, frozenset[str]]:
    """Return the plan for blocks some of which are frozen, and which ran without hooks in its second measured step."""
    plan, plain = AutoPlan(Auto(max_slowdown=0.1), tier(), None, Bus()), frozenset[str]()
    for _ in range(3):
        plain, blocks = plan._timer.plain, list[TimedBlock]()
        for place in range(COUNT):
            block = TimedBlock(
                name=f"layers.{place}", kind="Layer", units=UNITS, forward_seconds=1.1 * FORWARD,
                backward_seconds=1.1 * BACKWARD + 0.25, forward_peak_bytes=None, backward_peak_bytes=None,
            )  # fmt: skip
            if place in frozen:
                block = freeze(block)
            backward = max(block.backward_seconds - 0.25, 0.0) / 1.1
            ordinary = replace(block, units=(), plain=True, forward_seconds=FORWARD, backward_seconds=backward)
            if block.name in plain:
                block = ordinary
            elif block.name in plan._kept_under_hooks:
                units = tuple(replace(each, action=Action.KEEP) for each in block.units)
                block = replace(block, units=units, forward_seconds=1.02 * FORWARD, backward_seconds=1.02 * backward)
            blocks.append(block)
        plan.saw_step(TimedStep(blocks=tuple(blocks), head_seconds=0.5, epilogue_seconds=0.25, head_peak_bytes=None))
    assert plan.profile is not None
    return plan, plain


@pytest.mark.parametrize("frozen", [FIRST, LAST])
def test_a_block_without_a_backward_keeps_its_time_and_is_compared_with_none(frozen: range) -> None:
    plan, plain = measured(frozen, without_backward)
    profile = plan.profile
    assert profile is not None and plain and plain.isdisjoint(f"layers.{place}" for place in frozen)
    for place, block in enumerate(profile.blocks):
        expected = (FROZEN, 0.0) if place in frozen else (FORWARD, BACKWARD)
        assert (block.forward_seconds, block.backward_seconds) == pytest.approx(expected)
        assert not (place in frozen and block.hook_seconds)
    assert profile.step_seconds == pytest.approx(COUNT / 2 * (FROZEN + FORWARD + BACKWARD) + OTHERS)


@pytest.mark.parametrize("frozen", [FIRST, LAST])
def test_a_block_of_frozen_weights_in_the_graph_has_its_own_backward(frozen: range) -> None:
    plan, _ = measured(frozen, in_the_graph)
    assert plan.profile is not None
    for place, block in enumerate(plan.profile.blocks):
        backward = BACKWARD / 2 if place in frozen else BACKWARD
        assert block.backward_seconds == pytest.approx(backward, rel=0.1)


def recomputing(plan: AutoPlan, count: int) -> Solution:
    """Return a plan that recomputes something in the first trained blocks and copies nothing."""
    assert plan.profile is not None
    kept, some = (Action.KEEP,) * 2, (Action.RECOMPUTE, Action.KEEP)
    trained = [some] * count + [kept] * (COUNT // 2 - count)
    return Search(plan.profile).simulated([()] * (COUNT // 2) + trained)


def span_of(solution: Solution, yardsticks: frozenset[str], *, slower: float = 1.0, frozen: float = FROZEN) -> Span:
    """Return a pass of a machine that takes half as long again, in which blocks with hooks take ``slower``."""
    plain = kept_blocks(solution) | yardsticks
    blocks = tuple(
        BlockSpan(
            name=block.name, plain=block.name in plain,
            forward_seconds=1.5 * (block.forward_seconds if block.units else frozen) * factor,
            backward_seconds=1.5 * block.backward_seconds * factor,
        )
        for block in solution.profile.blocks
        for factor in [1.0 if block.name in plain else slower]
    )  # fmt: skip
    seconds = sum(block.seconds for block in blocks) + 1.5 * OTHERS - solution.profile.epilogue_seconds
    return Span(seconds=seconds, peak_bytes=None, saved_bytes=1, blocks=blocks)


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_a_plan_takes_what_its_trained_blocks_take(slower: float) -> None:
    plan, _ = measured(FIRST, without_backward)
    solution, ordinary = recomputing(plan, 6), COUNT / 2 * (FROZEN + FORWARD + BACKWARD) + OTHERS
    found = from_blocks(span_of(solution, frozenset({"layers.12"}), slower=slower), solution)
    assert found is not None
    assert found.seconds == pytest.approx(ordinary + 6 * (slower - 1) * (FORWARD + BACKWARD))


def test_frozen_blocks_do_not_show_the_machines_speed() -> None:
    """What they take without hooks was not measured: here it is less."""
    plan, _ = measured(FIRST, without_backward)
    solution = recomputing(plan, 6)
    expected, found = (from_blocks(span_of(solution, frozenset(), frozen=f), solution) for f in (FROZEN, 0.8 * FROZEN))
    assert expected is not None and found is not None
    less = COUNT / 2 * 0.2 * FROZEN
    assert expected.seconds - 1.1 * less < found.seconds < expected.seconds


def test_where_nothing_is_copied_frozen_blocks_do_not_stand_in_for_blocks_without_hooks() -> None:
    """Else no backward of the pass would be one of ordinary training."""
    plan, _ = measured(FIRST, without_backward)
    judgement = Judgement(recomputing(plan, COUNT // 2), allowed_seconds=99.0, noise=0.0, budget_bytes=None)
    assert plan._loop.yardsticks(judgement) == {f"layers.{COUNT // 2 + place}" for place in range(YARDSTICKS)}


@pytest.mark.parametrize(("places", "backward"), [(range(8, 12), 1.5 * BACKWARD), (range(14, COUNT), 0.0)])
def test_blocks_that_are_frozen_or_trained_later_do_not_count(places: range, backward: float) -> None:
    plan, _ = measured(FIRST, without_backward)
    solution = recomputing(plan, 2)
    span = span_of(solution, frozenset({"layers.12"}))
    changed = {f"layers.{place}" for place in places}
    blocks = [replace(b, backward_seconds=backward) if b.name in changed else b for b in span.blocks]
    longer = sum(b.seconds for b in blocks) - sum(b.seconds for b in span.blocks)
    found = from_blocks(replace(span, blocks=tuple(blocks), seconds=span.seconds + longer), solution)
    assert found is not None and found.seconds == pytest.approx(solution.profile.step_seconds)
    whole = Judgement(solution, allowed_seconds=1.0, noise=0.0, budget_bytes=None)
    hooked = tuple(replace(block, plain=False) for block in blocks)
    for _ in range(20):
        assert whole.add(replace(span, blocks=hooked, saved_bytes=solution.profile.saved_bytes)) is None
