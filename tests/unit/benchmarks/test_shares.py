"""The count of shares: an independent count of saved storages, and reasons in cases where they are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import shares as counting
from benchmarks.shares import Differs, moved_by_node, naive_bytes, reason, shares
from benchmarks.suites.families import details, reasons, row, summary
from ebbtide.base.actions import Action, Candidate, Site
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


def _told(node: str = "SinBackward0", *, block_input: bool = False, flops: float | None = 0.0) -> Candidate:
    site = Site("Block", "inner", node, 0)
    return Candidate(site=site, block=0, nbytes=64, block_input=block_input, recompute_flops=flops)


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
    ("candidate", "demoted", "why"),
    [
        (None, False, "never offloaded"),
        (_told(block_input=True, flops=None), False, "block input"),
        (_told(), True, "recompute differed"),
        (_told("leaf", flops=None), False, "no autograd node"),
        (_told("MmBackward0", flops=1e6), False, "matrix product"),
        (_told(flops=None), False, "operand missing"),
        (_told("NobodyKnowsBackward0", flops=None), False, "no rule"),
    ],
)
def test_why_a_tensor_is_moved(candidate: Candidate | None, demoted: bool, why: str) -> None:
    assert reason(candidate, {"SinBackward0": None, "MmBackward0": None}, demoted=demoted) == why


def test_groups_are_by_node_and_reason_and_the_rest_was_narrowed() -> None:
    told = [_told("MmBackward0", flops=1e6), _told(block_input=True, flops=None), _told()]
    cast = told[2].site._replace(node="ToCopyBackward0")
    sites = {
        (told[0].site, Action.OFFLOAD): (2, 128),
        (told[1].site._replace(ordinal=1), Action.KEEP): (1, 64),
        (told[2].site._replace(ordinal=2), Action.RECOMPUTE): (1, 64),
    }
    by_site = {site: candidate for (site, _), candidate in zip(sites, told, strict=True)}
    sites |= {(cast, Action.RECOMPUTE): (1, 32), (cast, Action.OFFLOAD): (1, 32)}
    assert moved_by_node(sites, by_site, ()) == [
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
