"""``Auto`` on real models: steps are measured, a plan is made and carried out, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.events import BUS
from ebbtide.engine import Block, Engine
from ebbtide.engine.build import Builder
from ebbtide.engine.run import BlockRun
from ebbtide.planner.table import TablePlan, load_plan
from ebbtide.profiling.auto import AutoPlan
from tests.helpers.engines import assert_nothing_left, drain
from tests.helpers.handles import Unlimited
from tests.helpers.models import build
from tests.helpers.oracle import differences

STEPS = 5
"""One warms up, two are measured, the plan is made at the start of the fourth."""


def enabled(model: torch.nn.Module, policy: ebbtide.Auto, **options: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, **options)


def table_of(handle: ebbtide.Handle) -> TablePlan:
    assert isinstance(handle.plan, AutoPlan)
    assert handle.plan.table is not None, "no plan was made"
    return handle.plan.table


@pytest.mark.parametrize("family", ["llama", "gpt2", "mlp", "t5"])
@pytest.mark.parametrize("slowdown", [0.0, 10.0])
def test_every_step_is_bitwise_that_of_plain_training(family: str, slowdown: float) -> None:
    tiny = build(family)
    plain = tiny.step()
    with enabled(tiny.model, Unlimited(max_slowdown=slowdown), verify=True) as handle:
        for _ in range(STEPS):
            assert not differences(plain, tiny.step())
        table = table_of(handle)
        drain()
        assert_nothing_left(handle._engine)
        assert not handle._engine.kept.total
    assert table.predicted.overhead_percent <= 100 * slowdown + 1e-6


def test_the_plan_is_made_once_and_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ebbtide.wrap.checkpointable.has_collectives", lambda module: True
    )  # so no block is checkpointed
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)  # every block carries the plan out at once
    tiny = build("llama")
    with enabled(tiny.model, Unlimited(max_slowdown=10.0)) as handle:
        for _ in range(3):
            tiny.step()
        assert isinstance(handle.plan, AutoPlan) and handle.plan.table is None
        under_heuristic = handle.stats()
        tiny.step()
        table, stats = table_of(handle), handle.stats()
        assert under_heuristic.unique_bytes == stats.unique_bytes
        # Wide tensors that were cast up are offloaded in the narrow type, which the table does not know.
        assert stats.kept_bytes == table.predicted.kept_bytes
        assert stats.unique_bytes == (
            table.predicted.kept_bytes + table.predicted.offloaded_bytes + table.predicted.recomputed_bytes
        )
        tiny.step()
        assert table_of(handle) is table


def test_every_storage_of_a_block_has_an_action_and_a_measured_price() -> None:
    tiny = build("llama")
    with enabled(tiny.model, Unlimited(max_slowdown=10.0)) as handle:
        for _ in range(4):
            tiny.step()
        profile = handle.plan.profile
        blocks = {block.name for block in profile.blocks}
        assert blocks == {f"model.layers.{i}" for i in range(len(tiny.block_list()))}
        prices = [unit.recompute_seconds for _, _, unit in profile.units()]
        assert any(price is not None and price > 0 for price in prices)
        assert profile.forward_seconds > 0 and profile.backward_seconds > 0
        assert set(table_of(handle).actions) == {
            (profile.blocks[place].name, unit.site) for place, _, unit in profile.units()
        }


def test_graphs_that_overlap_or_are_dropped_are_measured_right_or_not_at_all() -> None:
    tiny = build("llama")
    plain = tiny.step()
    with enabled(tiny.model, Unlimited(max_slowdown=10.0)) as handle:
        for _ in range(2):
            one, two = tiny.loss()[0], tiny.loss()[0]  # two forwards before their backwards
            two.backward()
            one.backward()
            tiny.loss()  # dropped
            with torch.no_grad():
                tiny.loss()
        tiny.model.zero_grad()
        for _ in range(4):
            assert not differences(plain, tiny.step())
        count = len(tiny.block_list())
        profile = handle.plan.profile
        assert len(profile.blocks) == count
        drain()
        assert not handle._engine.kept.total


@pytest.mark.parametrize("dropped", [1, 2])
def test_a_plan_is_made_where_graphs_are_dropped_in_between(dropped: int) -> None:
    tiny = build("mlp")
    with enabled(tiny.model, Unlimited(max_slowdown=10.0)) as handle:
        for _ in range(3 * STEPS):
            for _ in range(dropped):  # like a critic, which detaches the generator's output
                tiny.loss()
            tiny.loss()[0].backward()
        assert table_of(handle).predicted.step_seconds > 0


class Branches(torch.nn.Module):
    """Two towers, of which a step runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(
            torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32)) for _ in range(3)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        for block in self.towers[branch]:  # type: ignore[attr-defined]
            x = block(x)
        return x


def test_a_plan_is_made_where_steps_run_other_blocks_in_turn() -> None:
    model, x = Branches(), torch.randn(16, 32)
    with enabled(model, Unlimited(max_slowdown=10.0), blocks=["towers.*.*"]) as handle:
        for number in range(24):
            model(x, number % 2).sum().backward()
        assert {name.split(".")[1] for name, _ in table_of(handle).actions} == {"0", "1"}


CLEARS = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the process's peak cannot be measured")


def plans_made(act: Callable[[int], object], steps: int) -> list[int]:
    """Return the steps at which plans were made, of a loop whose ``act`` is a step."""
    at, made = [0], list[int]()
    remove = BUS.subscribe(lambda kind, fields: made.append(at[0]) if kind == "plan" else None)
    try:
        for at[0] in range(steps):
            act(at[0])
    finally:
        remove()
    return made


@pytest.mark.parametrize("warms_up", [False, True])
def test_a_long_batch_in_four_is_planned_for(warms_up: bool) -> None:
    tiny = build("llama")
    small = {name: value[:1] for name, value in tiny.inputs.items()}
    with enabled(tiny.model, ebbtide.Auto(max_slowdown=0.0)) as handle:
        for number in range(20):
            given = tiny.inputs if number % 4 == 0 and (warms_up or number) else small
            tiny.loss(lambda **inputs: tiny.model(**given))[0].backward()  # noqa: B023
        tiny.loss()[0].backward()
        stats = handle.stats()
        assert stats.kept_bytes == stats.unique_bytes


@CLEARS
def test_where_memory_counts_plans_settle_though_long_batches_are_rare() -> None:
    tiny = build("llama")
    small = {name: value[:1] for name, value in tiny.inputs.items()}
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1TiB")) as handle:

        def act(number: int) -> None:
            given = tiny.inputs if number % 14 == 5 else small  # no second one among those that are measured
            tiny.loss(lambda **inputs: tiny.model(**given))[0].backward()

        made = plans_made(act, 62)
        assert isinstance(handle.plan, AutoPlan)
        assert len(made) == 4 and 33 < max(made) < 47, "after three tries it is left"


@CLEARS
def test_where_memory_counts_steps_are_measured_again_once_the_optimizer_has_its_state() -> None:
    tiny = build("llama")
    optimizer = torch.optim.AdamW(tiny.model.parameters())
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1TiB")):

        def act(number: int) -> None:
            tiny.loss()[0].backward()
            if number % 12 == 11:
                optimizer.step()
                optimizer.zero_grad()

        made = plans_made(act, 40)
    assert min(made) < 12
    assert [number for number in made if number >= 12][:1] == [15], "one pass after it, two are measured"
    assert max(made) < 24, "and never after that"


@CLEARS
def test_where_memory_counts_the_state_of_each_optimizer_is_measured() -> None:
    """Another model's optimizer that steps each time is not mistaken for the model's own, which steps late."""
    tiny, other = build("llama"), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (tiny.model, other)]
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1TiB")):

        def act(number: int) -> None:
            tiny.loss()[0].backward()
            other(torch.ones(2)).sum().backward()
            for optimizer in optimizers[number % 12 != 11 :]:
                optimizer.step()
                optimizer.zero_grad()

        made = plans_made(act, 30)
    assert [number for number in made if number >= 12] == [15]


@CLEARS
def test_blocks_without_hooks_get_them_again_once_the_optimizer_has_its_state() -> None:
    tiny = build("llama")
    optimizer = torch.optim.AdamW(tiny.model.parameters())
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1TiB")) as handle:
        for _ in range(20):
            tiny.loss()[0].backward()
        assert isinstance(handle.plan, AutoPlan)
        assert handle.plan.judged and handle._attachment._rest._resting
        before = handle.plan.profile
        optimizer.step()
        for _ in range(4):
            tiny.loss()[0].backward()
        assert handle.plan.profile is not before


@CLEARS
def test_where_memory_counts_two_graphs_together_keep_no_more_than_the_plan() -> None:
    tiny = build("llama")
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1TiB")) as handle:
        for number in range(10):
            outputs = [tiny.model(**tiny.inputs) for _ in range(2)]
            if number > 6:
                assert handle._engine.kept.total <= table_of(handle).predicted.kept_bytes
                assert handle.stats().kept_bytes < handle.stats().unique_bytes
            torch.stack([output.logits.float().square().mean() for output in outputs]).sum().backward()


def test_a_larger_batch_is_measured_again() -> None:
    tiny = build("llama")
    small = {name: value[:1] for name, value in tiny.inputs.items()}
    with enabled(tiny.model, ebbtide.Auto(max_slowdown=0.0)) as handle:
        for _ in range(4):
            tiny.loss(lambda **inputs: tiny.model(**small))[0].backward()
        first = table_of(handle)
        for _ in range(5):
            tiny.step()
        second = table_of(handle)
        total = [p.kept_bytes + p.offloaded_bytes + p.recomputed_bytes for p in (first.predicted, second.predicted)]
        assert total[1] > 1.1 * total[0]


def test_without_room_for_more_a_larger_batch_is_offloaded() -> None:
    """Between a larger batch and its new plan, no more is kept than under the old plan."""
    tiny = build("llama")
    small = {name: value[:1] for name, value in tiny.inputs.items()}
    with enabled(tiny.model, ebbtide.Auto(max_slowdown=0.0), window=1) as handle:
        for _ in range(4):
            tiny.loss(lambda **inputs: tiny.model(**small))[0].backward()
        allowed = table_of(handle).predicted.kept_bytes
        tiny.step()
        assert handle.stats().kept_bytes <= allowed


@CLEARS
def test_a_budget_below_what_the_process_needs_is_warned_of_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny = build("llama")
    plain = tiny.step()
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1MiB")) as handle:
        for _ in range(STEPS):
            assert not differences(plain, tiny.step())
        drain()
        assert_nothing_left(handle._engine)
        assert handle.stats().kept_bytes < handle.stats().unique_bytes
    (text,) = [r.getMessage() for r in caplog.records if "no plan fits" in r.getMessage()]
    assert "memory_budget is 1.0 MiB" in text and "at least" in text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the process's peak cannot be measured")
def test_copies_that_only_measure_the_rates_are_no_part_of_the_figures() -> None:
    tiny, stalls = build("block"), list[dict[str, Any]]()
    remove = ebbtide.base.events.BUS.subscribe(lambda kind, fields: stalls.append(fields) if kind == "stall" else None)
    with enabled(tiny.model, ebbtide.Auto(), tensor_filter=lambda t: False) as handle:
        for _ in range(5):
            tiny.step()
        stats, counters = handle.stats(), handle._engine.tier.counters
    remove()
    assert counters.out_bytes > 0, "the rates were measured"
    assert (stats.total_copy_out_bytes, stats.total_copy_in_bytes, stats.total_stall_seconds) == (0, 0, 0.0)
    assert stalls == []


def test_a_budget_that_holds_everything_keeps_everything() -> None:
    tiny = build("llama")
    plain = tiny.step()
    with enabled(tiny.model, ebbtide.Auto(memory_budget="1TiB")) as handle:
        for _ in range(STEPS):
            assert not differences(plain, tiny.step())
        stats = handle.stats()
        assert stats.kept_bytes == stats.unique_bytes > 0
        assert set(table_of(handle).actions.values()) == {Action.KEEP}


@pytest.mark.parametrize(
    ("policy", "calls"), [("auto", 0), ("minimal", 0), ("offload", 0), (ebbtide.Auto(memory_budget="1TiB"), 1)]
)
def test_the_processs_heap_is_trimmed_for_a_budget_only(
    monkeypatch: pytest.MonkeyPatch, policy: Any, calls: int
) -> None:
    trimmed: list[bool] = []
    monkeypatch.setattr("ebbtide.store.disk.trim_heap", lambda: trimmed.append(True))
    tiny = build("mlp")
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, target="disk", min_bytes=0):
        assert len(trimmed) == calls
        tiny.step()
        assert len(trimmed) == 2 * calls, "once when it is enabled, once after the backward"


def test_a_plan_file_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)  # every block carries the plan out at once
    tiny = build("llama")
    plain = tiny.step()
    with enabled(tiny.model, Unlimited(max_slowdown=10.0)) as handle:
        for _ in range(4):
            tiny.step()
        handle.plan.save(tmp_path / "plan.json")
        stats = handle.stats()
    with ebbtide.enable_activation_offloading(
        tiny.model, policy=load_plan(tmp_path / "plan.json"), min_bytes=0
    ) as handle:
        for _ in range(4):
            assert not differences(plain, tiny.step())
        again = handle.stats()
    assert (again.kept_bytes, again.offloaded_bytes) == (stats.kept_bytes, stats.offloaded_bytes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 512}, "the plan is for"),
        ({"dtype": torch.bfloat16}, "have no row in the plan"),
        ({}, ""),
    ],
)
def test_a_plan_for_another_model_is_named(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, tiny = build("llama"), build("llama", **changes)
    plan = ebbtide.make_plan(made.model, made.inputs, machine="h200", min_bytes=0)
    with ebbtide.enable_activation_offloading(tiny.model, policy=plan, min_bytes=0):
        for _ in range(2):
            tiny.step()
    found = [r.getMessage() for r in caplog.records if "hint: make it again" in r.getMessage()]
    assert len(found) == bool(words) and all(words in line for line in found)


def test_a_plan_that_is_made_under_autocast_is_one_for_autocast(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        plan = ebbtide.make_plan(tiny.model, tiny.inputs, machine="h200", min_bytes=0)
        with ebbtide.enable_activation_offloading(tiny.model, policy=plan, min_bytes=0):
            tiny.step()
    assert "no row in the plan" not in caplog.text


def keeping(factor: float = 1.0) -> TablePlan:
    """Return a plan that keeps all that ``build("llama")`` saves, as one made for a batch ``factor`` times as long."""
    tiny = build("llama")
    with enabled(tiny.model, Unlimited(max_slowdown=10.0)) as handle:
        for _ in range(4):
            tiny.step()
        table, saved = table_of(handle), handle.stats().unique_bytes
    most = int(factor * saved)
    predicted = replace(table.predicted, kept_bytes=most, offloaded_bytes=0, recomputed_bytes=0)
    return replace(table, actions=dict.fromkeys(table.actions, Action.KEEP), predicted=predicted)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that began under hooks."""
    found, begin = list[str](), BlockRun.__init__

    def noted(run: BlockRun, engine: Engine, block: Block, *args: Any, **kwargs: Any) -> None:
        found.append(block.name)
        begin(run, engine, block, *args, **kwargs)

    monkeypatch.setattr(BlockRun, "__init__", noted)
    return found


def test_blocks_of_which_a_loaded_plan_keeps_everything_run_without_hooks(hooked: list[str]) -> None:
    """Like under the handle that made it. The first pass shows their saved tensors."""
    tiny, plan = build("llama"), keeping()
    plain, (first, *others) = tiny.step(), list(dict.fromkeys(name for name, _ in plan.actions))
    mixed = replace(plan, actions={
        (name, site): Action.OFFLOAD if name == first else action for (name, site), action in plan.actions.items()
    })  # fmt: skip
    for table, expected in ((plan, []), (mixed, [first])):
        with ebbtide.enable_activation_offloading(tiny.model, policy=table, min_bytes=0) as handle:
            hooked.clear()
            assert not differences(plain, tiny.step())
            assert hooked == [first, *others]
            before = handle.stats()
            hooked.clear()
            assert not differences(plain, tiny.step())
            after = handle.stats()
            assert hooked == expected
            assert after.unique_bytes == before.unique_bytes and after.offloaded_bytes == before.offloaded_bytes
            drain()
            assert_nothing_left(handle._engine)


def test_under_a_loaded_plan_a_longer_batch_and_graphs_that_overlap_run_with_hooks(hooked: list[str]) -> None:
    """Otherwise they would keep more than planned."""
    tiny, count = build("llama"), len(build("llama").block_list())
    with ebbtide.enable_activation_offloading(tiny.model, policy=keeping(0.5), min_bytes=0) as handle:
        for _ in range(3):
            hooked.clear()
            tiny.step()
            assert len(hooked) == count and handle.stats().offloaded_bytes > 0
    with ebbtide.enable_activation_offloading(tiny.model, policy=keeping(2.0), min_bytes=0):
        for _ in range(3):
            hooked.clear()
            one, two = tiny.loss()[0], tiny.loss()[0]
            assert len(hooked) == 2 * count
            one.backward()
            two.backward()


def test_of_what_a_plan_keeps_or_offloads_no_recipe_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are the largest host cost of a saved tensor."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)
    built: list[int] = []
    recipe = Builder.recipe
    monkeypatch.setattr(Builder, "recipe", lambda self, *args: built.append(1) or recipe(self, *args))
    tiny = build("llama")
    plain = tiny.step()
    counts: dict[str, int] = {}
    for name, keeps in (("all", False), ("none", True)):
        with enabled(tiny.model, ebbtide.Auto()) as handle:
            for _ in range(4):
                tiny.step()
            handle.plan.save(tmp_path / "plan.json")
        table = load_plan(tmp_path / "plan.json")
        action = Action.KEEP if keeps else Action.RECOMPUTE
        plan = replace(table, actions=dict.fromkeys(table.actions, action))
        plan = replace(plan, predicted=replace(plan.predicted, kept_bytes=10**12))
        with ebbtide.enable_activation_offloading(tiny.model, policy=plan, min_bytes=0) as handle:
            tiny.step()
            built.clear()
            assert not differences(plain, tiny.step())
            counts[name] = len(built)
            assert (handle.stats().recomputed_bytes > 0) is not keeps
    assert counts["none"] == 0 < counts["all"]
