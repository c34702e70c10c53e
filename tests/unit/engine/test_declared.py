"""Declared rules: the function that is looked up is the one for just these numbers, shapes and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.engine import declared
from ebbtide.engine.declared import DeclaredRule
from ebbtide.engine.rules import rule_table
from ebbtide.engine.tickets import Expr, LightTicket
from tests.helpers.oracle import same_bits


class FromSlots:
    """Finds the operands of one node; its input, where nothing was saved, is ``x``."""

    checks_weights = True

    def __init__(self, *values: Tensor) -> None:
        self.values = values

    def value(self, node: Any, output_nr: int, *, loose: bool = False) -> LightTicket:
        return LightTicket(self.values[output_nr])

    def packed_operand(self, packed: Any) -> None:
        return None


def expression_of(rules: dict[str, Any], y: Tensor, *values: Tensor) -> Expr:
    node: Any = y.grad_fn
    rule = rules[node.name()]
    assert isinstance(rule, DeclaredRule), node.name()
    found = rule.expression(node.name(), node, y.output_nr, FromSlots(*values))
    assert found is not None
    return found


PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "numbers": (lambda x: F.leaky_relu(x, 0.1), lambda x: F.leaky_relu(x, 0.2)),
    "signs of zero": (lambda x: F.leaky_relu(x, 0.0), lambda x: F.leaky_relu(x, -0.0)),
    "dimensions": (lambda x: x.softmax(0), lambda x: x.softmax(1)),
    "dimensions from the end": (lambda x: x.softmax(-1), lambda x: x.softmax(-2)),
    "shapes": (lambda x: x.view(2, 8), lambda x: x.view(8, 2)),
    "outputs": (lambda x: x.unbind(0)[0], lambda x: x.unbind(0)[1]),
    "types": (lambda x: x.to(torch.float64), lambda x: x.to(torch.bfloat16)),
    "types of sums": (lambda x: x.sum(0), lambda x: x.sum(0, dtype=torch.float64)),
    "texts": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    "names of nodes": (lambda x: x.view(1, 4, 4).squeeze(0), lambda x: x.view(1, 4, 4).squeeze()),
    "memory formats": (lambda x: x.view(1, 1, 4, 4).to(x.dtype, copy=True), lambda x: x.to(x.dtype, copy=True)),
}


SOURCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "names of nodes": lambda x, y: x.view(1, 4, 4),
    "memory formats": lambda x, y: x.view(y.shape),
}
"""Of the pairs whose operator does not take ``x`` itself."""


@pytest.mark.parametrize("pair", PAIRS)
def test_a_function_is_that_of_its_own_node(pair: str) -> None:
    rules, x = rule_table(), torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    for _ in range(2):  # made, then looked up
        for work in PAIRS[pair]:
            y = work(x)
            source = SOURCES.get(pair, lambda x, y: x)(x, y)
            found = expression_of(rules, y, *[source] * 4)
            assert same_bits(found.fn(source.detach()), y.detach()) and found.dtype is y.dtype
            assert found.loose is (pair == "memory formats" and y.dim() == 4)


def test_equal_functions_of_other_operators_have_verdicts_of_their_own() -> None:
    rules, x = rule_table(), torch.ones(1, 4, requires_grad=True)
    one, other = (expression_of(rules, y, x) for y in (x.squeeze(0), x.squeeze()))
    assert one.structure != other.structure


def test_what_a_node_saved_is_preferred_and_what_is_missing_ends_it() -> None:
    rules, x = rule_table(), torch.ones(4, requires_grad=True)
    y = x.sin()
    node: Any = y.grad_fn
    saved, sources = LightTicket(x), FromSlots(x)
    sources.packed_operand = lambda packed: saved  # type: ignore[assignment, method-assign, return-value]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved, lambda ticket: ticket.tensor):
        hooked: Any = x.sin().grad_fn
    found = rules["SinBackward0"].expression("SinBackward0", hooked, 0, sources)  # type: ignore[union-attr]
    assert found is not None and found.operands == (saved,)
    sources.packed_operand = lambda packed: None  # type: ignore[method-assign]
    sources.value = lambda *place, loose=False: None  # type: ignore[assignment, method-assign, return-value]
    assert rules["SinBackward0"].expression("SinBackward0", node, 0, sources) is None  # type: ignore[union-attr]


def test_a_function_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "MOST_FUNCTIONS", 2)
    rules, x = rule_table(), torch.ones(4, requires_grad=True)
    first = expression_of(rules, F.leaky_relu(x, 0.1), x).fn
    assert expression_of(rules, F.leaky_relu(x, 0.1), x).fn is first
    for slope in (0.2, 0.3, 0.4):  # more than are remembered
        expression_of(rules, F.leaky_relu(x, slope), x)
    assert len(rules["LeakyReluBackward0"]._known) <= 2
    assert expression_of(rules, F.leaky_relu(x, 0.1), x).fn is not first


def test_the_work_of_a_product_follows_its_lengths() -> None:
    rules = rule_table()
    for rows, inner, columns in ((2, 3, 4), (2, 5, 4), (2, 3, 4)):
        a, b = torch.ones(rows, inner, requires_grad=True), torch.ones(inner, columns, requires_grad=True)
        assert expression_of(rules, a @ b, a, b).flops == 2 * rows * inner * columns
