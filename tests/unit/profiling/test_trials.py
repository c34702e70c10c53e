"""On an accelerator ``Minimal`` also tries a mix: a plan for single tensors within the memory of checkpointing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ebbtide.base.actions import Action, Candidate, Site
from ebbtide.base.errors import ConfigError
from ebbtide.base.events import Bus
from ebbtide.config import Minimal
from ebbtide.engine.spans import BlockSpan, Span
from ebbtide.engine.timed import TimedStep
from ebbtide.planner.checkpointing import checkpointed_peak
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.table import Prediction, TablePlan, load_plan
from ebbtide.profiling.minimal import MOST_SKIPPED, NO_MIX, ROUNDS, UNTIMED, MinimalPlan
from ebbtide.profiling.solutions import FASTER, RESERVE, solution_for, within_checkpointing
from ebbtide.profiling.trials import Method, mixed, trials
from tests.helpers.profiles import alike, unit
from tests.unit.profiling.test_minimal import stack
from tests.unit.profiling.test_promise import MB, tier

DEVICE, LIMIT = 10**12, 900 * MB
KEPT, MOVED = (Site("Layer", name, "Node", 0) for name in ("kept", "moved"))


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a large device."""
    monkeypatch.setattr("ebbtide.profiling.minimal.allocatable_bytes", lambda tier: DEVICE)
    monkeypatch.setattr("ebbtide.profiling.trials.allocatable_bytes", lambda tier: DEVICE)
    monkeypatch.setattr("ebbtide.profiling.trials.store_bytes", lambda tier: None)


def blocks(bytes_per_second: float, *, recompute: float | None = 1.0) -> Profile:
    """Return 32 blocks with forwards of a second that save their input and nine storages of 10 MB each.

    Args:
        bytes_per_second: Of the link.
        recompute: Seconds to recompute all nine.
    """
    each = None if recompute is None else recompute / 9
    units = (replace(unit("input", 10 * MB), block_input=True), *(unit(f"other {i}", 10 * MB, each) for i in range(9)))
    rates = Rates(out_bytes_per_second=bytes_per_second, in_bytes_per_second=bytes_per_second)
    found = alike(32, units, rates, beside=7 * MB)
    return replace(found, blocks=tuple(replace(block, checkpointable=True) for block in found.blocks))


@pytest.mark.parametrize("limit", [checkpointed_peak(blocks(1.0)), 300 * MB])
def test_the_mix_is_faster_than_checkpointing_and_needs_no_more_memory(limit: int) -> None:
    """A link that hides half of the copies: neither recipes nor copies alone, and no second forward."""
    step = blocks(45 * MB)
    found = within_checkpointing(step, limit, DEVICE)
    assert found is not None
    assert found.predicted.peak_bytes * (1 + RESERVE) <= limit + 1
    assert found.predicted.step_seconds < (1 - FASTER) * (step.step_seconds + step.forward_seconds)
    actions = {action for of_block in found.assignment for action in of_block}
    assert {Action.OFFLOAD, Action.RECOMPUTE} <= actions and Action.CHECKPOINT not in actions


@pytest.mark.parametrize(
    ("step", "limit"),
    [
        pytest.param(blocks(MB, recompute=None), 417 * MB, id="a slow link, and nothing to recompute"),
        pytest.param(blocks(MB, recompute=1.0), 417 * MB, id="recipes as slow as a second forward"),
        pytest.param(blocks(1000 * MB), 20 * MB, id="no plan fits"),
    ],
)
def test_without_a_gain_there_is_no_mix(step: Profile, limit: int) -> None:
    assert within_checkpointing(step, limit, DEVICE) is None


@pytest.mark.parametrize(
    ("memory", "mixes"),
    [(None, True), (1.031, True), (1.029, False)],
    ids=["as much as is needed", "room for an error", "none"],
)
def test_where_the_head_sets_the_peak_a_mix_needs_as_much_as_checkpointing(memory: float | None, mixes: bool) -> None:
    """Logits of ten times what blocks save: plans save a hundredth of the peak, the inputs that checkpointing keeps.

    A device on which a peak slightly above its prediction does not fit is no place to try it.
    """
    step = replace(blocks(400 * MB), head_base_bytes=30_000 * MB)
    limit = checkpointed_peak(step)
    found = within_checkpointing(step, limit, None if memory is None else int(memory * limit))
    assert (found is not None) is mixes
    if found is not None:
        assert limit / (1 + RESERVE) < found.predicted.peak_bytes < limit
        assert found.predicted.step_seconds < (1 - FASTER) * (step.step_seconds + step.forward_seconds)


def test_a_prediction_of_minimal_is_that_of_its_mix_where_the_store_is_host_memory() -> None:
    step = blocks(45 * MB)
    step = replace(step, blocks=tuple(replace(block, input_bytes=10 * MB) for block in step.blocks))
    recipes = solution_for(Minimal(), step)
    mix = solution_for(Minimal(), replace(step, store_bytes=10**12))
    assert mix.predicted.step_seconds < recipes.predicted.step_seconds and mix.predicted.kept_bytes
    assert mix.predicted.peak_bytes * (1 + RESERVE) <= checkpointed_peak(step) + 1
    assert not recipes.predicted.kept_bytes


def measured(*, peak: int | None = 900 * MB) -> TimedStep:
    """Return a measured step of six blocks, of which each recomputes 100 MB and offloads 100, of them 40 of input."""
    found = stack(6, input_bytes=40 * MB)
    each = tuple(replace(b, forward_peak_bytes=peak, backward_peak_bytes=peak) for b in found.blocks)
    return replace(found, blocks=each, head_peak_bytes=peak)


def test_what_a_mix_does_not_know_follows_the_policy() -> None:
    table = mixed(measured(), tier(), None, 1200 * MB)
    assert table is not None and 0 < table.predicted.peak_bytes * (1 + RESERVE) <= 1200 * MB + 1
    foreign = Candidate(site=KEPT, block_name="?", block=0, nbytes=MB, block_input=False, recompute_flops=1e30)
    assert table.choose(foreign) is Action.RECOMPUTE


def test_a_mix_is_tried_in_turn_with_checkpoints_of_all_blocks() -> None:
    first, second = trials(measured(), tier(), mixes=True)
    assert first.checkpointed == {block.name for block in measured().blocks} and not first.methods
    assert second.methods == {"Layer": Method.MIXED} and not second.checkpointed
    (alone,) = trials(measured(peak=None), tier(), mixes=True)
    assert len(alone.checkpointed) == 3, "without figures of memory recipes are tried"


def mix() -> TablePlan:
    """Return a mix that keeps one site of a block and offloads another, and recomputes nothing."""
    names = [block.name for block in measured().blocks]
    actions = {(n, site): action for n in names for site, action in ((KEPT, Action.KEEP), (MOVED, Action.OFFLOAD))}
    predicted = Prediction(
        step_seconds=1.0, overhead_percent=0.0, bound_percent=0.0, peak_bytes=0, peak_everything_kept_bytes=0,
        kept_bytes=600 * MB, offloaded_bytes=0, moved_bytes=0, recomputed_bytes=0,
    )  # fmt: skip
    return TablePlan(name="minimal", actions=actions, predicted=predicted)


def candidate(site: Site, *, kept_bytes: int = 0) -> Candidate:
    return Candidate(
        site=site, block_name="Layer.0", block=0, nbytes=100 * MB, block_input=False, recompute_flops=1.0,
        kept_bytes=kept_bytes,
    )  # fmt: skip


def trying(
    monkeypatch: pytest.MonkeyPatch, mix: TablePlan | None, in_use_bytes: int | None = None
) -> tuple[MinimalPlan, Any, list[int]]:
    """Return a plan that tries methods from now on, its timer, and the peaks that its mix is made for."""
    peaks: list[int] = []

    def made(step: TimedStep, store: object, window_bytes: int | None, peak_bytes: int) -> TablePlan | None:
        peaks.append(peak_bytes)
        return mix

    monkeypatch.setattr("ebbtide.profiling.minimal.mixed", made)
    plan, engine = MinimalPlan(Minimal(), tier(), None, Bus()), Mock(timer=None)
    plan.watch(engine)
    assert plan.saw_step(measured()), "the first measured step is not like later ones"
    assert not plan.saw_step(replace(measured(), in_use_bytes=in_use_bytes))
    return plan, engine.timer, peaks


def span(plan: MinimalPlan, timer: Any, seconds: Mapping[Method, list[float]], peaks: Mapping[Method, int]) -> Span:
    """Return a step with what is tried now; its blocks take the times of the method's list in turn."""
    method = Method.CHECKPOINT if timer.checkpointed else Method.MIXED
    assert plan.needs_recipe(candidate(MOVED)) is (method is Method.CHECKPOINT)
    took = [seconds[method][place % len(seconds[method])] / 2 for place in range(6)]
    spans = tuple(
        BlockSpan(
            name=block.name, plain=False, checkpointed=block.name in timer.checkpointed,
            forward_seconds=half, backward_seconds=half,
        )
        for block, half in zip(measured().blocks, took, strict=True)
    )  # fmt: skip
    return Span(seconds=9.0, peak_bytes=peaks[method], saved_bytes=measured().saved_bytes, blocks=spans)


def run(
    plan: MinimalPlan, timer: Any, took: list[float], peak_bytes: int = LIMIT, checkpointed: Sequence[float] = (4.0,)
) -> None:
    """Let a plan see all its trials: steps with checkpoints take 900 MB."""
    seconds, peaks = {Method.CHECKPOINT: [*checkpointed], Method.MIXED: took}, {Method.CHECKPOINT: 900 * MB}
    for number in range(2 * ROUNDS):
        peaks[Method.MIXED] = 10**15 if number == 1 else peak_bytes  # the first one warms up
        assert bool(timer.checkpointed) is (number % 2 == 0)
        assert plan.saw_span(span(plan, timer, seconds, peaks)) is (number < 2 * ROUNDS - 1)
    assert plan.judged and not timer.checkpointed


def test_a_mix_is_saved_once_it_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, timer, _ = trying(monkeypatch, mix())
    path = tmp_path / "plan.json"
    plan.saw_span(span(plan, timer, {Method.CHECKPOINT: [4.0]}, {Method.CHECKPOINT: 900 * MB}))
    assert plan.reads_kept_bytes, "it is tried"
    with pytest.raises(ConfigError, match="follows from the policy"):
        plan.save(path)
    plan, timer, _ = trying(monkeypatch, mix())
    run(plan, timer, [2.0])
    plan.save(path)
    assert load_plan(path) == mix()


def test_a_mix_that_is_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean of its blocks, of which half are slow."""
    plan, timer, peaks = trying(monkeypatch, mix())
    before = plan.current
    run(plan, timer, [2.0, 5.0])
    assert peaks == [900 * MB], "that of the first step with checkpoints"
    assert plan.choose(candidate(KEPT)) is Action.KEEP and plan.choose(candidate(MOVED)) is Action.OFFLOAD
    assert plan.reads_kept_bytes and plan.choose(candidate(KEPT, kept_bytes=501 * MB)) is not Action.KEEP
    assert not plan.needs_recipe(candidate(MOVED)) and not plan.recomputes_in("Layer.0")
    assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=10**9) is Action.KEEP
    assert isinstance(plan.current, TablePlan) and plan.current is not before
    assert "Layer blocks are kept, offloaded or recomputed tensor by tensor: a block took 4 s (" in plan.explain()
    assert plan.explain().endswith(mix().explain())
    other = replace(candidate(KEPT), site=Site("Stem", "kept", "Node", 0), block_name="Stem.0")
    assert plan.choose(other) is Action.RECOMPUTE and plan.recomputes_in("Stem.0"), "of another kind"


@pytest.mark.parametrize(
    ("took", "peak_bytes"),
    [
        pytest.param([2.5, 2.5, 7.0], LIMIT, id="as slow as checkpointing, though most blocks are faster"),
        pytest.param([1.0], LIMIT + 1, id="with more memory than checkpointing"),
    ],
)
def test_any_other_mix_does_not_stay(monkeypatch: pytest.MonkeyPatch, took: list[float], peak_bytes: int) -> None:
    plan, timer, _ = trying(monkeypatch, mix())
    run(plan, timer, took, peak_bytes)
    assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=0) is Action.CHECKPOINT
    assert plan.choose(candidate(KEPT)) is Action.RECOMPUTE and not plan.reads_kept_bytes
    assert not isinstance(plan.current, TablePlan) and plan.recomputes_in("Layer.0")
    assert ("a mix took more memory" in plan.explain()) is (peak_bytes > LIMIT)


def test_the_first_step_with_checkpoints_does_not_show_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares all bytes that second forwards compute, which later ones do of a block in fifty steps."""
    plan, timer, _ = trying(monkeypatch, mix())
    seconds, peaks = {Method.CHECKPOINT: [4.0], Method.MIXED: [2.0]}, {Method.MIXED: 950 * MB}
    for number in range(2 * ROUNDS):
        peaks[Method.CHECKPOINT] = 900 * MB if number else 1000 * MB
        plan.saw_span(span(plan, timer, seconds, peaks))
    assert plan.judged and not plan.reads_kept_bytes
    assert "a mix took more memory" in plan.explain()


@pytest.mark.parametrize(
    ("peaks", "longer", "stays"),
    [
        pytest.param({Method.CHECKPOINT: 900, Method.MIXED: 825}, {Method.CHECKPOINT: 1.09}, True, id="longer: less"),
        pytest.param({Method.CHECKPOINT: 900, Method.MIXED: 840}, {Method.CHECKPOINT: 1.09}, False, id="longer: more"),
        pytest.param({Method.CHECKPOINT: 900, Method.MIXED: 840}, {Method.MIXED: 0.92}, False, id="a shorter mix"),
        pytest.param({Method.CHECKPOINT: 900, Method.MIXED: 910}, {Method.MIXED: 1.09}, False, id="a longer mix"),
        pytest.param({Method.CHECKPOINT: 900, Method.MIXED: 910}, {Method.CHECKPOINT: 0.92}, False, id="shorter: more"),
        pytest.param({Method.CHECKPOINT: 900, Method.MIXED: 900}, {Method.CHECKPOINT: 1.005}, True, id="as long"),
    ],
)
def test_peaks_are_compared_as_if_all_steps_were_as_long(
    peaks: Mapping[Method, int], longer: Mapping[Method, float], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps within a tenth count: a mix that was tried in the shorter ones only would take more in the longer ones."""
    plan, timer, planned = trying(monkeypatch, mix(), in_use_bytes=100 * MB)
    seconds = {Method.CHECKPOINT: [4.0], Method.MIXED: [2.0]}
    for _ in range(2 * ROUNDS):
        now = Method.CHECKPOINT if timer.checkpointed else Method.MIXED
        found = span(plan, timer, seconds, {method: peak * MB for method, peak in peaks.items()})
        plan.saw_span(replace(held(found, 100 * MB), saved_bytes=int(found.saved_bytes * longer.get(now, 1.0))))
    assert plan.judged and plan.reads_kept_bytes is stays, plan.explain()
    limit = 100 + 800 / max(longer.get(Method.CHECKPOINT, 1.0), 1.0) if longer != {Method.CHECKPOINT: 1.005} else 900
    assert planned == [pytest.approx(limit * MB, rel=1e-6)]


@pytest.mark.parametrize(
    ("checkpointed", "took", "stays"),
    [
        pytest.param([10, 10, 10, 10, 10, 0.1], [11, 11, 11, 11, 11, 0.1], False, id="slower, and one is small"),
        pytest.param([4, 4, 4, 4, 4, 20], [3, 3, 3, 3, 3, 15], True, id="faster, and one is large"),
    ],
)
def test_blocks_of_a_kind_need_not_be_alike(
    checkpointed: list[float], took: list[float], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as layers with and without a window of attention."""
    plan, timer, _ = trying(monkeypatch, mix())
    run(plan, timer, took, checkpointed=checkpointed)
    assert plan.reads_kept_bytes is stays, plan.explain()


def test_why_says_that_steps_differed_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, timer, _ = trying(monkeypatch, mix())
    seconds, peaks = {Method.CHECKPOINT: [4.0], Method.MIXED: [2.0]}, dict.fromkeys(Method, LIMIT)
    for number in range(2 * ROUNDS):
        now = span(plan, timer, seconds, peaks)
        plan.saw_span(replace(now, saved_bytes=now.saved_bytes // (1 + number % 2)))
    assert plan.judged and not plan.reads_kept_bytes
    assert "checkpointed; steps differ in size" in plan.explain()


def test_without_a_mix_that_promises_anything_blocks_are_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, timer, peaks = trying(monkeypatch, None)
    assert not plan.saw_span(span(plan, timer, {Method.CHECKPOINT: [4.0]}, {Method.CHECKPOINT: 800 * MB}))
    assert peaks == [800 * MB] and plan.judged and not timer.checkpointed
    assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=0) is Action.CHECKPOINT
    assert f"Layer blocks are checkpointed: {NO_MIX}" in plan.explain()
    assert plan.block_action("Stem", 0, input_bytes=1, must_keep_bytes=0) is Action.KEEP


def test_a_step_of_which_a_mix_is_made_checkpoints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what recipes cover badly; such blocks are watched all the same. The first step follows the rule."""
    plan, engine = MinimalPlan(Minimal(), tier(), None, Bus()), Mock(timer=None)
    plan.watch(engine)
    for expected in (Action.CHECKPOINT, Action.KEEP, Action.CHECKPOINT):
        assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=100) is expected
        assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=2**62) is Action.CHECKPOINT
        if expected is Action.KEEP:
            engine.timer.wanted = False
        else:
            plan.saw_step(measured())


@pytest.mark.parametrize("input_bytes", [99 * MB, 100 * MB])
def test_where_much_stays_whatever_the_plan_no_mix_is_tried(input_bytes: int) -> None:
    """Without checkpoints the measured step would need the memory of ordinary training."""
    stays = tuple(replace(unit, action=Action.KEEP) for unit in measured().blocks[0].units[:1])
    blocks = tuple(replace(block, units=stays, input_bytes=input_bytes) for block in measured().blocks)
    plan, engine = MinimalPlan(Minimal(), tier(), None, Bus()), Mock(timer=None)
    plan.watch(engine)
    assert plan.saw_step(replace(measured(), blocks=blocks))
    mixes = input_bytes == 100 * MB
    assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=100) is (
        Action.KEEP if mixes else Action.CHECKPOINT
    )
    plan.saw_step(measured())
    assert len(engine.timer.checkpointed) == (6 if mixes else 3)


def held(found: TimedStep | Span, nbytes: int) -> Any:
    return replace(found, in_use_bytes=nbytes)


def test_a_step_that_begins_with_more_memory_than_the_measured_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that accumulate, or an optimizer's state: the mix was made for less."""
    plan, timer, _ = trying(monkeypatch, mix(), in_use_bytes=500 * MB)
    first = span(plan, timer, {Method.CHECKPOINT: [4.0]}, {Method.CHECKPOINT: 800 * MB})
    assert plan.saw_span(held(first, 505 * MB)) and not timer.outdated()
    assert not plan.saw_span(held(first, 506 * MB))
    assert not timer.checkpointed and not plan.reads_kept_bytes and not plan.judged
    assert timer.outdated() and not timer.outdated()
    plan.saw_step(held(measured(), 506 * MB))
    assert timer.checkpointed


def test_steps_that_begin_with_less_memory_or_save_less_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, timer, peaks = trying(monkeypatch, mix(), in_use_bytes=500 * MB)
    first = span(plan, timer, {Method.CHECKPOINT: [4.0]}, {Method.CHECKPOINT: 800 * MB})
    small = replace(first, saved_bytes=first.saved_bytes // 2)
    for number in range(MOST_SKIPPED):
        assert timer.checkpointed and not peaks, "the same trial goes on"
        less = held(first, 494 * MB) if number % 2 else held(small, 500 * MB)
        assert plan.saw_span(less) is (number < MOST_SKIPPED - 1)
    assert plan.judged and UNTIMED in plan.explain()
    assert plan.block_action("Layer", 0, input_bytes=1, must_keep_bytes=0) is Action.CHECKPOINT


def test_a_step_that_grew_under_a_mix_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it recorded has no prices of recipes."""
    plan, timer, _ = trying(monkeypatch, mix())
    plan.saw_span(span(plan, timer, {Method.CHECKPOINT: [4.0]}, {Method.CHECKPOINT: 800 * MB}))
    assert not plan.needs_recipe(candidate(MOVED))
    larger = replace(measured(), saved_bytes=2 * measured().saved_bytes)
    assert plan.saw_step(larger)
    assert plan.needs_recipe(candidate(MOVED)) and not plan.reads_kept_bytes and not timer.checkpointed
    assert not plan.saw_step(larger)
    assert timer.checkpointed
