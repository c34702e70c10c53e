"""The count of shares: an independent count of saved storages, and reasons in cases where they are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import shares as counting
from benchmarks.shares import REASONS, Differs, moved_by_node, naive_bytes, reason, shares
from benchmarks.suites.families import WHY, details, reasons, row, summary
from ebbtide.base.actions import Action, NoRecipe, Site
from ebbtide.engine.timed import TimedUnit
from tests.helpers.models import Stack, Tiny, build

WORDS = 4 * 8 * 4  # bytes of one activation below


class Sines(nn.Module):
    """Saves its input and its sine; a scale makes it a block with parts and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rest = nn.Linear(8, 8, bias=False), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(torch.sin(torch.sin(x)))


def _sines() -> Tiny:
    model = Stack(Sines(), Sines())
    return Tiny(name="sines", model=model, inputs={"x": torch.randn(4, 8, requires_grad=True)}, blocks="layers")


def _unit(
    node: str = "SinBackward0",
    *,
    action: Action = Action.OFFLOAD,
    flops: float | None = None,
    no_recipe: NoRecipe | None = None,
    ordinal: int = 0,
) -> TimedUnit:
    site = Site("Block", "inner", node, ordinal)
    return TimedUnit(site=site, nbytes=64, action=action, recompute_flops=flops, no_recipe=no_recipe)


def test_naive_bytes_are_the_distinct_storages_saved_in_blocks_without_weights() -> None:
    tiny = _sines()
    with naive_bytes(tiny.model) as naive:
        tiny.loss()
    assert naive == {"layers.0": 3 * WORDS, "layers.1": 3 * WORDS}  # the input, its sine, and those of the product


def test_naive_bytes_leave_no_hooks() -> None:
    tiny = _sines()
    with naive_bytes(tiny.model) as naive:
        tiny.loss()
    before = naive.total()
    tiny.step()
    assert naive.total() == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.model.modules())


def test_shares_of_a_chain_are_known_beforehand() -> None:
    found = shares(_sines())
    assert found["naive_bytes"] == 6 * WORDS and found["blocks"] == 2
    expected = {
        "keep": (6 * WORDS, 0, 0),
        "offload": (0, 6 * WORDS, 0),
        "inputs": (4 * WORDS, 2 * WORDS, 0),
        "auto": (0, 2 * WORDS, 4 * WORDS),
        "minimal": (0, 2 * WORDS, 4 * WORDS),
    }
    assert {p: (f["kept"], f["moved"], f["recomputed"]) for p, f in found["policies"].items()} == expected
    assert found["moved"] == [{"node": "input", "why": "block input", "storages": 2, "bytes": 2 * WORDS}]


def test_a_step_that_differs_gives_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "differences", lambda one, other: ["outputs.loss: largest difference 1"])
    with pytest.raises(Differs, match="sines, keep, step 0: outputs.loss"):
        shares(_sines())


@pytest.mark.parametrize("name", ["gru_stack", "gpt2", "wan"])
def test_bytes_of_a_family_make_the_whole(name: str) -> None:
    found = shares(build(name))
    for policy in found["policies"].values():
        assert policy["kept"] + policy["moved"] + policy["recomputed"] == pytest.approx(found["naive_bytes"], rel=0.1)
    assert sum(group["bytes"] for group in found["moved"]) <= found["naive_bytes"]


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        (None, "never offloaded"),
        (_unit(action=Action.KEEP), "never offloaded"),
        (_unit("MmBackward0", flops=1e6), "matrix product"),
        *((_unit(no_recipe=why), text) for why, text in REASONS.items()),
    ],
)
def test_why_a_tensor_is_moved(unit: TimedUnit | None, why: str) -> None:
    assert reason(unit) == why and why in WHY


def test_the_engine_says_why_a_tensor_is_moved() -> None:
    """Some operators have a rule only for some of their arguments: a table of rules does not tell."""
    found = {(group["node"], group["why"]) for group in shares(build("gru_stack"))["moved"]}
    assert ("AddBackward0", "part of a tensor") in found


def test_groups_are_by_node_and_reason_and_the_rest_was_narrowed() -> None:
    units = [_unit("MmBackward0", flops=1e6), _unit(no_recipe=NoRecipe.INPUT, ordinal=1), _unit(ordinal=2)]
    cast = units[2].site._replace(node="ToCopyBackward0")
    sites = {
        (units[0].site, Action.OFFLOAD): (2, 128),
        (units[1].site, Action.KEEP): (1, 64),
        (units[2].site, Action.RECOMPUTE): (1, 64),
        (cast, Action.RECOMPUTE): (1, 32),
        (cast, Action.OFFLOAD): (1, 32),
    }
    assert moved_by_node(sites, units) == [
        {"node": "MmBackward0", "why": "matrix product", "storages": 2, "bytes": 128},
        {"node": "SinBackward0", "why": "block input", "storages": 1, "bytes": 64},
        {"node": "(cast)", "why": "cast up", "storages": 1, "bytes": 32},
    ]


def _case(moved: int) -> dict[str, Any]:
    sizes = {"kept": 0, "moved": moved, "recomputed": 1024 - moved, "checkpointed": 0, "checkpointed_blocks": 0}
    groups = [
        {"node": "MmBackward0", "why": "matrix product", "storages": 1, "bytes": moved - 8},
        {"node": "leaf", "why": "no autograd node", "storages": 1, "bytes": 8},
    ]
    policies = {"auto": dict(sizes), "minimal": dict(sizes)}
    return {"family": "one", "precision": "bf16", "naive_bytes": 1024, "policies": policies, "moved": groups}


def test_the_table_says_percent_of_the_naive_bytes() -> None:
    assert row(_case(256)) == "| one | 25 | 25 | 0 |"


def test_only_cases_of_which_much_is_left_are_explained() -> None:
    assert reasons(_case(768)) == "MmBackward0 74"  # under one percent is not named
    cases = [_case(256), _case(768)]
    text = "\n".join([*summary(cases), *details(cases)])
    assert "| one | 75 | MmBackward0 74 |" in text and "| one | 25 |" not in text
    assert "Auto keeps 0 %, offloads 50 % and recomputes 50 %." in text
