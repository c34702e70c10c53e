"""The user's hooks, contexts and checkpoints in and around blocks, under every policy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ebbtide
from tests.helpers.engines import (
    POLICIES,
    Leaves,
    assert_nothing_left,
    block,
    check_everywhere,
    forward_pass,
    hooks_are_closed,
    leaf,
    open_engine,
)
from tests.helpers.oracle import Oracle, same_bits
from tests.helpers.parts import Model, Part, check_model, differing, gated, gated_model, linear, training_step

POLICY = pytest.mark.parametrize("policy", POLICIES)
CASES: dict[str, Callable[[Leaves], list[Tensor]]] = {}


def case(program: Callable[[Leaves], list[Tensor]]) -> Callable[[Leaves], list[Tensor]]:
    CASES[program.__name__] = program
    return program


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w) * (x.sin() @ w).tanh()


# Contexts inside a block


@case
def save_on_cpu_inside(v: Leaves) -> list[Tensor]:
    y = v["x"].exp()
    with save_on_cpu():
        z = layer(y, v["w"])
    return [z.cos() * z * y]


@case
def users_hooks_inside(v: Leaves) -> list[Tensor]:
    with saved_tensors_hooks(lambda t: t.to(torch.float64), lambda t: t.to(torch.float32)):
        y = layer(v["x"].cumsum(0), v["w"])
    return [y.cos() * y]


@case
def users_hooks_in_hooks_inside(v: Leaves) -> list[Tensor]:
    with Oracle():
        y = v["x"].exp()
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            z = layer(y, v["w"])
        z = z.sin()
    return [z * y]


@case
def anomaly_mode_inside(v: Leaves) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        return [layer(v["x"].cumsum(0), v["w"])]


@case
def another_gradient_mode_inside(v: Leaves) -> list[Tensor]:
    with torch.no_grad():
        scale = layer(v["x"], v["w"])
        with torch.enable_grad():
            y = layer(v["x"], v["w"])
    with torch.inference_mode():
        layer(v["x"], v["w"])
    return [y * scale]


@case
def a_backward_inside(v: Leaves) -> list[Tensor]:
    y = v["x"].detach().requires_grad_()
    (slope,) = torch.autograd.grad((y.sin() * y.exp()).sum(), y)
    return [v["x"] * slope.cos()]


@case
def a_backward_inside_that_is_differentiated_again(v: Leaves) -> list[Tensor]:
    (slope,) = torch.autograd.grad(layer(v["x"], v["w"]).sum(), v["x"], create_graph=True)
    return [slope.square()]


# Checkpoints inside a block


@case
def a_checkpoint_that_saves_a_view_of_what_it_is_given_back(v: Leaves) -> list[Tensor]:
    def part(y: Tensor) -> Tensor:
        rows = y.view(-1)[4:20]
        return (rows * rows).sum() + y.t().sin().sum()

    y = v["x"].cumsum(0)
    return [checkpoint(part, y, use_reentrant=False) * 1.0, checkpoint(part, y[1:], use_reentrant=True) * y]


@case
def checkpoints_in_checkpoints(v: Leaves) -> list[Tensor]:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(layer, y, v["w"], use_reentrant=False).sin()

    def outer(y: Tensor) -> Tensor:
        return checkpoint(inner, F.dropout(y.exp(), 0.3), use_reentrant=False) * y

    return [checkpoint(outer, v["x"] * 0.1, use_reentrant=False) * v["x"]]


@case
def selective_checkpointing(v: Leaves) -> list[Tensor]:
    def products_are_saved(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, products_are_saved)
    y = checkpoint(layer, v["x"].cumsum(0), v["w"], use_reentrant=False, context_fn=contexts)
    return [y * y]


# Hooks on tensors


@case
def hooks_on_tensors(v: Leaves) -> list[Tensor]:
    y = v["x"].sin()
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    z = y * y.exp()
    z.register_hook(lambda g: g.clone().mul_(3))
    node = z.grad_fn
    assert node is not None
    node.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
    node.register_hook(lambda grads, _: tuple(None if g is None else g + 1 for g in grads))
    return [z]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_context_or_a_hook_inside_a_block_keeps_plain_trainings_bits(name: str) -> None:
    check_everywhere(CASES[name], {"x": leaf(6, 8), "w": leaf(8, 8, parameter=True)})


@POLICY
def test_a_gradient_that_is_retained_is_that_of_plain_training(policy: str) -> None:
    x = leaf(6, 8)

    def retained() -> tuple[Tensor, Tensor]:
        y = x.cumsum(0)
        y.retain_grad()
        return y, (y.exp() * y).sum()

    y, loss = retained()
    loss.backward()
    assert y.grad is not None
    with open_engine(policy) as engine:
        with forward_pass(engine, x):
            z, loss = retained()
        loss.backward()
        assert z.grad is not None and same_bits(y.grad, z.grad)
        del z, loss
        assert_nothing_left(engine)


def _model_with_hooks() -> nn.Module:
    def halved(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def make() -> nn.Module:
        part = Part(gated, a=linear(), b=linear())
        inner: Any = part
        inner.a.register_full_backward_hook(lambda m, into, out: tuple(g if g is None else g * 2 for g in into))
        part.register_full_backward_hook(lambda m, into, out: None)
        part.register_full_backward_pre_hook(lambda m, out: tuple(g * 1.5 for g in out))
        inner.b.weight.register_post_accumulate_grad_hook(halved)
        inner.a.weight.register_hook(lambda g: g * 3)
        part.register_forward_hook(lambda m, given, made: made * 1.1)
        inner.a.register_forward_pre_hook(lambda m, given: (given[0] * 0.9,))
        return part

    return Model(make)


@POLICY
def test_hooks_on_modules_and_weights(policy: str) -> None:
    check_model(_model_with_hooks(), torch.randn(4, 8), policy)


@POLICY
@pytest.mark.parametrize("inplace", ["no_grad", "data"])
def test_an_optimizer_that_steps_in_backward(policy: str, inplace: str) -> None:
    """Weights change before the saved tensors of earlier blocks are read."""

    def stepped(p: Any) -> None:
        with torch.no_grad():
            (p if inplace == "no_grad" else p.data).add_(p.grad, alpha=-0.01)

    model = gated_model()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    check_model(model, torch.randn(4, 8), policy, steps=4)


@POLICY
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_over_a_whole_step(policy: str) -> None:
    with torch.autograd.set_detect_anomaly(True):
        check_model(gated_model(), torch.randn(4, 8), policy)


# Nested contexts


@POLICY
@pytest.mark.parametrize("outer", ["save_on_cpu", "oracle"])
def test_a_context_of_ours_inside_other_hooks(policy: str, outer: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)

    def run(around: Any, inside: Any) -> list[Tensor]:
        with around:
            y = x.exp()
            with inside:
                z = layer(y, w)
            z = z.cos() * y
        return list(torch.autograd.grad(z.sum(), [x, w]))

    expected = run(contextlib.nullcontext(), contextlib.nullcontext())
    around = save_on_cpu() if outer == "save_on_cpu" else Oracle()
    inside = ebbtide.offload_saved_tensors(policy=policy, min_bytes=0, verify=True)
    assert all(map(same_bits, expected, run(around, inside))) and hooks_are_closed()


@POLICY
def test_other_hooks_inside_a_context_of_ours(policy: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    expected = torch.autograd.grad(layer(layer(x, w), w).sum(), [x, w])
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0, verify=True):
        y = layer(x, w)
        with save_on_cpu():
            y = layer(y, w)
    assert all(map(same_bits, expected, torch.autograd.grad(y.sum(), [x, w]))) and hooks_are_closed()


@POLICY
@pytest.mark.parametrize("inner", ["minimal", "offload"])
def test_engines_in_engines_share_storages(policy: str, inner: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)

    def run(first: Any, second: Any) -> list[Tensor]:
        with first():
            y = x.exp()
            z = y * y.sin()
            with second():
                z = z * layer(y, w) * y.t().t()
            z = z * y.cos()
        return list(torch.autograd.grad(z.sum(), [x, w]))

    expected = run(contextlib.nullcontext, contextlib.nullcontext)
    with open_engine(policy, verify=True) as one, open_engine(inner, verify=True) as two:
        for _ in range(2):
            one.begin_pass()
            two.begin_pass()
            assert all(map(same_bits, expected, run(lambda: block(one, x), lambda: block(two, x))))
            assert_nothing_left(one)
            assert_nothing_left(two)


def test_a_context_may_not_be_entered_where_hooks_are_disabled() -> None:
    with (
        disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        ebbtide.offload_saved_tensors(min_bytes=0),
    ):
        pass
    assert hooks_are_closed()


@POLICY
def test_a_hook_that_opens_a_graph_in_backward(policy: str) -> None:
    """A tensor hook runs a forward and a backward of the same model during the outer backward."""
    model, x = gated_model(), torch.randn(4, 8)
    probe = torch.randn(4, 8)
    depth: list[int] = []

    def nested(grad: Tensor) -> Tensor:
        if depth:
            return grad
        depth.append(1)
        with torch.enable_grad():
            fed = probe.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(fed).sum(), fed)
        depth.pop()
        return grad + slope.mean()

    model.layers[1].register_forward_hook(lambda m, given, made: made.register_hook(nested) and None)
    expected = training_step(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for _ in range(2):
            assert differing(expected, training_step(model, x)) == []
            assert_nothing_left(handle._engine)
