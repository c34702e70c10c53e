"""``Minimal`` compares recipes, checkpointing and offloading, per kind of block. All times are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import ebbtide
from ebbtide.base.actions import Action, Candidate
from ebbtide.base.events import Bus
from ebbtide.config import Minimal
from ebbtide.engine.spans import BlockSpan, Span
from ebbtide.engine.timed import TimedBlock, TimedStep
from ebbtide.profiling.minimal import COMPARED, MOST_SKIPPED, ROUNDS, MinimalPlan
from ebbtide.profiling.trials import Method, Range, every_other
from ebbtide.store.disk import DiskTier
from tests.helpers import profiles
from tests.unit.profiling.test_promise import MB, step, tier

SAVED = 200 * MB
"""What a block of ``stack`` saves."""

RECIPES, CHECKPOINT, OFFLOAD = Method.RECIPES, Method.CHECKPOINT, Method.OFFLOAD


def action(plan: MinimalPlan, kind: str = "Layer") -> Action:
    return plan.block_action(kind, 0, input_bytes=100, must_keep_bytes=0)


def candidate(kind: str = "Layer") -> Candidate:
    return profiles.candidate("mlp", kind=kind, block=f"{kind}.0", nbytes=MB, flops=1.0)


def stack(count: int, *, able: bool = True, kind: str = "Layer", input_bytes: int = 0) -> TimedStep:
    """Return a measured step of equal blocks, each of which saved 200 MB."""
    block = replace(step().blocks[0], kind=kind, checkpointable=able, input_bytes=input_bytes)
    assert block.saved_bytes == SAVED
    blocks = tuple(replace(block, name=f"{kind}.{i}") for i in range(count))
    return replace(step(), blocks=blocks, saved_bytes=count * SAVED)


def disk(free_bytes: int = 10_000 * MB) -> Any:
    counters = tier().counters
    return Mock(spec=DiskTier, counters=counters, free_bytes=free_bytes)


def watched(store: Any = None) -> tuple[MinimalPlan, Any]:
    """Return a plan and the timer through which it sees steps."""
    plan = MinimalPlan(Minimal(), store or tier(), None, Bus())
    engine: Any = Mock(timer=None)
    plan.watch(engine)
    return plan, engine.timer


def method_now(plan: MinimalPlan, timer: Any, block: TimedBlock) -> Method:
    """Return how a block is restored now."""
    if plan.choose(candidate(block.kind)) is Action.OFFLOAD:
        assert not plan.needs_recipe(candidate(block.kind)) and not plan.recomputes_in(block.name)
        return OFFLOAD
    assert plan.needs_recipe(candidate(block.kind)) and plan.recomputes_in(block.name)
    return CHECKPOINT if block.name in timer.checkpointed or action(plan, block.kind) is Action.CHECKPOINT else RECIPES


def span(
    plan: MinimalPlan, timer: Any, found: TimedStep, seconds: Mapping[Method, float], *, size: float = 1.0
) -> Span:
    """Return a step whose blocks take the times of the methods that are tried now."""
    blocks: list[BlockSpan] = []
    for block in found.blocks:
        method = method_now(plan, timer, block)
        blocks.append(
            BlockSpan(
                name=block.name, plain=False, checkpointed=method is CHECKPOINT,
                forward_seconds=size * seconds[method] / 4, backward_seconds=size * seconds[method] * 3 / 4,
            )
        )  # fmt: skip
    return Span(seconds=9.0, peak_bytes=None, saved_bytes=int(size * found.saved_bytes), blocks=tuple(blocks))


def decided(
    times: Mapping[Method, Sequence[float]],
    store: Any = None,
    found: TimedStep | None = None,
    sizes: Sequence[float] = (),
) -> MinimalPlan:
    """Return a plan that has seen blocks take these times, step by step; the first of each method warms up."""
    found = found or stack(4, input_bytes=100 * MB)
    plan, timer = watched(store)
    assert not plan.saw_step(found) and timer.spans.wanted
    steps = len(times[CHECKPOINT]) * (2 if OFFLOAD in times else 1)
    for number in range(steps):
        now = {method: taken[number * len(taken) // steps] for method, taken in times.items()}
        more = plan.saw_span(span(plan, timer, found, now, size=sizes[number] if sizes else 1.0))
        assert more is (number < steps - 1)
    assert plan.judged and not timer.checkpointed
    return plan


def test_every_other_block_that_can_be_is_checkpointed() -> None:
    found = stack(5)
    assert every_other(found) == {"Layer.1", "Layer.3"}
    both = replace(found, blocks=found.blocks + stack(2, kind="Stem").blocks)
    assert every_other(both) == {"Layer.1", "Layer.3", "Stem.1"}
    assert every_other(stack(1)) == every_other(stack(5, able=False)) == frozenset()


def frozen_first(count: int) -> TimedStep:
    """Return a measured step whose first blocks take no gradient: they save nothing, and have no backward."""
    found = stack(2 * count, input_bytes=100 * MB)
    frozen = [replace(block, units=(), backward_seconds=0.0) for block in found.blocks[:count]]
    return replace(found, blocks=(*frozen, *found.blocks[count:]), saved_bytes=count * SAVED)


def test_blocks_without_a_backward_are_not_tried() -> None:
    plan, timer = watched(disk())
    plan.saw_step(frozen_first(4))
    assert timer.checkpointed == {"Layer.5", "Layer.7"}
    only, timer = watched(disk())
    only.saw_step(replace(frozen_first(4), blocks=frozen_first(4).blocks[:4]))
    assert only.judged and not timer.checkpointed, "there is nothing to compare"


def test_blocks_without_a_backward_are_not_compared() -> None:
    found, (plan, timer) = frozen_first(4), watched(tier())
    plan.saw_step(found)
    while not plan.judged:
        one = span(plan, timer, found, {RECIPES: 4.0, CHECKPOINT: 5.0})
        blocks = [replace(block, forward_seconds=0.001, backward_seconds=0.0) for block in one.blocks[:4]]
        plan.saw_span(replace(one, blocks=(*blocks, *one.blocks[4:])))
    assert "a block took 5 s (5 to 5) checkpointed, 4 s (4 to 4) recomputed by recipes" in plan.explain()


def test_no_block_took_less_than_no_time() -> None:
    assert Range.of([0.1, 1.0, 12.0]).low == 0.0


def test_methods_are_tried_in_turn() -> None:
    found = stack(4, input_bytes=100 * MB)
    plan, timer = watched(disk())
    plan.saw_step(found)
    seen: list[list[Method]] = []
    answers: list[Any] = []
    for _ in range(2 * ROUNDS):
        seen.append([method_now(plan, timer, block) for block in found.blocks])
        answers.append(plan.current)
        plan.saw_span(span(plan, timer, found, dict.fromkeys(Method, 1.0)))
    assert seen == [[RECIPES, CHECKPOINT] * 2, [OFFLOAD] * 4] * ROUNDS
    assert all(one is not other for one, other in zip(answers, answers[1:], strict=False)), "answers are remembered"


def test_recipes_that_cost_more_than_checkpointing_are_replaced_by_it() -> None:
    plan = decided({RECIPES: [1.0, 5.0, 5.2], CHECKPOINT: [9.0, 4.0, 4.1]})
    assert action(plan) is Action.CHECKPOINT
    assert action(plan, "Other") is Action.KEEP
    assert plan.explain().startswith(COMPARED) and "recompute rule" not in plan.explain(), "no rule decides any more"
    assert "Layer blocks are checkpointed: a block took 4.05 s (" in plan.explain()
    assert ") checkpointed, 5.1 s (" in plan.explain() and plan.explain().count("by recipes") == 1


def test_recipes_that_cost_less_stay() -> None:
    assert action(decided({RECIPES: [9.0, 4.0, 4.1], CHECKPOINT: [1.0, 5.0, 5.2]})) is Action.KEEP


@pytest.mark.parametrize("apart", [0.0, 0.4])
def test_noise_may_decide_between_methods_of_the_same_steps_only(apart: float) -> None:
    """Medians 0.3 s apart: certain if blocks are equal, not if they differ by as much."""
    fast, slow = ([1.0, middle - apart, middle + apart] for middle in (4.0, 4.3))
    assert action(decided({RECIPES: fast, CHECKPOINT: slow})) is Action.KEEP
    assert action(decided({RECIPES: slow, CHECKPOINT: fast})) is Action.CHECKPOINT
    plan = decided({RECIPES: [9.0, 5.0, 5.0], CHECKPOINT: slow, OFFLOAD: fast}, disk())
    assert action(plan) is (Action.CHECKPOINT if apart else Action.KEEP)


@pytest.mark.parametrize(
    ("offload", "recipes", "best"),
    [
        (3.5, 4.2, OFFLOAD),
        (3.95, 4.2, CHECKPOINT),
        (3.5, 3.0, RECIPES),
        (3.0, 3.5, OFFLOAD),
        (5.0, 5.0, CHECKPOINT),
        (5.0, 3.95, RECIPES),
        (3.8, 3.9, RECIPES),
    ],  # fmt: skip
)
def test_the_fastest_method_stays(offload: float, recipes: float, best: Method) -> None:
    """1 % less than checkpointing is enough for recipes, which share its steps, and not for offloading."""
    times = {RECIPES: [9.0, recipes, recipes], CHECKPOINT: [9.0, 4.0, 4.0], OFFLOAD: [9.0, offload, offload]}
    plan = decided(times, disk())
    assert action(plan) is (Action.CHECKPOINT if best is CHECKPOINT else Action.KEEP)
    assert plan.choose(candidate()) is (Action.OFFLOAD if best is OFFLOAD else Action.RECOMPUTE)
    assert plan.recomputes_in("Layer.0") is plan.needs_recipe(candidate()) is (best is not OFFLOAD)
    assert plan.choose(candidate("Stem")) is Action.RECOMPUTE and plan.recomputes_in("Stem.0")
    assert f"Layer blocks are {best.value}: a block took 4 s (4 to 4) checkpointed, " in plan.explain()
    assert f"{offload:g} s ({offload:g} to {offload:g}) offloaded" in plan.explain()


def test_blocks_that_are_not_run_twice_are_offloaded_where_that_is_faster_than_their_recipes() -> None:
    found = stack(4, able=False, input_bytes=100 * MB)
    plan, timer = watched(disk())
    plan.saw_step(found)
    seen: list[set[Method]] = []
    for _ in range(2 * ROUNDS):
        seen.append({method_now(plan, timer, block) for block in found.blocks})
        plan.saw_span(span(plan, timer, found, {RECIPES: 4.0, OFFLOAD: 3.0}))
    assert seen == [{RECIPES}, {OFFLOAD}] * ROUNDS
    assert plan.choose(candidate()) is Action.OFFLOAD


@pytest.mark.parametrize(
    ("store", "input_bytes"),
    [
        pytest.param(None, 100 * MB, id="memory of the host"),
        pytest.param(disk(2 * 4 * SAVED - 1), 100 * MB, id="a disk without room"),
        # Two blocks in flight are 400 MB; the inputs of four, the tensors of one, and what is never counted: 376 MB.
        pytest.param(disk(), 40 * MB, id="more memory than checkpointing"),
    ],
)
def test_offloading_is_not_tried(store: Any, input_bytes: int) -> None:
    found = stack(4, input_bytes=input_bytes)
    plan, timer = watched(store)
    plan.saw_step(found)
    for number in range(ROUNDS):
        assert plan.choose(candidate()) is Action.RECOMPUTE
        more = plan.saw_span(span(plan, timer, found, dict.fromkeys(Method, 1.0)))
        assert more is (number < ROUNDS - 1)
    assert "offloaded:" not in plan.explain()


@pytest.mark.parametrize(("larger", "best"), [(1.05, OFFLOAD), (1.5, CHECKPOINT)])
def test_offloading_is_compared_with_steps_of_about_its_size_only(larger: float, best: Method) -> None:
    """By the time for each byte: the offloaded ones are larger and take longer."""
    times = {RECIPES: [9.0, 5.0, 5.0], CHECKPOINT: [9.0, 4.0, 4.0], OFFLOAD: [9.0, 3.85, 3.85]}
    plan = decided(times, disk(), sizes=[1.0, 1.0, 1.0, larger, 1.0, larger])
    assert plan.choose(candidate()) is (Action.OFFLOAD if best is OFFLOAD else Action.RECOMPUTE)
    assert action(plan) is (Action.CHECKPOINT if best is CHECKPOINT else Action.KEEP)


def test_nothing_is_tried_where_no_block_can_be_checkpointed_or_offloaded() -> None:
    plan, timer = watched()
    assert not plan.saw_step(stack(4, able=False))
    assert plan.judged and not timer.spans.wanted and not timer.checkpointed
    assert action(plan) is Action.KEEP


def test_steps_that_are_not_timed_do_not_count_and_many_end_the_trials() -> None:
    found = stack(4, input_bytes=100 * MB)
    plan, timer = watched(disk())
    plan.saw_step(found)
    assert plan.saw_span(span(plan, timer, found, dict.fromkeys(Method, 1.0)))
    assert plan.choose(candidate()) is Action.OFFLOAD
    timed = span(plan, timer, found, dict.fromkeys(Method, 1.0))
    skipped = [None, replace(timed, verifies=True), replace(timed, saved_bytes=0)]  # recipes were verified; all frozen
    for number in range(MOST_SKIPPED):
        assert plan.choose(candidate()) is Action.OFFLOAD, "it is tried again"
        assert plan.saw_span(skipped[number % 3]) is (number < MOST_SKIPPED - 1)
    assert action(plan) is Action.KEEP and plan.choose(candidate()) is Action.RECOMPUTE
    assert plan.judged and not plan.saw_span(None) and not timer.checkpointed


@pytest.mark.parametrize("tried", [2, 3])
def test_trials_begin_again_with_a_larger_step(tried: int) -> None:
    found = stack(4, input_bytes=100 * MB)
    plan, timer = watched(disk())
    plan.saw_step(found)
    for _ in range(tried):
        plan.saw_span(span(plan, timer, found, dict.fromkeys(Method, 1.0)))
    if tried % 2 == 0:  # every other block is checkpointed, of which the bytes are not known: it is measured once more
        checkpointed = tuple(replace(one, checkpointed=one.name in timer.checkpointed) for one in found.blocks)
        assert plan.saw_step(replace(found, blocks=checkpointed, saved_bytes=2 * found.saved_bytes))
    assert not plan.judged and not timer.checkpointed
    assert not plan.saw_step(replace(found, saved_bytes=2 * found.saved_bytes))
    for number in range(2 * ROUNDS):
        more = plan.saw_span(span(plan, timer, found, {RECIPES: 4.0, CHECKPOINT: 5.0, OFFLOAD: 6.0}, size=2.0))
        assert more is (number < 2 * ROUNDS - 1)
    assert "Layer blocks are recomputed by recipes: a block took 10 s (10 to 10) checkpointed, 8 s" in plan.explain()


def test_a_later_step_decides_nothing() -> None:
    plan = decided({RECIPES: [4.0] * 3, CHECKPOINT: [5.0] * 3})
    found = stack(4, input_bytes=100 * MB)
    assert not plan.saw_step(found)
    assert not plan.saw_span(Span(seconds=1.0, peak_bytes=None, saved_bytes=1))
    assert action(plan) is Action.KEEP


def test_blocks_that_refused_are_compared_with_nobody() -> None:
    found = stack(4)
    plan, _ = watched()
    plan.saw_step(found)
    blocks = tuple(BlockSpan(name=b.name, plain=False, forward_seconds=1.0, backward_seconds=1.0) for b in found.blocks)
    for _ in range(ROUNDS):
        plan.saw_span(Span(seconds=9.0, peak_bytes=None, saved_bytes=found.saved_bytes, blocks=blocks))
    assert action(plan) is Action.KEEP and "a block took" not in plan.explain()


@pytest.mark.parametrize("width", [64, 32, 0])
def test_no_checkpoint_recomputes_what_a_filter_keeps(width: int, caplog: pytest.LogCaptureFixture) -> None:
    """Of a block's hidden tensors, its inputs, or everything"""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Hardshrink(), torch.nn.Linear(64, 32)) for _ in "abcd"
    ]
    model, x = torch.nn.Sequential(*blocks), torch.randn(16, 32)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, checkpointed = step(), 0
    with ebbtide.enable_activation_offloading(
        model, policy="minimal", min_bytes=0, keep_filter=lambda t: width not in (0, t.shape[-1])
    ) as handle:
        for _ in range(8):
            assert all(a.equal(b) for a, b in zip(step(), expected, strict=True))
            stats = handle.stats()
            hidden = {0: stats.unique_bytes, 32: 0, 64: 4 * 16 * 64 * 4}[width]
            assert stats.kept_bytes >= hidden
            checkpointed += stats.checkpointed_blocks
    assert (checkpointed > 0) is (width == 32), "a checkpoint holds the inputs of its block"
    assert ("save tensors for which keep_filter returns False" in caplog.text) is (width != 32)
