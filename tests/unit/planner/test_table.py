"""Plans as tables: lookups, the fallback rule, and the plan file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.base.actions import Action
from ebbtide.base.errors import DataError
from ebbtide.planner.hooked import shrink_hooked
from ebbtide.planner.profile import Rates
from ebbtide.planner.table import TablePlan, load_plan, table_plan
from tests.helpers.profiles import alike, candidate, fit, shrink, unit

PROFILE = alike(
    4,
    (unit("light", 100, 1e-4), unit("dear", 100, 5.0), unit("never", 100)),
    Rates(out_bytes_per_second=100.0, in_bytes_per_second=1e4),
    beside=50,
    window_bytes=100,
)


def plan(share: float = 0.5) -> TablePlan:
    return table_plan(fit(PROFILE, int(50 + share * PROFILE.saved_bytes)), "auto")


def ask(found: TablePlan, module: str, block: str = "layers.1", *, flops: float | None = 1e9, kept: int = 0) -> Action:
    return found.choose(candidate(module, block=block, flops=flops, kept=kept))


def test_actions_are_looked_up_by_block_and_site() -> None:
    found = plan()
    assert set(found.actions.values()) >= {Action.KEEP, Action.RECOMPUTE}
    for (block, site), action in found.actions.items():
        assert ask(found, site.module, block) is action


def test_what_the_table_does_not_know_follows_the_heuristic() -> None:
    assert ask(plan(), "elsewhere", flops=0.0) is Action.RECOMPUTE
    assert ask(plan(), "elsewhere", flops=1e9) is Action.OFFLOAD
    assert ask(plan(), "light", "another.block", flops=None) is Action.OFFLOAD


def test_what_can_no_longer_be_recomputed_is_offloaded() -> None:
    assert ask(plan(), "light") is Action.RECOMPUTE
    assert ask(plan(), "light", flops=None) is Action.OFFLOAD


def needs(found: TablePlan, module: str, *, block: str = "layers.1", kept: int = 0) -> bool:
    return found.needs_recipe(candidate(module, block=block, kept=kept))


def test_a_recipe_is_needed_unless_the_table_has_settled_it() -> None:
    """Whatever its cost: if no recipe is needed, the answer is the same with and without one."""
    found = plan()
    room = found.predicted.kept_bytes - 100
    for (block, site), action in found.actions.items():
        assert needs(found, site.module, block=block, kept=room) is (action is Action.RECOMPUTE)
        for kept in (0, room, room + 1):
            answers = {ask(found, site.module, block, flops=flops, kept=kept) for flops in (None, 0.0, 1e9)}
            assert needs(found, site.module, block=block, kept=kept) or answers == {action}
        assert needs(found, site.module, block=block, kept=room + 1) is (action is not Action.OFFLOAD)
    assert needs(found, "elsewhere") and needs(found, "light", block="another.block")


def test_operands_are_noted_only_in_blocks_in_which_something_is_recomputed() -> None:
    found = plan()
    kept = {key: Action.OFFLOAD if key[0] == "layers.1" else action for key, action in found.actions.items()}
    assert found.recomputes_in("layers.1") and found.recomputes_in("layers.0")
    found = replace(found, actions=kept)
    assert not found.recomputes_in("layers.1") and found.recomputes_in("layers.0")
    assert found.recomputes_in("unknown"), "by the heuristic, perhaps"


@pytest.mark.parametrize("hook_seconds", [0.0, 0.1])
@pytest.mark.parametrize("names", [1, 2, 3])
def test_executions_of_one_block_share_actions_and_the_simulated_plan_is_that_of_the_table(
    names: int, hook_seconds: float
) -> None:
    """For example in a model whose layers share their weights."""
    profile = alike(
        12, (unit("light", 100, 0.01), unit("dear", 150, 5.0), unit("never", 100)),
        Rates(out_bytes_per_second=100.0, in_bytes_per_second=100.0), window_bytes=100,
    )  # fmt: skip
    profile = replace(
        profile,
        blocks=tuple(
            replace(block, name=f"layers.{place % names}", hook_seconds=hook_seconds)
            for place, block in enumerate(profile.blocks)
        ),
    )
    budgets = [fit(profile, int(share * profile.saved_bytes)) for share in (0.4, 0.6, 0.8)]
    slowdowns = [shrink_hooked(profile, slowdown) for slowdown in (0.02, 0.05, 0.2)]
    for found, slowdown in zip([*budgets, *slowdowns], [None, None, None, 0.02, 0.05, 0.2], strict=True):
        table = table_plan(found, "auto").actions
        carried_out = [[table[block.name, unit.site] for unit in block.units] for block in profile.blocks]
        assert [list(actions) for actions in found.assignment] == carried_out
        assert slowdown is None or found.predicted.overhead_seconds <= slowdown * profile.step_seconds * (1 + 1e-6)
    assert len({found.predicted.peak_bytes for found in budgets}) > 1


def test_a_larger_batch_keeps_no_more_bytes() -> None:
    found = plan()
    (block, site), _ = next(item for item in found.actions.items() if item[1] is Action.KEEP)
    room = found.predicted.kept_bytes - 100
    assert ask(found, site.module, block, kept=room) is Action.KEEP
    assert ask(found, site.module, block, kept=room + 1, flops=None) is Action.OFFLOAD


def test_what_it_says_has_the_figures_and_the_reasons() -> None:
    text = table_plan(shrink(PROFILE, 0.05), "auto").explain()
    assert "predicted: peak" in text and "of activations" not in text and "everything kept: 1.2 KiB" in text
    assert "Layer/dear/Node#0" in text and "cannot be recomputed" in text and "ms/MB" in text
    without_base = alike(4, (unit("never", 100),), Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0))
    assert "B of activations (everything kept: 400 B)" in table_plan(shrink(without_base, 0.05), "auto").explain()


def test_a_site_that_one_block_cannot_recompute_keeps_the_price_of_the_others() -> None:
    profile = alike(2, (unit("x", 100, 1.0),), Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0))
    last = replace(profile.blocks[-1], units=(unit("x", 100),))
    text = table_plan(shrink(replace(profile, blocks=(*profile.blocks[:-1], last)), 5.0), "auto").explain()
    assert "recompute: " in text and "cannot be recomputed" not in text


def test_a_plan_file_comes_back_the_same(tmp_path: Path) -> None:
    found = plan()
    found.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == found


def test_a_plan_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written.*\nhint:"):
        plan().save(tmp_path / "no" / "such" / "folder.json")


def test_no_figure_is_minus_zero() -> None:
    found = replace(plan(), predicted=replace(plan().predicted, overhead_percent=-0.01, bound_percent=-0.04))
    assert "+0.0 % (no schedule beats +0.0 %)" in found.explain()


def test_a_plan_is_saved_under_a_name_that_policy_reads(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)'myplan'.*expected .*\.json.*hint: "):
        plan().save("myplan")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 3}', '{"schema": 1, "name": "x", "predicted": {}, "reasons": [], "actions": []}'],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(DataError, match="no plan file of this release"):
        load_plan(path)


def saved(folder: Path) -> dict[str, Any]:
    plan().save(folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())


def test_a_wrong_action_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    document = json.loads(path.read_text())
    document["actions"][0][5] = "burn"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="burn"):
        load_plan(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept_bytes", "12"), ("kept_bytes", None), ("peak_bytes", None), ("kept_bytes", -5), ("moved_bytes", True),
        ("step_seconds", float("nan")), ("bound_percent", float("inf")), ("overhead_percent", [1]),
    ],
)  # fmt: skip
def test_figures_that_are_none_are_refused(tmp_path: Path, name: str, value: object) -> None:
    document = saved(tmp_path)
    document["predicted"][name] = value
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=rf"no plan file of this release .*{name} is .*\n?.*hint: "):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("name", "value"), [("actions", []), ("actions", {}), ("reasons", "abc"), ("actions", [["a"] * 4 + [float("inf")]])]
)
def test_rows_that_are_none_are_refused(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**saved(tmp_path), name: value}))
    with pytest.raises(DataError, match="no plan file of this release"):
        load_plan(tmp_path / "plan.json")


def test_lists_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="no plan file of this release"):
        load_plan(tmp_path / "plan.json")


def test_rounding_is_no_overhead() -> None:
    solution = shrink(PROFILE, 0.05)
    found = replace(solution, predicted=replace(solution.predicted, overhead_seconds=-1e-17 * PROFILE.step_seconds))
    assert str(table_plan(found, "auto").predicted.overhead_percent) == "0.0"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json.*cannot be read"):
        load_plan(tmp_path / "nowhere.json")
