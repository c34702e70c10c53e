"""From measured steps to a plan: subtraction, calibration, and the time of the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.base.actions import Action, Plan, Site
from ebbtide.base.errors import BudgetError, ConfigError
from ebbtide.base.events import Bus
from ebbtide.config import Auto, Keep, Minimal
from ebbtide.engine.timed import TimedBlock, TimedStep, TimedUnit
from ebbtide.planner.policies import plan_for
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.simulate import simulate
from ebbtide.planner.table import load_plan
from ebbtide.profiling.auto import AutoPlan
from ebbtide.profiling.minimal import MinimalPlan
from ebbtide.profiling.solutions import solution_for
from ebbtide.profiling.step_profile import measured_rates, profile_of
from ebbtide.store.counters import TierCounters
from ebbtide.store.host import HostTier
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.profiles import candidate
from tests.helpers.slots import small_disk
from tests.unit.planner.test_table import plan as table

MB = 10**6
RATES = Rates(out_bytes_per_second=100 * MB, in_bytes_per_second=100 * MB)


def unit(name: str, nbytes: int, action: Action, recompute: float | None = None) -> TimedUnit:
    site = Site("Layer", name, "Node", 0)
    return TimedUnit(
        site=site, nbytes=nbytes, block_input=False, movable=True, action=action, recompute_seconds=recompute
    )  # fmt: skip


def step(
    *, blocks: int = 4, scale: float = 1.0, nbytes: int = 100 * MB, peak: int | None = None, slower: float = 1.0
) -> TimedStep:
    """Return a measured step of blocks that recomputed half of their saved tensors and offloaded the other half."""
    units = (unit("light", nbytes, Action.RECOMPUTE, 0.25), unit("dear", nbytes, Action.OFFLOAD, 30.0))
    return TimedStep(
        blocks=tuple(
            TimedBlock(
                name=f"layers.{i}", kind="Layer", units=units, forward_seconds=1.0 * scale * slower,
                backward_seconds=2.25 * scale * slower, forward_peak_bytes=peak, backward_peak_bytes=peak,
            )
            for i in range(blocks)
        ),
        head_seconds=0.5, epilogue_seconds=0.25, head_peak_bytes=peak,
    )  # fmt: skip


def tier(out_bytes: int = 100 * MB) -> Any:
    counters = TierCounters(timed_out_bytes=out_bytes, out_seconds=1.0, timed_in_bytes=out_bytes, in_seconds=1.0)
    return SimpleNamespace(name="disk", counters=counters)


def ask(plan: AutoPlan, module: str, *, flops: float | None = 0.0) -> Action:
    return plan.choose(candidate(module, nbytes=100 * MB, flops=flops))


@pytest.mark.parametrize("kind", ["host memory", "disk"])
def test_a_store_without_room_for_a_probe_has_some_rate(kind: str, tmp_path: Path) -> None:
    """Its tensors stay, and training goes on."""
    if kind == "disk":
        store: Any = small_disk(tmp_path, 1 << 20)
    else:
        store = HostTier(FakeDevice(1e12, 1e12), budget_bytes=1 << 20)
    rates = measured_rates(store)
    assert rates.out_bytes_per_second > 0 and rates.in_bytes_per_second > 0
    store.close()


def test_recomputes_that_the_step_did_are_taken_out_of_its_backward() -> None:
    profile = profile_of(step(), RATES, None)
    assert [block.backward_seconds for block in profile.blocks] == [2.0] * 4
    assert profile.step_seconds == pytest.approx(4 * 3.0 + 0.75)


def test_base_memory_is_the_measured_peak_less_what_the_schedule_holds() -> None:
    measured = step(peak=10**9)
    profile = profile_of(measured, RATES, None)
    again = simulate(profile, [[unit.action for unit in block.units] for block in measured.blocks])
    assert again.peak_bytes == 10**9
    assert profile.head_base_bytes + again.levels_bytes[4] == 10**9


def test_without_measured_memory_nothing_is_made_up() -> None:
    profile = profile_of(step(), RATES, None)
    assert profile.head_base_bytes == 0
    assert all(block.forward_base_bytes == block.backward_base_bytes == 0 for block in profile.blocks)


def test_the_first_step_warms_up_two_are_measured_and_the_faster_counts() -> None:
    plan = AutoPlan(Auto(), tier(), None, Bus())
    assert ask(plan, "dear") is Action.RECOMPUTE  # the heuristic: free to recompute, according to FLOP
    assert plan.saw_step(step(scale=9.0))
    assert plan.saw_step(step())
    assert plan.saw_step(step(slower=3.0)) is False
    assert plan.profile is not None and plan.table is not None
    assert plan.profile.blocks[0].forward_seconds == 1.0
    assert ask(plan, "light") is Action.RECOMPUTE
    assert ask(plan, "dear") in {Action.OFFLOAD, Action.KEEP}
    assert plan.table.predicted.overhead_percent <= 5.0 + 1e-6


def test_an_evaluation_behind_the_longest_step_is_no_part_of_ordinary_training() -> None:
    """It is known from any other step, however much that saved."""
    plan = AutoPlan(Auto(), tier(), None, Bus())
    for found in (step(), replace(step(), epilogue_seconds=60.0), step(nbytes=90 * MB)):
        plan.saw_step(found)
    assert plan.profile is not None and plan.profile.blocks[0].saved_bytes == 2 * 100 * MB
    assert plan.profile.epilogue_seconds == 0.25


def test_gradients_of_earlier_micro_batches_are_in_the_base() -> None:
    """The step with hooks on all blocks may be one that begins without them."""

    def made(in_use_bytes: int) -> Profile:
        plan = AutoPlan(Auto(), tier(), None, Bus())
        first = replace(step(peak=2000 * MB), in_use_bytes=1000 * MB)
        plain = replace(first.blocks[0], units=(), plain=True)
        second = replace(first, blocks=(plain, *first.blocks[1:]), in_use_bytes=in_use_bytes)
        for found in (first, first, second):
            plan.saw_step(found)
        assert plan.profile is not None
        return plan.profile

    equal, fuller = made(1000 * MB), made(1500 * MB)
    pairs = list(zip(fuller.blocks, equal.blocks, strict=True))
    assert fuller.head_base_bytes - equal.head_base_bytes == 500 * MB
    assert [one.forward_base_bytes - other.forward_base_bytes for one, other in pairs] == [500 * MB] * 4
    # Its own gradients were made block by block, from the last one to the first.
    more = [one.backward_base_bytes - other.backward_base_bytes for one, other in pairs]
    assert more == [125 * MB, 250 * MB, 375 * MB, 500 * MB]


def test_larger_steps_are_measured_under_the_heuristic() -> None:
    plan = AutoPlan(Auto(max_slowdown=0.0), tier(), None, Bus())
    heuristic = ask(plan, "dear")
    for _ in range(3):
        plan.saw_step(step())
    assert ask(plan, "dear") is Action.KEEP is not heuristic
    timer: Any = SimpleNamespace(wanted=True)  # inputs grew
    plan._timer = timer
    # The table moves nothing, which would leave copies without a price in the next profile.
    assert ask(plan, "dear") is heuristic
    timer.wanted = False
    assert ask(plan, "dear") is Action.KEEP


def test_blocks_that_show_the_cost_of_hooks_build_no_recipes() -> None:
    plan = AutoPlan(Auto(), tier(), None, Bus())
    light = candidate("light")
    assert plan.needs_recipe(light) and plan.recomputes_in("layers.1")
    plan._kept_under_hooks = frozenset({"layers.1"})
    assert not plan.needs_recipe(light) and plan.choose(light) is Action.KEEP
    assert not plan.recomputes_in("layers.1") and plan.recomputes_in("layers.2")


def test_steps_that_differ_are_not_mixed() -> None:
    plan = AutoPlan(Auto(), tier(), None, Bus())
    plan.saw_step(step())
    assert plan.saw_step(step(blocks=3))
    assert plan.saw_step(step(blocks=4))
    assert plan.saw_step(step(blocks=4)) is False
    assert plan.profile is not None and len(plan.profile.blocks) == 4


def test_a_budget_is_fitted_with_base_memory() -> None:
    plan = AutoPlan(Auto(memory_budget=1_500 * MB), tier(), 100 * MB, Bus())
    for _ in range(3):
        plan.saw_step(step(peak=1_300 * MB))
    assert plan.table is not None
    assert plan.table.predicted.peak_bytes <= 1_500 * MB
    assert plan.table.predicted.kept_bytes > 0


def test_before_training_a_budget_that_nothing_fits_is_an_error_that_says_what_would() -> None:
    profile = profile_of(step(peak=1_300 * MB), RATES, 100 * MB)
    with pytest.raises(BudgetError, match=r"memory_budget is .*smallest peak"):
        solution_for(Auto(memory_budget="1MB"), profile)


@pytest.mark.parametrize(
    ("plan", "shown"),
    [
        (plan_for(Keep()), "PolicyPlan: keep"),
        (MinimalPlan(Minimal(), tier(), None, Bus()), "MinimalPlan: minimal"),
        (AutoPlan(Auto(), tier(), None, Bus()), "AutoPlan: auto"),
        (table(), "TablePlan: auto"),
    ],
)
def test_each_plan_is_shown_in_one_line_and_printed_with_its_reasons(plan: Plan, shown: str) -> None:
    assert repr(plan) == f"<{shown}; explain() shows more>"
    assert str(plan) == plan.explain()


def test_it_says_what_it_does_before_and_after(tmp_path: Path) -> None:
    told: list[str] = []
    bus = Bus()
    bus.subscribe(lambda kind, fields: told.append(f"{kind}: {fields['text']}"))
    plan = AutoPlan(Auto(max_slowdown=0.1), tier(), None, bus)
    assert str(plan) == plan.explain()
    assert "3 steps" in plan.explain() and "max_slowdown=0.1" in plan.explain()
    with pytest.raises(ConfigError, match="not made yet"):
        plan.save(tmp_path / "plan.json")
    for _ in range(3):
        plan.saw_step(step())
    assert str(plan) == plan.explain() and plan.table is not None and str(plan.table) == plan.table.explain()
    assert "predicted" in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan.table
    assert told == [f"plan: {plan.explain()}"]
