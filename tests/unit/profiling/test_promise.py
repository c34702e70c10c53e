"""A plan is held to its promise: by comparing steps that carried it out with plain blocks. All times are made up."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebbtide.base.actions import Action, Site
from ebbtide.base.errors import BudgetError
from ebbtide.base.events import Bus
from ebbtide.base.runs import SETTLING
from ebbtide.config import Auto
from ebbtide.engine.spans import BlockSpan, Span
from ebbtide.engine.timed import TimedBlock, TimedStep, TimedUnit
from ebbtide.planner.charges import scaled
from ebbtide.planner.profile import RECOMPUTE_HOOKS, Profile, Rates
from ebbtide.planner.simulate import simulate
from ebbtide.planner.solve import Search, Solution
from ebbtide.profiling.auto import IN_PIECES, AutoPlan
from ebbtide.profiling.baseline import HOOKS_OF_PACKS, ROOM, against_plain, noise, plain_blocks, sample
from ebbtide.profiling.block_times import Measured, from_blocks
from ebbtide.profiling.closed_loop import LOOSENED, SPARE, kept_blocks
from ebbtide.profiling.promise import (
    ADDED,
    AGREE,
    CHECKED,
    CORRECTIONS,
    FIRST_LOOK,
    LATEST,
    LEAST_NOISE,
    LEAST_PRICE,
    UNUSED,
    VERIFYING,
    Judgement,
    loosened,
    recalibrated,
)
from ebbtide.profiling.solutions import FRAGMENTS, RESERVE, fit_with_reserve, solution_for
from ebbtide.profiling.step_profile import profile_of
from ebbtide.store.counters import TierCounters
from ebbtide.store.disk import DiskTier
from tests.helpers.profiles import alike
from tests.helpers.profiles import unit as make_unit

MB = 10**6
RATES = Rates(out_bytes_per_second=1000 * MB, in_bytes_per_second=1000 * MB)


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake enough free memory: the profiles here are larger than some machines'."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier: 10**12)


def unit(name: str, action: Action, recompute: float | None = None, host: float = 0.0) -> TimedUnit:
    return TimedUnit(
        site=Site("Layer", name, "Node", 0), nbytes=100 * MB, block_input=False, movable=True, action=action,
        recompute_seconds=recompute, host_seconds=host,
    )  # fmt: skip


def step(*, forward: float = 1.0, backward: float = 2.5, peak: int | None = None) -> TimedStep:
    """Return a measured step of four blocks, each of which recomputed one storage (0.25 s) and offloaded another."""
    units = (unit("light", Action.RECOMPUTE, 0.25), unit("dear", Action.OFFLOAD, 30.0, host=0.01))
    return TimedStep(
        blocks=tuple(
            TimedBlock(
                name=f"layers.{i}", kind="Layer", units=units, forward_seconds=forward, backward_seconds=backward,
                forward_peak_bytes=peak, backward_peak_bytes=peak,
            )
            for i in range(4)
        ),
        head_seconds=0.5, epilogue_seconds=0.25, head_peak_bytes=peak,
    )  # fmt: skip


def with_plain(found: TimedStep, *, forward: float, backward: float) -> TimedStep:
    """Return a step whose last block ran plain."""
    plain = replace(found.blocks[-1], units=(), plain=True, forward_seconds=forward, backward_seconds=backward)
    return replace(found, blocks=(*found.blocks[:-1], plain))


def tier() -> Any:
    counters = TierCounters(timed_out_bytes=1000 * MB, out_seconds=1.0, timed_in_bytes=1000 * MB, in_seconds=1.0)
    return SimpleNamespace(name="disk", counters=counters)


def planned(policy: Auto, *, peak: int | None = None) -> AutoPlan:
    plan = AutoPlan(policy, tier(), None, Bus())
    for _ in range(3):
        plan.saw_step(step(peak=peak))
    assert plan.table is not None
    return plan


def carry_out(plan: AutoPlan, *seconds: float, peak: int | None = None, system: float | None = None) -> bool:
    """Let passes of these lengths carry the plan out, after the settling ones; return whether more are wanted."""
    more = True
    for one in (*[99.0] * SETTLING, *seconds):
        assert more
        more = plan.saw_span(Span(seconds=one, peak_bytes=peak, saved_bytes=800 * MB, system_seconds=system))
    return more


# The baseline


def test_plain_blocks_are_the_first_of_each_kind_where_there_is_room() -> None:
    found = step()
    other = replace(found.blocks[0], name="stem", kind="Stem", units=found.blocks[0].units[:1])
    found = replace(found, blocks=(other, *found.blocks))
    room = ROOM * (100 + 200) * MB
    assert sample(found.blocks, room) == {"stem", "layers.0"}
    assert sample(found.blocks, room - 1) == {"stem"}
    assert sample(found.blocks, None) == frozenset()


def stand_in() -> Any:
    """Return a stand-in for the timer."""
    return SimpleNamespace(
        plain=frozenset(), unhooked=None, spans=untimed(), expected_bytes=0, planned=lambda nbytes: None, wanted=False
    )


def untimed() -> Any:
    """Return a stand-in for the timer of whole passes."""
    return SimpleNamespace(between_peak_bytes=None, want=lambda *, wanted: None)


def many(count: int) -> TimedStep:
    found = step()
    return replace(found, blocks=tuple(replace(found.blocks[0], name=f"layers.{i}") for i in range(count)))


@pytest.mark.parametrize(
    ("count", "plain"),
    [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (30, 4), (300, 4)],
)
def test_of_many_blocks_a_quarter_runs_plain_up_to_four(count: int, plain: int) -> None:
    assert sample(many(count).blocks, 10**12) == {f"layers.{i}" for i in range(plain)}


@pytest.mark.parametrize(
    ("budget", "free", "names"),
    [
        (10**12, 10**12, {0, 1, 2}),
        (10**12, ROOM * 200 * MB, {0}),
        (1_000 * MB, 10**12, {0}),  # the budget has no room for one, the machine has: one, in this step only
        (1_000 * MB, 100 * MB, set[int]()),
        (None, 100 * MB, set[int]()),
    ],
)
def test_ordinary_training_is_measured_where_a_budget_has_no_room(
    budget: int | None, free: int, names: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.profiling.auto.room_bytes", lambda tier: free)
    plan = AutoPlan(Auto() if budget is None else Auto(memory_budget=budget), tier(), None, Bus())
    timer: Any = SimpleNamespace(plain=frozenset[str](), times_blocks=True, spans=untimed(), expected_bytes=0)
    plan._timer = timer
    blocks = tuple(replace(block, forward_peak_bytes=990 * MB) for block in many(12).blocks)
    for _ in range(2):
        plan.saw_step(replace(many(12), blocks=blocks))
    assert timer.plain == {f"layers.{i}" for i in names}


def test_a_second_block_of_a_kind_comes_after_one_of_each() -> None:
    found = step()
    stem = replace(found.blocks[0], kind="Stem", units=found.blocks[0].units[:1])
    stems = tuple(replace(stem, name=f"stem.{i}") for i in range(2))
    found = replace(found, blocks=(*stems, *many(12).blocks))
    assert sample(found.blocks, ROOM * (100 + 200) * MB) == {"stem.0", "layers.0"}
    assert sample(found.blocks, ROOM * (100 + 2 * 200) * MB) == {"stem.0", "layers.0", "layers.1"}


def test_blocks_of_another_size_are_not_compared() -> None:
    blocks = list(many(12).blocks)
    blocks[0] = replace(blocks[0], units=blocks[0].units[:1])
    assert sample(blocks, 10**12) == {"layers.1", "layers.2"}


def test_times_are_quartiles() -> None:
    """What hooks cost is taken to be the upper quartile of it, what ordinary training takes the lower."""
    before = many(12)
    plain = {0: (0.8, 2.0), 1: (0.6, 2.0), 2: (0.7, 1.0)}
    blocks = [
        replace(block, units=(), plain=True, forward_seconds=plain[place][0], backward_seconds=plain[place][1])
        if place in plain
        else replace(block, forward_seconds=1.0 + 0.1 * place)
        for place, block in enumerate(before.blocks)
    ]
    found = plain_blocks(before, replace(before, blocks=tuple(blocks)))["Layer"]
    assert (found.forward_seconds, found.backward_seconds) == (pytest.approx(0.65), 1.5)
    assert (found.hooked_forward_seconds, found.hooked_backward_seconds) == (pytest.approx(1.9), 2.5)


def test_on_a_cpu_the_price_of_hooks_is_measured_in_the_pack_hook() -> None:
    """Two blocks keep everything under hooks; by the clock they took no longer than ordinary training."""
    before = many(12)
    kept = tuple(replace(unit, action=Action.KEEP) for unit in before.blocks[0].units)
    blocks = list(before.blocks)
    blocks[0] = replace(blocks[0], units=(), plain=True)
    for place, seconds in ((1, 0.2), (2, 0.4)):
        blocks[place] = replace(blocks[place], units=kept, pack_seconds=seconds)
    found = plain_blocks(before, replace(before, blocks=tuple(blocks)))["Layer"]
    assert found.hook_seconds == pytest.approx(0.3 * HOOKS_OF_PACKS)
    assert found.own_hook_seconds == pytest.approx(0.3 * HOOKS_OF_PACKS * RECOMPUTE_HOOKS)
    offloaded = replace(found, units=tuple(unit for unit in found.units if unit.action is Action.OFFLOAD))
    assert offloaded.own_hook_seconds == found.hook_seconds


def test_the_hooks_of_recomputes_are_not_charged_again() -> None:
    """A block took 0.45 s more than plain and its recompute; its hooks take 0.35 s of that."""
    before, sampled = step(), with_plain(step(), forward=0.8, backward=2.0)
    found = replace(plain_blocks(before, sampled)["Layer"], hook_seconds=0.35 / RECOMPUTE_HOOKS)
    profile = against_plain(profile_of(before, RATES, None), {"Layer": found})
    light = profile.blocks[0].units[0]
    assert light.recompute_seconds == pytest.approx(0.25 * (1 + 0.1 / 0.45))


def test_blocks_count_with_plain_times_and_the_rest_is_charged() -> None:
    before, sampled = step(), with_plain(step(), forward=0.8, backward=2.0)
    profile = against_plain(profile_of(before, RATES, None), plain_blocks(before, sampled))
    assert [(b.forward_seconds, b.backward_seconds) for b in profile.blocks] == [(0.8, 2.0)] * 4
    assert profile.step_seconds == pytest.approx(4 * 2.8 + 0.75)
    # A block took 3.5 s: 0.45 s more than plain and its recompute. Moving (0.2 s) and recomputing (0.25 s) share them.
    light = profile.blocks[0].units[0]
    assert light.recompute_seconds == pytest.approx(0.25 * 2)
    assert profile.rates.handling_seconds == pytest.approx(0.01)
    per_storage = profile.rates.handling_seconds + 100 * MB * profile.rates.handling_seconds_per_byte
    assert 2 * per_storage == pytest.approx(0.2)


def test_without_an_equal_a_block_is_compared_with_itself_one_step_before() -> None:
    before = step()
    stem = replace(before.blocks[0], name="stem", kind="Stem", forward_seconds=3.0, backward_seconds=6.25)
    before = replace(before, blocks=(stem, *before.blocks))
    slower = [replace(b, forward_seconds=2.0, backward_seconds=5.0) for b in before.blocks[1:]]
    sampled = replace(
        before, blocks=(replace(stem, units=(), plain=True, forward_seconds=4.0, backward_seconds=8.0), *slower)
    )
    found = plain_blocks(before, sampled)["Stem"]
    assert (found.hooked_forward_seconds, found.hooked_backward_seconds) == (6.0, 12.5)  # the machine was half as fast
    assert (found.forward_seconds, found.backward_seconds) == (4.0, 8.0)
    assert noise(before, sampled) == 1.0


def test_a_plain_block_that_was_disturbed_takes_no_longer_than_its_equals() -> None:
    before = step()
    found = plain_blocks(before, with_plain(before, forward=9.0, backward=9.0))["Layer"]
    assert (found.forward_seconds, found.backward_seconds) == (1.0, 2.5)
    profile = profile_of(before, RATES, None)
    assert against_plain(profile, {"Layer": found}).rates == RATES


def test_the_promise_is_of_plain_steps() -> None:
    plan = AutoPlan(Auto(max_slowdown=0.1), tier(), None, Bus())
    for found in (step(), step(), with_plain(step(), forward=0.5, backward=1.0)):
        plan.saw_step(found)
    assert plan.profile is not None and plan.profile.step_seconds == pytest.approx(4 * 1.5 + 0.75)
    assert "plain step 6.75 s; promised at most 7.425 s (+10.0 %)" in plan.explain()


def test_a_step_with_plain_blocks_needs_an_equal_one_without() -> None:
    plan = AutoPlan(Auto(), tier(), None, Bus())
    plan.saw_step(step())
    assert plan.saw_step(with_plain(step(), forward=0.5, backward=1.0))
    assert plan.saw_step(step()) and plan.table is None
    plan.saw_step(step())
    assert plan.table is not None


# The loop


@pytest.mark.parametrize(
    ("seconds", "stays"),
    [
        pytest.param([13.5] * CHECKED, True, id="it keeps its promise"),
        pytest.param([13.5, 13.6, 30.0, 30.0, 30.0], True, id="the second shortest does: the machine is busy"),
        pytest.param([13.5, 20.0, 20.0, 20.0, 20.0], False, id="one lucky step does not excuse the others"),
    ],
)
def test_a_plan_stays_if_no_more_than_noise_breaks_its_promise(seconds: list[float], stays: bool) -> None:
    plan = planned(Auto(max_slowdown=0.1))
    before = plan.table
    assert carry_out(plan, *seconds) is not stays
    assert (plan.table is before) is stays
    if stays:
        assert f"in {CHECKED} steps" in plan.explain()


@pytest.mark.parametrize("seconds", [13.5, 60.0])
def test_a_run_records_the_verdict(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of the plan comes before any step that judges it."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier: 700 * MB)
    bus = Bus()
    bus.subscribe(lambda kind, fields: found.append((kind, fields["text"])))
    plan = AutoPlan(Auto(max_slowdown=0.1), tier(), None, bus)
    for _ in range(3):
        plan.saw_step(step())
    while carry_out(plan, *[seconds] * CHECKED):
        pass
    assert [kind for kind, _ in found] == ["plan"] * (len(found) - 1) + ["verdict"]
    assert found[-1][1] == plan.explain() and f"measured {seconds + 0.25} s" in found[-1][1]
    assert found[-1][1].partition("\n")[0] == found[-2][1].partition("\n")[0]
    assert ("no plan is known that would keep it" in found[-1][1]) is (seconds == 60.0)


def test_a_missed_promise_is_corrected_by_keeping_more(caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(Auto(max_slowdown=0.1))
    assert plan.table is not None
    kept = [plan.table.predicted.kept_bytes]
    assert kept[0] < 800 * MB
    with caplog.at_level("INFO", logger="ebbtide"):
        while carry_out(plan, *[16.0] * CHECKED):
            kept.append(plan.table.predicted.kept_bytes)
    kept.append(plan.table.predicted.kept_bytes)
    assert kept == sorted(kept) and kept[-1] == 800 * MB
    assert len(kept) - 1 <= CORRECTIONS
    told = [r.getMessage() for r in caplog.records if "missed its promise" in r.getMessage()]
    assert len(told) == len(kept) - 1
    assert all("promised at most" in line and "measured 16.25 s" in line for line in told)


def test_after_a_miss_a_plan_checkpoints_fewer_blocks() -> None:
    """Fewer, not none at once: the price of a checkpoint is that of the measured ones."""
    plan = AutoPlan(Auto(max_slowdown=0.1), tier(), None, Bus())
    units = (replace(unit("", Action.KEEP), block_input=True), unit("dear", Action.KEEP, 30.0))
    units = tuple(replace(one, movable=False, nbytes=number * MB) for number, one in zip((1, 100), units, strict=True))
    blocks = tuple(replace(block, units=units, checkpointable=True) for block in many(40).blocks)
    for _ in range(3):
        plan.saw_step(replace(many(40), blocks=blocks))

    def checkpointed() -> int:
        assert plan._judgement is not None
        return sum(Action.CHECKPOINT in actions for actions in plan._judgement.solution.assignment)

    before = checkpointed()
    assert plan._judgement is not None and before > 8
    plain, predicted = plan._judgement.solution.profile.step_seconds, plan._judgement.solution.predicted.step_seconds
    missed = plain + 1.5 * (predicted - plain) - plan._judgement.solution.profile.epilogue_seconds
    for one in (*[99.0] * SETTLING, *[missed] * CHECKED):
        plan.saw_span(Span(seconds=one, peak_bytes=None, saved_bytes=40 * 101 * MB))
    assert before / 2 < checkpointed() < before


def test_after_a_miss_work_that_the_plan_did_not_do_is_no_way_out() -> None:
    """Else a plan that recomputes is followed by one that offloads as much, and takes as long."""
    judgement = judged_plan()._judgement
    assert judgement is not None
    profile = judgement.solution.profile
    recomputes = [
        tuple(Action.KEEP if one.recompute_seconds is None else Action.RECOMPUTE for one in block.units)
        for block in profile.blocks
    ]
    only = Search(profile).simulated(recomputes)
    assert only.predicted.recompute_seconds > 0 == only.predicted.moved_bytes
    missed = Judgement(only, allowed_seconds=judgement.allowed_seconds, noise=0.0, budget_bytes=None)
    seconds = only.predicted.step_seconds + only.predicted.recompute_seconds
    missed.measured = Measured(seconds=seconds, low_seconds=seconds, high_seconds=seconds)
    found = recalibrated(missed)
    assert found is not None
    assert found.rates.handling_seconds_per_byte > profile.rates.handling_seconds_per_byte
    assert found.blocks[0].checkpoint_factor > profile.blocks[0].checkpoint_factor


def test_after_a_second_miss_plans_aim_below_the_promise() -> None:
    """Prices that explain one plan need not explain the next: else the last one would be slightly too slow as well."""
    plan, shares = planned(Auto(max_slowdown=0.3)), list[float]()
    for _ in range(3):
        judgement = plan._judgement
        assert judgement is not None and not judgement.keeps
        profile = judgement.solution.profile
        allowed = judgement.allowed_seconds - profile.step_seconds
        shares.append(judgement.solution.predicted.overhead_seconds / allowed)
        missed = profile.step_seconds + 1.5 * allowed - profile.epilogue_seconds
        carry_out(plan, *[missed] * CHECKED)
    assert shares[1] > 1 / 1.5 >= shares[2] > 0


@pytest.mark.parametrize(("slowdown", "aimed"), [(0.2, 0.19), (0.1, 0.09), (0.016, 0.008)])
def test_a_first_plan_aims_below_the_promise_which_stays(slowdown: float, aimed: float) -> None:
    judgement = judged_plan(slowdown=slowdown, count=200)._judgement
    assert judgement is not None
    plain = judgement.solution.profile.step_seconds
    assert judgement.allowed_seconds == pytest.approx(plain * (1 + slowdown))
    assert aimed - 0.007 < judgement.solution.predicted.overhead_seconds / plain <= aimed


def test_in_the_end_everything_is_kept_without_hooks_and_it_says_so() -> None:
    plan = planned(Auto(max_slowdown=0.0))
    rounds = 0
    while carry_out(plan, *[50.0] * CHECKED):
        rounds += 1
    assert rounds < CORRECTIONS
    assert plan.table is not None and set(plan.table.actions.values()) == {Action.KEEP}
    assert "everything stays, so blocks run without hooks, as in ordinary training" in plan.explain()


def test_a_larger_limit_is_advised_only_if_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    for slowdown in (0.6, 1.0):
        plan = AutoPlan(Auto(max_slowdown=slowdown), tier(), None, Bus())
        stays = [replace(b, units=tuple(replace(u, movable=False, recompute_seconds=None) for u in b.units))
                 for b in step().blocks]  # fmt: skip
        for _ in range(3):
            plan.saw_step(replace(step(), blocks=tuple(stays)))
    first, second = (line for line in caplog.messages if "Auto keeps everything" in line)
    assert first.endswith(", or use a larger limit: policy=ebbtide.Auto(max_slowdown=1)")
    assert second.endswith("use policy 'minimal', which has the memory of checkpointing")


def test_of_a_lone_block_smaller_ones_are_advised(caplog: pytest.LogCaptureFixture) -> None:
    plan = AutoPlan(Auto(max_slowdown=0.6), tier(), None, Bus())
    for _ in range(3):
        plan.saw_step(replace(step(), blocks=step().blocks[:1]))
    (warning,) = (line for line in caplog.messages if "Auto keeps everything" in line)
    assert warning.endswith("name smaller ones: blocks=[...]")
    assert plan.kept_because == "lone" and "of the one block" in plan.explain()


def test_without_memory_for_more_the_plan_stays_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(Auto(max_slowdown=0.1))
    before = plan.table
    monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier: 1)
    assert not carry_out(plan, *[20.0] * CHECKED)
    assert plan.table is before
    assert "the promise is not kept, and no plan is known that would keep it" in caplog.text
    assert "no plan is known" in plan.explain()


# Steps that differ


def sized(found: TimedStep, factor: float, *, slower: float = 1.0) -> TimedStep:
    """Return the step for sequences that are ``factor`` times as long, on a machine that takes ``slower`` times."""
    longer = factor * slower
    blocks = tuple(
        replace(
            block,
            units=tuple(
                replace(
                    u,
                    nbytes=int(u.nbytes * factor),
                    recompute_seconds=u.recompute_seconds and u.recompute_seconds * longer,
                    host_seconds=u.host_seconds * slower,
                )
                for u in block.units
            ),
            forward_seconds=block.forward_seconds * longer,
            backward_seconds=block.backward_seconds * longer,
            pack_seconds=block.pack_seconds * longer,
        )
        for block in found.blocks
    )
    return replace(found, blocks=blocks, head_seconds=0.5 * longer, epilogue_seconds=0.25 * longer)


def test_a_machine_that_becomes_slower_between_measured_steps_makes_no_work_cheaper() -> None:
    """Blocks without hooks run in the second one only, and of recomputes the shortest time counts."""
    shares: list[list[float]] = []
    for slower in (1.0, 1.5):
        plan, plain = AutoPlan(Auto(max_slowdown=0.1), tier(), None, Bus()), with_plain(step(), forward=0.8, backward=2)
        for one in (step(), step(), sized(plain, 1.0, slower=slower)):
            plan.saw_step(one)
        assert plan.profile is not None
        recomputes = [unit.recompute_seconds or 0.0 for _, _, unit in plan.profile.units()]
        handling = plan.profile.rates.handling_seconds, plan.profile.rates.handling_seconds_per_byte
        shares.append([seconds / plan.profile.step_seconds for seconds in (*recomputes, *handling)])
    assert shares[1] == pytest.approx(shares[0])


@pytest.mark.parametrize("factor", [0.5, 0.995, 1.0, 3.0])
def test_sequences_of_other_lengths_are_measured_together(factor: float) -> None:
    """Only the ratios of the second step count: the plan is for the first, in which all blocks had hooks."""
    plan = AutoPlan(Auto(max_slowdown=0.1), tier(), None, Bus())
    second = sized(many(12), factor)
    plain = [replace(b, units=(), plain=True, forward_seconds=0.5 * factor, backward_seconds=2.0 * factor)
             for b in second.blocks[:2]]  # fmt: skip
    for found in (many(12), many(12), replace(second, blocks=(*plain, *second.blocks[2:]))):
        plan.saw_step(found)
    assert plan.profile is not None and plan.profile.saved_bytes == 12 * 200 * MB
    head, epilogue = 0.5 * min(factor, 1.0) if factor > 0.99 else 0.5, 0.25 * min(factor, 1.0)
    assert (plan.profile.head_seconds, plan.profile.epilogue_seconds) == pytest.approx((head, epilogue))
    assert plan.profile.step_seconds == pytest.approx(12 * 2.5 + head + epilogue, rel=0.01)
    assert noise(many(12), second) == pytest.approx(0.0, abs=1e-9)


def test_a_storage_that_a_plain_block_saved_first_is_found_in_the_next() -> None:
    """Several blocks save the same tensor, such as a time embedding: it belongs to the first one with hooks."""
    plan = AutoPlan(Auto(max_slowdown=0.1), tier(), None, Bus())
    first, *others = many(12).blocks
    shared = replace(unit("time", Action.OFFLOAD), nbytes=MB // 2)
    plain = replace(first, units=(), plain=True, forward_seconds=0.5, backward_seconds=2.0)
    before = replace(many(12), blocks=(replace(first, units=(shared, *first.units)), *others))
    after = replace(others[0], units=(shared, *others[0].units))
    for found in (before, before, replace(before, blocks=(plain, after, *others[1:]))):
        plan.saw_step(found)
    assert plan.profile is not None and plan.profile.step_seconds == pytest.approx(12 * 2.5 + 0.75)
    assert [len(block.units) for block in plan.profile.blocks] == [3] + [2] * 11


def test_other_blocks_are_measured_again() -> None:
    plan = AutoPlan(Auto(), tier(), None, Bus())
    for count in (4, 4, 3, 4, 3):
        plan.saw_step(many(count))
    assert plan.profile is None
    plan.saw_step(many(3))
    assert plan.profile is not None and len(plan.profile.blocks) == 3


@pytest.mark.parametrize(
    ("policy", "span"),
    [
        pytest.param(
            Auto(memory_budget=100 * MB), Span(seconds=1.0, peak_bytes=10 * MB, saved_bytes=500 * MB), id="shorter"
        ),
        pytest.param(
            Auto(max_slowdown=1.0), Span(seconds=99.0, peak_bytes=1_800 * MB, saved_bytes=1_600 * MB), id="longer"
        ),
    ],
)
def test_sequences_of_another_length_show_neither_the_promised_time_nor_the_peak(policy: Auto, span: Span) -> None:
    plan = planned(policy, peak=50 * MB)
    before = plan.table
    for _ in range(SETTLING + CHECKED + 1):
        assert plan.saw_span(span)
    assert plan.table is before and plan._judgement is not None and plan._judgement.measured is None


@pytest.mark.parametrize("saved_bytes", [500 * MB, 1_600 * MB], ids=["shorter", "longer"])
def test_a_peak_above_the_budget_counts_however_long_the_step_is(saved_bytes: int) -> None:
    """The budget is that of all steps."""
    plan = planned(Auto(memory_budget=1_500 * MB), peak=1_300 * MB)
    before = plan.table
    for _ in range(SETTLING + 1):
        plan.saw_span(Span(seconds=99.0, peak_bytes=1_800 * MB, saved_bytes=saved_bytes))
    assert plan.table is not before


# Compared with blocks without hooks


def judged_plan(slowdown: float = 0.1, count: int = 12, plain: float = 2.5) -> AutoPlan:
    """Return a plan for blocks that take ``plain`` seconds without hooks (a fifth of it forward), and 3.5 with them."""
    plan = AutoPlan(Auto(max_slowdown=slowdown), tier(), None, Bus())
    found = many(count)
    quiet = [replace(b, units=(), plain=True, forward_seconds=plain / 5, backward_seconds=plain * 4 / 5)
             for b in found.blocks[-2:]]  # fmt: skip
    for one in (found, found, replace(found, blocks=(*found.blocks[:-2], *quiet))):
        plan.saw_step(one)
    assert plan.table is not None and plan.profile is not None
    assert plan.profile.step_seconds == pytest.approx(count * plain + 0.75)
    return plan


def span_of(plan: AutoPlan, slower: float, *, plain: tuple[int, ...], speed: float = 1.0) -> Span:
    """Return a pass of a machine that takes ``speed`` times as long, in which blocks with hooks take ``slower``."""
    assert plan.profile is not None
    blocks = tuple(
        BlockSpan(name=block.name, plain=place in plain,
                  forward_seconds=block.forward_seconds * speed * (1.0 if place in plain else slower),
                  backward_seconds=block.backward_seconds * speed * (1.0 if place in plain else slower))
        for place, block in enumerate(plan.profile.blocks)
    )  # fmt: skip
    return Span(seconds=sum(b.seconds for b in blocks) + 0.5 * speed, peak_bytes=None, saved_bytes=1, blocks=blocks)


@pytest.mark.parametrize("speed", [1.0, 2.0, 0.5])
def test_a_plan_is_compared_with_blocks_of_the_same_pass(speed: float) -> None:
    plan = judged_plan()
    assert plan._judgement is not None and plan.profile is not None
    found = from_blocks(span_of(plan, 1.5, plain=(3, 7), speed=speed), plan._judgement.solution)
    assert found is not None
    kept = len(kept_blocks(plan._judgement.solution) & {"layers.3", "layers.7"})  # these take no longer under the plan
    assert found.seconds == pytest.approx(2.5 * (1.5 * (12 - kept) + kept) + 0.75, rel=0.02)
    assert found.low_seconds == found.seconds == found.high_seconds


def test_whole_steps_are_not_judged_together_with_compared_ones() -> None:
    plan = judged_plan()
    judgement = plan._judgement
    assert judgement is not None and plan.profile is not None
    disturbed = span_of(plan, 1.9, plain=(3, 7))
    whole = replace(disturbed, seconds=500.0, saved_bytes=plan.profile.saved_bytes)
    alone = replace(whole, blocks=tuple(replace(block, plain=False) for block in whole.blocks))
    for span in (disturbed, alone, disturbed, alone):
        plan.saw_span(span)
        assert len(judgement._steps) <= 2
        assert all(step.seconds < 100.0 for step in judgement._steps if judgement.by_blocks)
    assert judgement.by_blocks


def slow_backwards(span: Span, factor: float) -> Span:
    return replace(span, blocks=tuple(replace(b, backward_seconds=factor * b.backward_seconds) for b in span.blocks))


@pytest.mark.parametrize("slower", [1.05, 1.5])
def test_a_pass_of_other_blocks_is_judged_by_those_that_the_plan_knows(slower: float) -> None:
    """For example with layers that are dropped at random: the measured step had dropped some, too."""
    plan = judged_plan()
    judgement = plan._judgement
    assert judgement is not None
    complete = span_of(plan, slower, plain=(3, 5, 7, 9))
    more = tuple(replace(block, name=f"other.{place}", plain=False) for place, block in enumerate(complete.blocks[:6]))
    found = [
        from_blocks(replace(complete, seconds=sum(b.seconds for b in blocks) + 0.5, blocks=blocks), judgement.solution)
        for blocks in (complete.blocks, complete.blocks[:4] + complete.blocks[5:], more + complete.blocks)
    ]
    promised = judgement.allowed_seconds
    assert [one is not None and one.seconds > promised for one in found] == [slower > 1.1] * 3


def test_a_pass_of_more_blocks_is_no_missed_promise() -> None:
    plan = judged_plan()
    before = plan.table
    complete = span_of(plan, 1.0, plain=())
    more = tuple(replace(block, name=f"other.{place}") for place, block in enumerate(complete.blocks))
    for _ in range(2 * CHECKED):
        plan.saw_span(
            replace(complete, seconds=2 * complete.seconds, saved_bytes=10**12, blocks=complete.blocks + more)
        )
    assert plan.table is before


def test_backwards_without_copies_show_the_machines_speed() -> None:
    plan = judged_plan()
    assert plan._judgement is not None
    solution = plan._judgement.solution
    last = len(solution.assignment) - 1
    blocks = [tuple(Action.KEEP for _ in actions) for actions in solution.assignment]

    def found(place: int, action: Action, plain: int) -> float:
        actions = [tuple(action for _ in b) if i == place else b for i, b in enumerate(blocks)]
        one = from_blocks(
            slow_backwards(span_of(plan, 1.0, plain=(plain,)), 1.3), replace(solution, assignment=actions)
        )
        assert one is not None
        return one.seconds / solution.profile.step_seconds

    # All backwards took 1.3 times as long, ordinary ones too: the plan is not slower.
    assert found(last, Action.RECOMPUTE, plain=0) == pytest.approx(1.0)
    assert found(last, Action.OFFLOAD, plain=0) == pytest.approx(1.0)
    assert found(0, Action.RECOMPUTE, plain=last) == pytest.approx(1.0)
    # Behind a block that offloads, its copies may be the cause of a slower backward.
    assert found(0, Action.OFFLOAD, plain=last) > 1.1


def test_forwards_during_copies_do_not_show_the_machines_speed() -> None:
    """Everything that ran during the copies of the third block took 1.3 times as long: the plan is the cause."""
    plan = judged_plan()
    assert plan._judgement is not None
    solution = plan._judgement.solution
    actions = [tuple(Action.OFFLOAD if i >= 2 else Action.KEEP for _ in b) for i, b in enumerate(solution.assignment)]
    even = span_of(plan, 1.3, plain=(0, 1, 5))
    blocks = [replace(b, forward_seconds=b.forward_seconds * (1.3 if i == 5 else 1)) for i, b in enumerate(even.blocks)]
    later = sum(b.seconds for b in blocks) - sum(b.seconds for b in even.blocks)
    span = replace(even, blocks=tuple(blocks), seconds=even.seconds + later)
    found = from_blocks(span, replace(solution, assignment=actions))
    assert found is not None and found.low_seconds == found.seconds == found.high_seconds
    assert found.seconds == pytest.approx(2.5 * (2 + 10 * 1.3) + 0.75)


@pytest.mark.parametrize("speed", [1.0, 0.8])
def test_kept_blocks_show_the_machines_speed_once_the_copies_are_over(speed: float) -> None:
    """Forward and backward apart: a profile may have one of them wrong."""
    plan = judged_plan()
    assert plan._judgement is not None
    solution = plan._judgement.solution
    actions = [tuple(Action.OFFLOAD if i < 2 else Action.KEEP for _ in b) for i, b in enumerate(solution.assignment)]
    even = span_of(plan, 1.0, plain=tuple(range(2, 12)))
    # The first two of them run during copies of the other two, in forward and in backward.
    factors = [1.0, 1.0, 1.3, 1.3, *[speed] * 8]
    blocks = tuple(
        replace(b, forward_seconds=b.forward_seconds * factor, backward_seconds=b.backward_seconds * max(factor, 1.0))
        for b, factor in zip(even.blocks, factors, strict=True)
    )
    taken = sum(b.seconds for b in blocks)
    found = from_blocks(replace(even, blocks=blocks, seconds=taken + 0.5), replace(solution, assignment=actions))
    assert found is not None and found.low_seconds == found.seconds == found.high_seconds
    ordinary = 12 * (0.5 * speed + 2.0) + 0.75
    assert found.seconds == pytest.approx(solution.profile.step_seconds * (taken + 0.75) / ordinary)


def test_without_a_block_without_hooks_or_with_unknown_blocks_nothing_is_compared() -> None:
    plan = judged_plan()
    assert plan._judgement is not None
    assert from_blocks(span_of(plan, 1.5, plain=()), plan._judgement.solution) is None
    other = span_of(plan, 1.5, plain=(3,))
    unknown = tuple(replace(block, name=f"other.{place}") for place, block in enumerate(other.blocks))
    assert from_blocks(replace(other, blocks=unknown), plan._judgement.solution) is None


def test_what_plain_blocks_differ_by_is_the_error_bar() -> None:
    plan = judged_plan()
    assert plan._judgement is not None
    even = span_of(plan, 1.5, plain=(2, 4, 6, 8))
    speeds = {2: 0.9, 4: 1.0, 6: 1.0, 8: 1.1}
    blocks = tuple(
        replace(b, forward_seconds=b.forward_seconds * speeds.get(i, 1.0)) for i, b in enumerate(even.blocks)
    )
    found = from_blocks(replace(even, blocks=blocks), plan._judgement.solution)
    assert found is not None and found.low_seconds < found.seconds < found.high_seconds
    alone = from_blocks(span_of(plan, 1.5, plain=(2,)), plan._judgement.solution)
    assert alone is not None and alone.low_seconds < alone.seconds < alone.high_seconds


def judged_after(plan: AutoPlan, *slower: float, settled: bool = False) -> int:
    """Return after how many passes no more are wanted, or the plan changes; 0: not yet."""
    before = plan.table
    for number, one in enumerate(slower if settled else (99.0, *slower), int(settled)):  # the first settles
        if not plan.saw_span(span_of(plan, one, plain=(3, 5, 7, 9))) or plan.table is not before:
            return number
    return 0


def test_passes_in_which_recipes_are_verified_do_not_count_for_some_time() -> None:
    plan = judged_plan()
    before = plan.table
    slow = replace(span_of(plan, 5.0, plain=(3, 5, 7, 9)), verifies=True)
    assert plan.saw_span(slow)  # settles
    for _ in range(VERIFYING):
        assert plan.saw_span(slow)
    assert plan.table is before and plan._judgement is not None and not plan._judgement._steps
    assert judged_after(plan, *[1.05] * CHECKED, settled=True) == CHECKED
    assert "missed its promise" not in plan.explain()
    other = judged_plan()
    for _ in range(SETTLING + VERIFYING + AGREE):
        other.saw_span(slow)
    assert "correction 1" in other.explain(), "some always compare"


def test_that_a_promise_is_kept_takes_all_passes_to_show() -> None:
    """Two may have been lucky."""
    plan = judged_plan()
    assert judged_after(plan, *[1.05] * CHECKED) == CHECKED
    assert plan._judgement is not None and not plan._judgement.too_slow and f"in {CHECKED} steps" in plan.explain()


def slower_for(plan: AutoPlan, over: float) -> float:
    """Return the factor of hooked blocks in a pass that is longer than promised by this share of a plain one."""
    judgement = plan._judgement
    assert judgement is not None
    found = [from_blocks(span_of(plan, slower, plain=(3, 5, 7, 9)), judgement.solution) for slower in (1.0, 2.0)]
    none, twice = [one.seconds / judgement.solution.profile.step_seconds for one in found if one is not None]
    return 1 + (judgement.allowed_seconds / judgement.solution.profile.step_seconds + over - none) / (twice - none)


@pytest.mark.parametrize(("over", "passes"), [(-0.001, CHECKED), (0.005, CHECKED), (0.03, 2)])
def test_the_promise_is_no_percent_more_than_was_promised(over: float, passes: int) -> None:
    """If a step takes up to one percent more, two passes cannot show a miss; five can."""
    plan = judged_plan(slowdown=0.1)
    judgement = plan._judgement
    assert judgement is not None
    assert judged_after(plan, *[slower_for(plan, over)] * passes) == passes
    assert judgement.measured is not None and judgement.measured.steps == passes
    assert judgement.too_slow is (over > 0)


LESS, MORE = -0.01, 0.005
"""Of a plain step, what passes take beyond the promise: more than promised, but less than one pass can show."""


@pytest.mark.parametrize(
    ("overs", "too_slow"),
    [
        pytest.param((LESS, LESS, MORE, MORE, MORE, LESS), False, id="kept as soon as the median keeps it"),
        pytest.param((LESS, *[MORE] * 6), True, id="missed as soon as all but one of seven took longer"),
        pytest.param((LESS, LESS, *[MORE] * 4, *[LESS, MORE] * 2, LESS), True, id="else the median of eleven decides"),
    ],
)
def test_a_verdict_that_five_passes_do_not_show_takes_more(overs: tuple[float, ...], too_slow: bool) -> None:
    plan = judged_plan(slowdown=0.1)
    judgement = plan._judgement
    assert judgement is not None and len(overs) <= LATEST
    assert judged_after(plan, *[slower_for(plan, over) for over in overs]) == len(overs)
    assert judgement.too_slow is too_slow and judgement.measured is not None and judgement.measured.steps == len(overs)


def test_a_promise_that_no_machine_can_show_is_not_missed_by_noise() -> None:
    plan = judged_plan(slowdown=0.1)
    assert plan._judgement is not None
    solution = plan._judgement.solution
    judgement = Judgement(solution, allowed_seconds=solution.profile.step_seconds, noise=0.0, budget_bytes=None)
    for slower in (99.0, *[1.001] * CHECKED):
        judgement.add(span_of(plan, slower, plain=(3, 5, 7, 9)))
    assert judgement.measured is not None and not judgement.too_slow


@pytest.mark.parametrize(("faster", "factor"), [(0.0, LEAST_PRICE), (0.5, 0.5), (0.9, None)])
def test_what_a_plan_seems_faster_by_is_an_error_of_either_sign(faster: float, factor: float | None) -> None:
    """Nothing is faster than keeping everything, so prices fall no further than that error allows."""
    judgement = judged_plan()._judgement
    assert judgement is not None
    plain, overhead = judgement.solution.profile.step_seconds, judgement.solution.predicted.overhead_seconds
    seconds = plain - faster * overhead
    judgement.by_blocks, judgement.measured = True, Measured(seconds=seconds, low_seconds=seconds, high_seconds=seconds)
    expected = None if factor is None else scaled(judgement.solution.profile, factor)
    found = loosened(judgement)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        hooked, recomputed = found.rates, found.blocks[0].units[0].recompute_seconds
        assert hooked.handling_seconds_per_byte == pytest.approx(expected.rates.handling_seconds_per_byte)
        assert recomputed == pytest.approx(expected.blocks[0].units[0].recompute_seconds)


def test_one_disturbed_pass_does_not(caplog: pytest.LogCaptureFixture) -> None:
    plan = judged_plan()
    assert judged_after(plan, 1.5, *[1.01] * (CHECKED - 1)) == CHECKED
    assert plan._loop._corrections == 0


# A careful plan is followed by one that does more


def kept_bytes(plan: AutoPlan) -> int:
    assert plan.table is not None
    return plan.table.predicted.kept_bytes


def rounds(plan: AutoPlan, *slower: float) -> list[int]:
    """Judge one plan after the other, each by a pass whose hooked blocks are this much slower; return the kept bytes.

    A plan that misses its promise takes two passes to be judged.
    """
    kept = [kept_bytes(plan)]
    for one in slower:
        assert judged_after(plan, *[one] * CHECKED)
        kept.append(kept_bytes(plan))
    return kept


@pytest.mark.parametrize("unknown", [False, True])
def test_where_no_pass_can_be_compared_the_plan_is_carried_out_unjudged(
    unknown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """For example if two graphs are alive in every backward, which gives no span."""
    plan = judged_plan()
    assert plan._judgement is not None
    kept = kept_blocks(plan._judgement.solution)
    plan._timer = timer = SimpleNamespace(plain=frozenset(), unhooked=kept, spans=untimed())  # type: ignore[assignment]
    complete = span_of(plan, 1.5, plain=(3,))  # one such pass gives no verdict
    recorded: list[tuple[str, Any]] = []
    plan._bus.subscribe(lambda kind, fields: recorded.append((kind, fields)))
    other = replace(complete, blocks=tuple(replace(block, name=f"other.{block.name}") for block in complete.blocks))
    with caplog.at_level("INFO", logger="ebbtide"):
        plan.saw_span(complete)  # settles
        for _ in range(UNUSED - 1):
            assert plan.saw_span(other if unknown else None)
        assert plan.saw_span(complete), "only those in a row count"
        for _ in range(UNUSED - 1):
            assert plan.saw_span(other if unknown else None)
        assert not plan.saw_span(other if unknown else None)
    assert timer.unhooked == kept
    assert "the plan is not judged" in caplog.text and "not judged: graphs overlap" in plan.explain()
    assert [(kind, "not judged: graphs overlap" in fields["text"]) for kind, fields in recorded] == [("verdict", True)]


def test_a_plan_with_time_to_spare_is_followed_by_one_that_keeps_less() -> None:
    plan = judged_plan(slowdown=0.05)
    kept = rounds(plan, 1.001)
    assert kept[1] < kept[0]
    assert "an earlier plan, replaced by one that saves" in plan.explain() and "not measured yet" in plan.explain()


def test_a_plan_that_takes_what_was_predicted_stays() -> None:
    plan = judged_plan(slowdown=0.05)
    assert plan._judgement is not None and plan.profile is not None
    kept, shown = kept_blocks(plan._judgement.solution), {f"layers.{place}" for place in (3, 5, 7, 9)}
    timed = [block for block in plan.profile.blocks if block.name not in kept & shown]
    share = sum(block.forward_seconds + block.backward_seconds for block in timed)
    before = plan.table
    assert judged_after(plan, *[1 + plan._judgement.solution.predicted.overhead_seconds / share] * CHECKED)
    assert plan.table is before


def test_one_that_does_more_and_misses_makes_way_for_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    plan = judged_plan(slowdown=0.05)
    first = plan.table
    rounds(plan, 1.001)
    assert plan.table is not first
    with caplog.at_level("INFO", logger="ebbtide"):
        rounds(plan, 1.5)
    assert plan.table == first
    assert "a plan that kept less missed the promise, so the one before it is restored" in plan.explain()
    assert f"in {CHECKED} steps" in plan.explain().splitlines()[1]  # it was judged, and is not judged again at once


def test_a_first_try_that_misses_is_corrected_where_the_plan_before_saves_nothing() -> None:
    """The prices of the measured steps let it keep everything, a quarter of them is too little."""
    plan = judged_plan(slowdown=0.03)
    assert plan.profile is not None and "replaced by one that saves" in plan.explain()
    everything, tried = plan.profile.saved_bytes, kept_bytes(plan)
    [_, corrected] = rounds(plan, 1.05)
    assert tried < corrected < everything
    assert "restored" not in plan.explain() and "correction 1" in plan.explain()
    assert rounds(plan, 1.01) == [corrected, corrected]
    assert plan._judgement is not None and plan._judgement.measured is not None and not plan._judgement.too_slow


def test_so_many_plans_do_more_and_no_more() -> None:
    plan = judged_plan(slowdown=0.01, count=100)
    kept = [kept_bytes(plan)]
    while plan._judgement is not None and plan._judgement.unjudged:
        assert judged_after(plan, *[1.00001] * CHECKED)
        kept.append(kept_bytes(plan))
    assert len(set(kept)) == LOOSENED + 1 and kept == sorted(kept, reverse=True)


def test_a_plan_that_was_corrected_does_not_do_more_again() -> None:
    plan = judged_plan(slowdown=0.1)
    rounds(plan, 1.5)
    assert plan._loop._corrections == 1
    before = plan.table
    if plan._judgement is not None and plan._judgement.unjudged:
        judged_after(plan, 1.0)
    assert plan.table is before


def test_a_first_plan_that_keeps_everything_is_no_last_word() -> None:
    """Noise made the prices far too high: the real ones are tried, and everything is kept if necessary."""
    for slower, expected in ((1.001, False), (1.5, True)):
        plan = judged_plan(slowdown=0.03)
        assert plan._judgement is not None and "an earlier plan, replaced by one" in plan.explain()
        assert not plan._judgement.keeps
        rounds(plan, slower)
        assert plan._judgement.keeps is expected
        assert ("everything stays, so blocks run without hooks" in plan.explain()) is expected


def test_one_lucky_pass_hides_no_miss() -> None:
    for lucky in (1.05, 1.09):
        plan = judged_plan(slowdown=0.1)
        judgement = plan._judgement
        assert judgement is not None
        assert judged_after(plan, lucky, *[1.14] * 4) == CHECKED and judgement.too_slow


def looked_again(plan: AutoPlan, slower: float) -> bool:
    """Let one later verdict come from passes whose blocks with hooks take so much longer; return if more are wanted."""
    more = True
    for one in (99.0, *[slower] * ADDED):  # the first settles
        assert more
        more = plan.saw_span(span_of(plan, one, plain=(3, 5, 7, 9)))
    return more


def paused(plan: AutoPlan) -> int:
    assert plan._timer is not None
    return plan._timer.spans.paused


def test_a_kept_promise_is_judged_again_at_growing_distances() -> None:
    """And only towards less slowdown: a plan that then seems to have time to spare stays."""
    plan = judged_plan()
    plan._timer, plan._loop._loosened = stand_in(), LOOSENED
    judged_after(plan, *[1.06] * CHECKED)
    before = plan.table
    recorded = list[str]()
    plan._bus.subscribe(lambda kind, fields: recorded.append(kind))
    for number, steps in enumerate((8, 11, 11)):
        assert paused(plan) == FIRST_LOOK * 4**number and plan.judged
        assert not looked_again(plan, 1.0)
        assert plan.table is before and f"in {steps} steps" in plan.explain()
    assert recorded == ["verdict"] * 3


@pytest.mark.parametrize("looser", [False, True])
def test_a_promise_that_is_broken_later_is_corrected(looser: bool) -> None:
    """A plan that kept less than another makes way for it; any other is followed by one that keeps more."""
    plan = judged_plan(slowdown=0.05)
    plan._timer = stand_in()
    kept = [kept_bytes(plan)]
    if looser:
        kept += rounds(plan, 1.001)[1:]
        assert kept[1] < kept[0]
    assert plan._judgement is not None
    plan._loop._loosened = LOOSENED
    judged_after(plan, *[1.02] * CHECKED)
    judged = plan.table
    looked_again(plan, 1.5)
    assert plan.table is judged, "three passes of eight may be noise"
    looked_again(plan, 1.5)
    assert kept_bytes(plan) == kept[0] if looser else kept_bytes(plan) > kept[0]
    assert ("the one before it is restored" in plan.explain()) is looser
    assert paused(plan) == (FIRST_LOOK if looser else 0)  # the one is judged already, the other is judged now


def test_with_a_budget_no_plan_does_more() -> None:
    plan = planned(Auto(memory_budget=1_500 * MB), peak=1_300 * MB)
    before = plan.table
    assert not carry_out(plan, *[13.0] * CHECKED, peak=1_300 * MB)
    assert plan.table is before


def test_what_the_device_has_bounds_a_plan_for_max_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """All would be kept, if there were room for it."""
    devices = [10**12]
    for budget in (False, True):
        monkeypatch.setattr("ebbtide.profiling.closed_loop.allocatable_bytes", lambda tier: devices[-1])
        plan = planned(Auto(max_slowdown=0.1), peak=1_300 * MB)
        assert plan.table is not None
        peak = plan.table.predicted.peak_bytes
        assert peak * (1 + RESERVE) <= devices[-1]
        assert ("promised a peak of at most" in plan.explain()) is budget
        assert ("does not fit the device" in plan.explain()) is budget
        devices.append(int((1 + FRAGMENTS) * 1.01 * peak))


def test_a_plan_offloads_no_more_than_host_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.profiling.closed_loop.store_bytes", lambda tier: 250 * MB)
    plan = planned(Auto(max_slowdown=1.0))
    assert plan.table is not None and plan.table.predicted.moved_bytes == 200 * MB
    assert plan.table.predicted.kept_bytes == 200 * MB


def test_a_plan_spills_only_where_no_other_fits_the_budget() -> None:
    """The disk behind host memory is slower by an unknown factor."""
    profile = replace(alike(4, (make_unit("a", 100 * MB),), RATES, window_bytes=MB), store_bytes=200 * MB)
    for budget, spills in ((350 * MB, False), (250 * MB, True)):
        found = fit_with_reserve(profile, budget).predicted
        assert found.peak_bytes <= budget and (found.moved_bytes > 200 * MB) is spills


def test_a_budget_above_what_the_device_has_is_that_of_the_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget within it is the user's own, and uses the share for fragments."""
    most = planned(Auto(memory_budget="1TiB"), peak=1_300 * MB)
    assert most.table is not None and most._judgement is not None and most._judgement.keeps
    device = int((1 - FRAGMENTS) * (1 + FRAGMENTS) * most.table.predicted.peak_bytes)
    monkeypatch.setattr("ebbtide.profiling.closed_loop.allocatable_bytes", lambda tier: device)
    for given, limit in (("1TiB", int(device / (1 + FRAGMENTS))), (device, device)):
        caplog.clear()
        with caplog.at_level("INFO", logger="ebbtide"):
            plan = planned(Auto(memory_budget=given), peak=1_300 * MB)
        assert plan._judgement is not None and plan._judgement.budget_bytes == limit
        assert plan._judgement.solution.predicted.peak_bytes <= limit
        assert ("memory_budget is '1TiB', so the device's memory" in caplog.text) is (given == "1TiB")
        found = solution_for(Auto(memory_budget=given), plan._judgement.solution.profile, device)
        assert found.predicted.peak_bytes <= limit


def test_without_a_device_a_plan_keeps_no_more_than_is_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would be kept, if there were room for it."""
    slow = tier()
    slow.counters = replace(slow.counters, out_seconds=1000.0, in_seconds=1000.0)
    for room, few in ((10**12, False), (500 * MB, True), (MB, True)):
        monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier, room=room: room)
        plan = AutoPlan(Auto(max_slowdown=0.0), slow, None, Bus())
        for _ in range(3):
            plan.saw_step(step())
        assert plan.table is not None and (plan.table.predicted.kept_bytes < 800 * MB) is few
        assert plan.table.predicted.kept_bytes <= room
        assert ("the plan for max_slowdown does not fit the free memory" in plan.explain()) is few
        assert ("no plan fits" in caplog.text) is (room == MB)


def test_while_it_is_judged_some_blocks_run_without_hooks_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, expected in ((10**12, 3), (None, 0)):
        monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier, room=room: room)
        plan = AutoPlan(Auto(max_slowdown=1.0), tier(), None, Bus())
        plan._timer = timer = stand_in()
        for _ in range(3):
            plan.saw_step(many(12))
        assert plan._judgement is not None
        kept = kept_blocks(plan._judgement.solution)
        assert timer.unhooked == kept
        assert len(timer.yardsticks - kept) == (expected if len(kept) < expected else 0)


def test_with_a_budget_no_block_runs_without_hooks_but_those_that_are_kept() -> None:
    plan = AutoPlan(Auto(memory_budget=2_000 * MB), tier(), None, Bus())
    plan._timer = timer = stand_in()
    for _ in range(3):
        plan.saw_step(replace(many(12), head_peak_bytes=1_300 * MB))
    assert plan._judgement is not None and timer.unhooked == kept_blocks(plan._judgement.solution)


# Budgets


def test_a_part_of_the_budget_is_left_free() -> None:
    """Small storages whose copies nothing hides, so that the peak comes close to the limit."""
    slow = Rates(out_bytes_per_second=MB, in_bytes_per_second=MB)
    profile = alike(40, tuple(make_unit(f"a{i}", MB) for i in range(25)), slow, window_bytes=MB)
    found = fit_with_reserve(profile, 618 * MB)
    assert 590 * MB < found.predicted.peak_bytes <= 600 * MB


def test_where_the_reserve_cannot_be_had_the_plan_takes_the_least_memory() -> None:
    profile = alike(4, tuple(make_unit(f"a{i}", MB) for i in range(5)), RATES, window_bytes=MB)
    least = Search(profile).smallest.predicted.peak_bytes
    assert fit_with_reserve(profile, least).predicted.peak_bytes == least
    with pytest.raises(BudgetError, match="memory_budget is"):
        fit_with_reserve(profile, least - 1)


def test_a_peak_above_the_budget_is_corrected_by_as_much() -> None:
    budget = 1_500 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    assert plan.table is not None
    before = plan.table.predicted.peak_bytes
    assert carry_out(plan, 13.0, peak=budget + 100 * MB), "one step is enough"
    assert plan.table.predicted.peak_bytes <= before - 90 * MB
    assert not carry_out(plan, *[13.0] * CHECKED, peak=int((1 - SPARE) * budget))


def test_a_plan_whose_heap_would_be_returned_in_each_step_is_replaced() -> None:
    """Its steps are slower by that, too, so no price changes."""
    budget = 1_500 * MB
    limit = int((1 - SPARE) * budget)
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    judgement = plan._judgement
    assert judgement is not None
    assert carry_out(plan, *[99.0] * CHECKED, peak=limit + 10 * MB)
    assert judgement.over_budget_bytes == plan._exceeded == 0, "the budget itself is kept"
    assert "correction 1: the plan before left too little of its budget free" in plan.explain()
    found = plan._judgement
    assert found is not None and found.solution.profile == judgement.solution.profile
    assert found.solution.predicted.peak_bytes <= judgement.solution.predicted.peak_bytes - 10 * MB
    assert not carry_out(plan, *[13.0] * CHECKED, peak=limit)


def test_where_no_plan_leaves_enough_free_the_latest_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    """The budget is kept, and its steps are those that were predicted: there is nothing to warn of."""
    budget = 1_900 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    while carry_out(plan, *[13.0] * CHECKED, peak=budget - MB):
        pass
    assert "correction 4" in plan.explain() and "is known" not in plan.explain() + caplog.text


def test_within_a_budget_no_slower_plan_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is no exact one: under other prices it may find less than it had found before."""
    budget = 1_500 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    before = plan.table
    smallest = "ebbtide.profiling.closed_loop.fit_with_reserve"
    monkeypatch.setattr(smallest, lambda profile, budget, reserve: Search(profile).smallest)
    carry_out(plan, *[20.0] * CHECKED, peak=1_300 * MB)
    assert before is not None and plan.table is not None and plan.table.actions == before.actions
    assert "no faster plan is known that fits" in plan.explain()


def test_within_a_budget_a_plan_that_stays_is_predicted_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees a prediction that steps have refuted as the latest word, and later steps judge the new one, too."""
    budget = 1_500 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    before, judgement = plan.table, plan._judgement
    assert before is not None and judgement is not None
    predicted = judgement.solution.predicted.step_seconds
    search = "ebbtide.profiling.closed_loop.fit_with_reserve"
    same = judgement.solution.assignment
    monkeypatch.setattr(search, lambda profile, budget, reserve: Search(profile).simulated(same))
    slower = predicted * 1.2
    assert carry_out(plan, *[slower] * CHECKED, peak=1_300 * MB), "it is judged again"
    assert "the plan stays, and its prediction is corrected" in plan.explain()
    while not plan.judged:
        carry_out(plan, *[slower] * CHECKED, peak=1_300 * MB)
    assert plan.table is not None and plan.table.actions == before.actions
    measured, found = slower + judgement.solution.profile.epilogue_seconds, plan._judgement
    assert found is not None and found.solution.predicted.step_seconds == pytest.approx(measured, rel=0.01)
    assert "correction 3" not in plan.explain()


def test_within_a_budget_prices_that_rose_in_a_slow_moment_fall_again() -> None:
    """Else one disturbance makes every later plan of the handle seem dear, and its prediction wrong for good."""
    plan = planned(Auto(memory_budget=1_500 * MB), peak=1_300 * MB)
    judgement = plan._judgement
    assert judgement is not None
    epilogue = judgement.solution.profile.epilogue_seconds
    plain = judgement.solution.profile.step_seconds
    assert carry_out(plan, *[plain * 1.5 - epilogue] * CHECKED, peak=1_300 * MB), "the machine is slow"
    found = plan._judgement
    assert found is not None and found.solution.predicted.step_seconds > plain * 1.3
    normal = plain * 1.1
    while not plan.judged:
        carry_out(plan, *[normal - epilogue] * CHECKED, peak=1_300 * MB)
    found = plan._judgement
    assert found is not None and not found.too_slow
    assert found.solution.predicted.step_seconds == pytest.approx(normal, rel=0.05)
    assert "took less time than predicted, so prices fall" in plan.explain()


def test_a_plan_that_exceeded_a_budget_does_not_return_with_other_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would exceed it again, and perhaps no correction is left then."""
    budget, searched = 1_500 * MB, list[int]()

    def fits(profile: Profile, budget: int, reserve: float) -> Solution:
        searched.append(budget)
        return fit_with_reserve(profile, budget, reserve)

    monkeypatch.setattr("ebbtide.profiling.closed_loop.fit_with_reserve", fits)
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    assert plan._judgement is not None
    assert carry_out(plan, plan._judgement.solution.profile.step_seconds, peak=budget + 10 * MB)
    predicted = plan._judgement.solution.predicted.step_seconds
    assert carry_out(plan, *[predicted * 1.5] * CHECKED, peak=1_300 * MB), "slow"
    assert carry_out(plan, *[predicted * 0.9] * CHECKED, peak=1_300 * MB), "fast"
    assert plan._judgement is not None and plan._judgement.budget_bytes == budget
    first, *later = searched
    assert first == budget and len(later) == 3 and max(later) < budget - 10 * MB


def test_a_budget_of_device_memory_is_used_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.profiling.closed_loop.allocatable_bytes", lambda tier: 10**12)
    budget = 1_500 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    assert not carry_out(plan, *[13.0] * CHECKED, peak=budget)


def test_a_plan_that_keeps_everything_is_held_to_a_budget() -> None:
    budget = 10_000 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    assert plan._judgement is not None and plan._judgement.keeps and "not measured yet" in plan.explain()
    slow = [99.0] * CHECKED
    assert not carry_out(plan, *slow, peak=int((1 - SPARE) * budget))
    assert plan._judgement.keeps and "it fits" in plan.explain(), "its time is that of ordinary training"
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    assert carry_out(plan, 13.0, peak=budget + 8_500 * MB)
    assert plan._judgement is not None and not plan._judgement.keeps and "it fits" not in plan.explain()


def test_what_is_freed_is_returned_more_readily_as_plans_exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr("ebbtide.profiling.auto.resident_bytes", lambda: 0)
    disk = DiskTier()
    monkeypatch.setattr(disk, "return_freed_memory", lambda when, *, at_once: asked.append((when(), at_once)))
    budget = 1_900 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    plan._tier = disk
    carry_out(plan, *[13.0] * CHECKED, peak=int((1 - SPARE) * budget))
    assert asked == [], "it fits"
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    plan._tier = disk
    while carry_out(plan, 13.0, peak=budget + 10 * MB):
        pass
    assert asked == [*[(False, False)] * (IN_PIECES - 1), *[(True, False)] * (len(asked) - IN_PIECES), (True, True)]
    disk.close()


def test_the_heap_is_trimmed_after_measured_steps_and_near_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    resident = [1_460 * MB]
    monkeypatch.setattr("ebbtide.store.disk.trim_heap", lambda: trimmed.append(1))
    monkeypatch.setattr("ebbtide.profiling.auto.resident_bytes", lambda: resident[0])

    def trims() -> bool:
        disk.return_freed_memory(plan._returns_freed_memory)
        trimmed.clear()
        disk.trim()
        return bool(trimmed)

    with contextlib.closing(DiskTier()) as disk:
        plan = planned(Auto(memory_budget=1_500 * MB), peak=1_300 * MB)
        assert not trims()
        resident[0] = 1_480 * MB
        assert trims(), "less than 2 % remains"
        resident[0] = 1_300 * MB
        plan._timer = cast("Any", SimpleNamespace(wanted=True, measuring=False))
        assert trims(), "steps are measured from the next one on"
        plan._timer = cast("Any", SimpleNamespace(wanted=True, measuring=True))
        assert not trims(), "the first measured step ends: the next one shows ordinary training, which keeps its heap"
        plan._steps.append(step())
        assert trims(), "the second one ends"
        plan._steps.clear()
        plan._warm = False
        assert trims(), "the warm-up ends"


@pytest.mark.parametrize("budget", [None, 1_500 * MB])
def test_a_budget_of_resident_memory_takes_nothing_for_noise(budget: int | None) -> None:
    """Its second measured step, which keeps the heap, is faster on any machine."""
    plan = AutoPlan(Auto() if budget is None else Auto(memory_budget=budget), tier(), None, Bus())
    faster = step(forward=0.8, backward=2.0, peak=1_300 * MB)
    for found in (step(), step(peak=1_300 * MB), faster):
        plan.saw_step(found)
    assert plan._judgement is not None
    assert plan._judgement._noise == (pytest.approx(0.25) if budget is None else LEAST_NOISE)


def test_a_budget_that_is_exceeded_to_the_end_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    budget = 1_900 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    while carry_out(plan, 13.0, peak=budget + 10 * MB):
        assert "no plan is known that would keep it" not in caplog.text
    assert "no plan is known that would keep it" in caplog.text and "no plan is known" in plan.explain()


@pytest.mark.parametrize("over", [0, MB])
def test_a_peak_outside_forward_and_backward_is_warned_of(over: int, caplog: pytest.LogCaptureFixture) -> None:
    budget = 1_900 * MB
    plan = planned(Auto(memory_budget=budget), peak=1_300 * MB)
    plan._timer = timer = stand_in()
    timer.spans.between_peak_bytes = budget + over
    assert not carry_out(plan, *[13.0] * CHECKED, peak=int((1 - SPARE) * budget))
    assert ("no plan lowers that" in plan.explain()) == ("no plan lowers that" in caplog.text) == bool(over)


def test_what_a_budget_costs_the_kernel_is_shown() -> None:
    plan = planned(Auto(memory_budget=1_500 * MB), peak=1_300 * MB)
    assert "core seconds" not in plan.explain()
    carry_out(plan, *[13.0] * CHECKED, peak=1_300 * MB, system=0.31)
    assert "0.31 core seconds of a step are the kernel's" in plan.explain()


@pytest.mark.parametrize("budget", ["1MB", 1_500 * MB, 10_000 * MB])
def test_under_a_budget_the_prediction_includes_hooks(budget: str | int) -> None:
    """Otherwise hook time is charged to copies and recomputes, and the next plan is made with wrong prices."""
    plan = AutoPlan(Auto(memory_budget=budget), tier(), None, Bus())
    free = profile_of(step(peak=1_300 * MB), RATES, None)
    profile = replace(free, blocks=tuple(replace(block, hook_seconds=0.125) for block in free.blocks))
    judgement = plan._loop.first(profile, 0.0)
    hooked = 4 - len(kept_blocks(judgement.solution))
    recomputed = sum(Action.RECOMPUTE in actions for actions in judgement.solution.assignment)
    without = simulate(free, judgement.solution.assignment).step_seconds
    hooks = 0.125 * (hooked + (RECOMPUTE_HOOKS - 1) * recomputed)
    assert judgement.solution.predicted.step_seconds == pytest.approx(without + hooks)
    assert judgement.allowed_seconds == judgement.solution.predicted.step_seconds
    assert (hooked == 0) is (budget == 10_000 * MB)


def test_reserved_memory_is_shown_next_to_allocated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.profiling.auto.reserved_bytes", lambda tier: 3 * 1024**3)
    plan = planned(Auto(memory_budget=1_500 * MB), peak=1_300 * MB)
    carry_out(plan, *[13.0] * CHECKED, peak=1024**3)
    assert "peak 1.0 GiB allocated, 3.0 GiB reserved" in plan.explain()


def test_a_budget_that_nothing_fits_goes_on_with_the_least_memory_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = AutoPlan(Auto(memory_budget="1MB"), tier(), 100 * MB, Bus())
    for _ in range(3):
        plan.saw_step(step(peak=1_300 * MB))
    assert plan.table is not None and plan.table.predicted.kept_bytes == 0
    carry_out(plan, 13.0, peak=1_300 * MB)
    (record,) = [r for r in caplog.records if r.levelname == "WARNING" and "no plan fits" in r.getMessage()]
    assert "memory_budget is" in record.getMessage() and "smallest peak" in record.getMessage()
