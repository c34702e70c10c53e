"""Gradients of gradients through every rule, and torch's own checks of gradients, under the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.engine import Engine
from tests.helpers.engines import POLICIES, REMAKE, assert_nothing_left, forward_pass, leaf, open_engine
from tests.helpers.oracle import same_bits
from tests.helpers.parts import gated_model
from tests.helpers.torches import MULTIPLIES_GROUPS
from tests.unit.engine.test_rules import CASES, VIEWS

RULES: dict[str, Callable[[Tensor], Tensor]] = CASES | VIEWS


def twice(make: Callable[[Tensor], Tensor], x: Tensor, engine: Engine | None, weights: list[Tensor]) -> list[Tensor]:
    """Return the output, its gradient and the gradient's gradient."""

    def program() -> Tensor:
        torch.manual_seed(7)
        y = make(x.cos() * 1.5)
        return (y.double() * y.double().sin()).sum()

    if engine is None:
        loss = program()
    else:
        buffers = make.buffers() if isinstance(make, nn.Module) else ()
        with forward_pass(engine, x, weights=[*weights, *buffers]):
            loss = program()
    found = torch.autograd.grad(loss, [x, *weights], create_graph=True)
    again = torch.autograd.grad(sum(g.double().square().sum() for g in found), [x, *weights], allow_unused=True)
    return [loss.detach(), *(g.detach() for g in found), *(g for g in again if g is not None)]


@pytest.mark.parametrize("plan", ["recompute", "offload"])
@pytest.mark.parametrize("node", sorted(RULES))
def test_the_gradient_of_a_gradient_goes_through_every_rule(node: str, plan: str) -> None:
    if node == "GroupedMmBackward0" and not MULTIPLIES_GROUPS:
        pytest.skip("this torch multiplies groups on devices only")
    make = RULES[node]
    weights = list(make.float().parameters()) if isinstance(make, nn.Module) else []
    x = leaf(4, 6)
    try:
        expected = twice(make, x, None, weights)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        pytest.skip(f"torch: {error}")
    with open_engine(REMAKE if plan == "recompute" else plan, verify=True) as engine:
        for _ in range(2):
            got = twice(make, x, engine, weights)
            assert len(expected) == len(got) and all(map(same_bits, expected, got))
            del got
            assert_nothing_left(engine)


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gated": lambda x, w: F.silu(x @ w) * torch.sigmoid(x @ w.t()),
    "normed": lambda x, w: F.layer_norm(x @ w, (4,)) * F.softmax(x, -1).exp(),
    "attention": lambda x, w: F.softmax((x @ w) @ (x @ w.t()).t(), -1) @ x,
    "views": lambda x, w: torch.cat([x.t()[:2].tanh(), (x[1:] @ w).t()[:2, :2].repeat(1, 2)[:, :3]]).cumsum(0),
    "solved": lambda x, w: torch.linalg.solve(w @ w.t() + 4 * torch.eye(4, dtype=w.dtype), x.t()).sin(),
    "complex": lambda x, w: torch.view_as_real(torch.complex(x, x.cos()) * torch.complex(x @ w, x)).square(),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPERATORS)
def test_torchs_gradcheck_and_gradgradcheck(name: str, policy: str) -> None:
    x, w = leaf(3, 4, dtype=torch.float64), leaf(4, 4, dtype=torch.float64, parameter=True)
    with open_engine(policy) as engine:

        def under_the_engine(x: Tensor, w: Tensor) -> Tensor:
            with forward_pass(engine, x, weights=[w]):
                return OPERATORS[name](x, w)

        assert torch.autograd.gradcheck(under_the_engine, (x, w), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(under_the_engine, (x, w), check_batched_grad=True)
        assert_nothing_left(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradcheck_of_a_model_under_a_handle(policy: str) -> None:
    model = gated_model(3).double()
    x = leaf(2, 3, dtype=torch.float64)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1) as handle:
        assert torch.autograd.gradcheck(model, (x,))
        assert torch.autograd.gradgradcheck(model, (x,))
        assert_nothing_left(handle._engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_penalty_on_gradients(policy: str) -> None:
    """As in generative models: a gradient is part of the loss, and weights get gradients from both."""
    model, x = gated_model(), leaf(4, 8)

    def step() -> list[Tensor]:
        model.zero_grad()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + (slope.norm(2, 1) - 1).square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = step()
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
            for _ in range(3):
                assert all(map(same_bits, expected, step()))
                x.grad = None
                assert_nothing_left(handle._engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_changes_between_steps(policy: str) -> None:
    """Shapes, gradient requirements, the mode: no step depends on the previous one."""
    model: nn.Module = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1) for _ in range(3)))
    plan = [(4, 0, True), (7, 0, True), (4, 1, True), (1, 1, False), (33, 2, False), (4, 2, True), (4, 0, True)]

    def steps() -> list[Tensor]:
        found = []
        for rows, frozen, training in plan:
            model.train(training)
            for number, layer in enumerate(model.children()):
                layer.requires_grad_(number >= frozen)
            torch.manual_seed(rows)
            model.zero_grad()
            model(torch.randn(rows, 2, 8, requires_grad=rows == 7)).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = steps()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for _ in range(2):
            got = steps()
            assert len(expected) == len(got) and all(map(same_bits, expected, got))
            assert_nothing_left(handle._engine)
