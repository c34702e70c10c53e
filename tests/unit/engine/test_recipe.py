"""Recipes: evaluation in topological order, caching, the scope of a verdict; building them; trust."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ebbtide
from ebbtide import api
from ebbtide.base.actions import Action
from ebbtide.base.errors import RestoreError
from ebbtide.engine import Expr, NodeView
from ebbtide.engine.recipe import MAX_DEPTH, evaluate
from ebbtide.engine.rules import rule_table
from ebbtide.engine.tickets import LightTicket, expressions_in
from tests.helpers.engines import REMAKE, Leaves, assert_nothing_left, compare, forward_pass, leaf, observe, open_engine
from tests.helpers.oracle import same_bits
from tests.helpers.torches import needs_slots


def light(value: Tensor) -> LightTicket:
    return LightTicket(value)


def counted(calls: list[str], name: str, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*values: Tensor) -> Tensor:
        calls.append(name)
        return fn(*values)

    return call


def test_each_expression_is_evaluated_once() -> None:
    calls: list[str] = []
    x = torch.randn(3)
    a = Expr(counted(calls, "a", torch.exp), (light(x),), key=("a",))
    b = Expr(counted(calls, "b", torch.mul), (a, a), key=("b",))
    c = Expr(counted(calls, "c", torch.add), (b, a), key=("c",))
    assert same_bits(evaluate(c, lambda entry: None, None), x.exp() * x.exp() + x.exp())
    assert calls == ["a", "b", "c"]


def test_evaluation_does_not_recurse() -> None:
    value: Any = light(torch.zeros(1))
    for _ in range(5000):
        value = Expr(lambda v: v + 1, (value,), key=("next",))
    assert evaluate(value, lambda entry: None, None).item() == 5000


def test_work_and_depth_add_up() -> None:
    a = Expr(torch.exp, (light(torch.ones(1)),), key=("a",), flops=3)
    b = Expr(torch.mul, (a, a), key=("b",), flops=4)
    c = Expr(torch.exp, (Expr(torch.exp, (light(torch.ones(1)),), key=("c",), flops=3),), key=("d",), flops=4)
    assert (a.depth, b.depth, b.flops) == (1, 2, 7)  # ``a`` is evaluated once
    assert (c.depth, c.flops) == (2, 7)


def test_a_shared_expression_is_visited_once() -> None:
    value = Expr(torch.exp, (light(torch.ones(1)),), key=("first",), flops=1)
    for _ in range(MAX_DEPTH):
        value = Expr(torch.add, (value, value), key=("twice",), flops=1)
    assert value.flops == MAX_DEPTH + 1
    assert len(list(expressions_in([value]))) == MAX_DEPTH + 1 and list(value.tickets()) == []


def test_a_structure_is_the_operators_and_operand_types_and_no_sizes() -> None:
    def made(name: str, value: Tensor) -> int:
        return Expr(torch.exp, (Expr(torch.sin, (light(value),), key=(name,)),), key=("outer",)).structure

    x = torch.ones(2, 3)
    assert made("a", x) == made("a", x + 1) == made("a", torch.ones(7, 3))
    assert len({made("a", x), made("b", x), made("a", x.double()), made("a", x[0])}) == 4


def test_long_chains_are_not_recomputed() -> None:
    x = leaf(4, 4)
    with open_engine(REMAKE) as engine:
        for links, action in ((MAX_DEPTH - 4, Action.RECOMPUTE), (MAX_DEPTH + 4, Action.OFFLOAD)):
            with forward_pass(engine, x) as run:
                y = x.sin()
                for _ in range(links):
                    y = -y
                y = y * y
            assert {r().action for r in run.entries if r().site.node == "NegBackward0"} == {action}
            del y
            assert_nothing_left(engine)


def test_a_chain_of_any_length_ends_no_rule(caplog: pytest.LogCaptureFixture) -> None:
    x = leaf(4, 4)
    with open_engine(REMAKE) as engine:
        with forward_pass(engine, x) as run:
            y = part = x.sin()
            for link in range(500):
                y = -y
                part = y if link == MAX_DEPTH // 2 else part
            z = y * y + part * part  # the long chain is looked at first
        assert "NegBackward0" in engine.rules and caplog.messages == []
        saved = [action for (site, action), _ in run.pass_.sites.items() if site.node == "NegBackward0"]
        assert sorted(saved, key=str) == [Action.OFFLOAD, Action.RECOMPUTE]
        (got,) = torch.autograd.grad(z.sum(), x)
    assert same_bits(got, torch.autograd.grad((x.sin().square() * 2).sum(), x)[0])


def test_a_number_is_data_and_not_a_new_recipe() -> None:
    x = leaf(4, 4)
    verdicts: set[int] = set()
    with open_engine(REMAKE) as engine:
        for number in range(6):
            with forward_pass(engine, x):
                y = x.sin() * (number + 0.5)
                y = y * y
            verdicts.add(len(engine.trust._verdicts))
            expected = torch.autograd.grad(((x.sin() * (number + 0.5)) ** 2).sum(), x)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected[0])
    assert len(verdicts) == 1, "the verdicts grow with the steps"


@needs_slots
def test_a_number_is_read_under_a_dispatch_mode_too(caplog: pytest.LogCaptureFixture) -> None:
    """A mode that counts operators receives the number itself when a rule reads its value."""
    x = leaf(4, 4)
    expected = torch.autograd.grad(((x.sin() * 2.5) ** 2).sum(), x)[0]
    with open_engine(REMAKE) as engine, FlopCounterMode(display=False):
        with forward_pass(engine, x) as run:
            y = x.sin() * 2.5
            y = y * y
        assert Action.RECOMPUTE in {r().action for r in run.entries if r().site.node == "MulBackward0"}
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert "MulBackward0" in engine.rules and not caplog.records


@needs_slots
def test_the_record_of_a_module_outlives_what_passes_its_output_on() -> None:
    """An identity, or a dropout in eval mode, after a norm returns the norm's output itself."""
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(8), nn.Identity(), nn.Dropout(0.0).eval(), nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    with ebbtide.enable_activation_offloading(
        model, policy="minimal", min_bytes=0, blocks=["0"], verify=True
    ) as handle:
        assert torch.equal(torch.autograd.grad(model(x).square().sum(), x)[0], expected)
        actions = {s.node: a for s, a in handle._engine.last_pass.sites}
        assert actions["NativeLayerNormBackward0"] is Action.RECOMPUTE


# Rules from outside, and trust


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def cubed(v: Any) -> list[Tensor]:
    y = v["x"].cumsum(0)
    z = Cube.apply(y)
    return [y * 2, z * z * 0.5]


def rules_with(rule: Callable[[NodeView], Expr | None]) -> dict[str, Any]:
    return {**rule_table(), "CubeBackward": rule}


def right(view: NodeView) -> Expr | None:
    operand = view.input(0)
    return None if operand is None else Expr(lambda x: x * x * x, (operand,), key=("cube",))


def wrong(view: NodeView) -> Expr | None:
    operand = view.input(0)
    return None if operand is None else Expr(lambda x: x**3 + 1, (operand,), key=("cube",))


def wrong_shape(view: NodeView) -> Expr | None:
    operand = view.input(0)
    return None if operand is None else Expr(lambda x: x[:1], (operand,), key=("cube",))


def fails_late(view: NodeView) -> Expr | None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError("late")

    operand = view.input(0)
    return None if operand is None else Expr(fail, (operand,), key=("cube",))


def fails_at_once(view: NodeView) -> Expr | None:
    return view.constant("no such constant")


def test_a_right_rule_is_used() -> None:
    leaves = {"x": leaf(6, 8)}
    with open_engine(REMAKE, rules=rules_with(right)) as engine:
        for _ in range(2):
            assert compare(observe(cubed, leaves), observe(cubed, leaves, engine)) == []
            assert any(s.node == "CubeBackward" for s in _recomputed(engine)) and not engine.trust.demoted


@pytest.mark.parametrize("rule", [wrong, wrong_shape, fails_late])
def test_a_wrong_rule_is_demoted_and_gradients_stay_right(
    rule: Callable[[NodeView], Expr | None], caplog: pytest.LogCaptureFixture
) -> None:
    leaves, heard = {"x": leaf(6, 8)}, []
    with open_engine(REMAKE, rules=rules_with(rule)) as engine, caplog.at_level(logging.INFO, "ebbtide.engine"):
        engine.bus.subscribe(lambda kind, fields: heard.append((kind, fields)))
        for _ in range(3):
            assert compare(observe(cubed, leaves), observe(cubed, leaves, engine)) == []
            assert not any(s.node == "CubeBackward" for s in _recomputed(engine))
        assert engine.stats().demoted_sites == ("Block/(block)/CubeBackward#0",)
        assert caplog.text.count("not recomputed, Block/(block)/CubeBackward#0") == 1, "said once"
        assert [f["code"] for kind, f in heard if kind == "message"] == ["demoted"]
        assert_nothing_left(engine)


def test_a_rule_that_fails_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    leaves = {"x": leaf(6, 8)}
    with open_engine(REMAKE, rules=rules_with(fails_at_once)) as engine:
        for _ in range(2):
            assert compare(observe(cubed, leaves), observe(cubed, leaves, engine)) == []
        assert caplog.text.count("the rule for CubeBackward failed and is left out") == 1
        assert_nothing_left(engine)


def test_a_rule_that_turns_wrong_is_an_error_in_its_first_backward() -> None:
    shift = torch.zeros(())

    def drifting(view: NodeView) -> Expr | None:
        operand = view.input(0)
        return None if operand is None else Expr(lambda x: x * x * x + shift, (operand,), key=("cube",))

    leaves = {"x": leaf(6, 8)}
    for verify in (True, False):
        shift.zero_()
        with open_engine(REMAKE, rules=rules_with(drifting), verify=verify) as engine:
            assert compare(observe(cubed, leaves), observe(cubed, leaves, engine)) == []
            shift.fill_(1)
            got = observe(cubed, leaves, engine)
            assert got.error == (RestoreError, "backward"), verify


def test_a_new_length_is_not_compared_again_and_new_numerics_are() -> None:
    with open_engine(REMAKE, rules=rules_with(right)) as engine:
        compared = []
        trusted = engine.trust._compare
        engine.trust._compare = lambda *a: (compared.append(a[0].site.node), trusted(*a))[1]  # type: ignore[method-assign]
        for shape, expected in (((6, 8), 1), ((6, 8), 0), ((3, 8), 0), ((6, 8), 0)):
            compared.clear()
            observe(cubed, {"x": leaf(*shape)}, engine)
            assert compared.count("CubeBackward") == expected
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
            compared.clear()
            observe(cubed, {"x": leaf(6, 8)}, engine)
            assert compared.count("CubeBackward") == 1
        finally:
            torch.set_float32_matmul_precision(precision)


def test_register_recompute_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_custom_rules", {})
    ebbtide.register_recompute("CubeBackward", right)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(Cube.apply(self.linear(x)))

    model, x = nn.Sequential(Layer(), Layer()), torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    with ebbtide.enable_activation_offloading(model, policy="auto", min_bytes=0) as handle:
        assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], expected)
        sites = handle._engine.last_pass.sites
        assert any(s.node == "CubeBackward" and a is Action.RECOMPUTE for s, a in sites), sites


def _recomputed(engine: Any) -> list[Any]:
    return [s for s, action in engine.last_pass.sites if action is Action.RECOMPUTE]


def flattened(leaves: Leaves) -> list[Tensor]:
    """A residual around a linear layer, which saves its input flattened: the sum's operands are saved as views."""
    x = leaves["x"] * 1
    return [_residual(x, leaves["w"])]


def _residual(x: Tensor, w: Tensor) -> Tensor:
    total = x + F.linear(x, w).tanh()
    return total * total


@pytest.mark.parametrize("outside", [False, True])
def test_a_value_of_which_a_view_was_saved_is_an_operand(outside: bool) -> None:
    leaves = {"x": leaf(2, 3, 4), "w": leaf(4, 4, parameter=True)}
    expected = observe(flattened, leaves)
    with open_engine(REMAKE) as engine:
        for _ in range(2):
            if outside:
                x = leaves["x"].detach().clone().requires_grad_()
                made = x * 1  # by an earlier block: an input of this one
                with forward_pass(engine, made, weights=[leaves["w"]]):
                    (y,) = [_residual(made, leaves["w"])]
                del made
                assert same_bits(expected.outputs[0], y)
                fed = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
                grads = torch.autograd.grad(y, (x, leaves["w"]), fed)
                assert all(same_bits(a, expected.grads[k]) for a, k in zip(grads, ("x", "w"), strict=True))
                del y
            else:
                assert compare(expected, observe(flattened, leaves, engine)) == []
            assert_nothing_left(engine)
        recomputed = [s.node for s, action in engine.last_pass.sites if action is Action.RECOMPUTE]
        assert "AddBackward0" in recomputed, engine.last_pass.sites
