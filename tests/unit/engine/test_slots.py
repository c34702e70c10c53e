"""Slots of nodes under a torch that does not tell what was packed: they are asked, but only those that are ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.engine import slots
from ebbtide.engine.tickets import LightTicket, Ticket
from tests.helpers.engines import (
    POLICIES,
    REMAKE,
    assert_nothing_left,
    check_everywhere,
    compare,
    forward_pass,
    leaf,
    observe,
    open_engine,
)
from tests.unit.engine.test_rules import CASES, OTHERS, VIEWS, run

NUMBERS_ONLY = {"MulBackward0", "DivBackward0", "WhereBackward0", "UnsafeViewBackward0"}
"""Made, in their case, from a tensor and a number: nothing of that node went through the hook, so it is not asked."""


@pytest.fixture(autouse=True)
def silent_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "TELLS", False)


@pytest.mark.parametrize("node", sorted(CASES.keys() - NUMBERS_ONLY))
def test_a_value_is_made_again(node: str) -> None:
    run(CASES[node], torch.float32, view=False, node=node)


@pytest.mark.parametrize("name", OTHERS)
def test_another_shape_of_a_rule(name: str) -> None:
    node, make = OTHERS[name]
    run(make, torch.float32, view=False, node=node)


@pytest.mark.parametrize("node", sorted(VIEWS.keys() - NUMBERS_ONLY))
def test_a_view_is_a_step_of_a_recipe(node: str) -> None:
    run(VIEWS[node], torch.float32, view=True, node=node)


def test_what_is_asked_is_the_ticket() -> None:
    x, w = leaf(4, 6), leaf(6, 6, parameter=True)
    with open_engine(REMAKE) as engine:
        with forward_pass(engine, x, weights=[w]) as opened:
            y = x.cos()
            product = y @ w
            picked = product[torch.tensor([0, 2]), :]
            read = opened.builder.slots
            assert isinstance(read.read(product.grad_fn, "self"), Ticket)
            assert isinstance(read.read(product.grad_fn, "mat2"), LightTicket)
            assert read.read(product.grad_fn, "nothing") is None
            assert [type(p) for p in read.read_list(picked.grad_fn, "indices")] == [Ticket]
        del y, product, picked
        assert_nothing_left(engine)


def test_hooks_of_others_are_not_asked() -> None:
    asked: list[str] = []

    def theirs(packed: Tensor) -> Tensor:
        asked.append("unpacked")
        return packed

    def program(v: dict[str, Tensor]) -> list[Tensor]:
        with saved_tensors_hooks(lambda t: t.detach(), theirs):
            inner = v["x"].cos() * v["x"]
        made = inner.sigmoid().exp()
        assert asked == []
        return [made]

    leaves: dict[str, Any] = {"x": leaf(4, 6)}
    expected = observe(program, leaves)
    asked.clear()
    with open_engine(REMAKE) as engine:
        for _ in range(2):
            assert compare(expected, observe(program, leaves, engine)) == []
            asked.clear()
            assert_nothing_left(engine)


def test_every_policy_over_every_tier() -> None:
    def program(v: Any) -> list[Tensor]:
        y = torch.nn.functional.silu(v["x"] @ v["w"]) * v["x"]
        return [torch.where(y > 0, y, y.exp()).softmax(-1) @ v["w"]]

    check_everywhere(program, {"x": leaf(4, 6), "w": leaf(6, 6, parameter=True)})
    assert POLICIES
