"""``torch.func`` over a model under a handle: the transforms work, give plain results, and nothing is offloaded there.

Torch refuses saved-tensor hooks inside ``grad``, ``vjp``, ``jacrev`` and ``hessian``, and inside the others a saved
tensor is a wrapper of their level; so the hooks stay closed while a transform is active, and the handle says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import ebbtide
from ebbtide.base.actions import Action
from tests.helpers.engines import POLICIES, ByTable, assert_nothing_left, hooks_are_closed
from tests.helpers.oracle import same_bits
from tests.helpers.parts import WIDTH, differing, gated_model, training_step
from tests.helpers.twice import Block, Stack, sgd, step_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on first use

Transform = Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]


def loss(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, weights, (x,)).square().sum()


def _weight(found: dict[str, Tensor]) -> Tensor:
    return found["layers.0.a.weight"]


TRANSFORMS: dict[str, Transform] = {
    "grad of a function of the weights": lambda m, w, x: _weight(grad(lambda v: loss(m, v, x))(w)),
    "grad of a function of the input": lambda m, w, x: grad(lambda v: m(v).sum())(x),
    "vjp": lambda m, w, x: vjp(m, x)[1](torch.ones_like(x))[0],
    "jvp": lambda m, w, x: jvp(m, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda m, w, x: vmap(m)(x),
    "gradients by example": lambda m, w, x: _weight(vmap(grad(lambda v, r: loss(m, v, r)), in_dims=(None, 0))(w, x)),
    "jacrev": lambda m, w, x: jacrev(m)(x[:2]),
    "jacfwd": lambda m, w, x: jacfwd(m)(x[:2]),
    "hessian": lambda m, w, x: hessian(lambda v: m(v).sum())(x[:1]),
    "an ensemble by vmap": lambda m, w, x: vmap(lambda v: functional_call(m, v, (x,)))(
        {k: torch.stack([t, 2 * t]) for k, t in w.items()}
    ),
}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach() for k, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["keep", "offload", "minimal"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_plain_results(name: str, policy: str) -> None:
    model, x, transform = gated_model(), torch.randn(4, WIDTH), TRANSFORMS[name]
    weights = _weights(model)
    expected = transform(model, weights, x)
    after = training_step(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
        for _ in range(2):
            assert same_bits(expected, transform(model, weights, x))
            assert hooks_are_closed() and handle.stats().live_tickets == 0
        assert handle.stats().packs == 0
        assert differing(after, training_step(model, x)) == [], "an ordinary step afterwards is offloaded"
        assert handle.stats().packs > 0
        assert_nothing_left(handle._engine)


def test_a_transform_that_is_not_offloaded_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = gated_model(), torch.randn(4, WIDTH)
    caplog.set_level(logging.WARNING, logger="ebbtide")
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        for _ in range(2):
            vjp(model, x)
            vmap(model)(x)
        training_step(model, x)
    said = [r.getMessage() for r in caplog.records if "torch.func" in r.getMessage()]
    assert len(said) == 1 and "offload" in said[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_functional_call_alone_is_an_ordinary_forward(policy: str) -> None:
    model, x = gated_model(), torch.randn(4, WIDTH)

    def gradients() -> list[Tensor]:
        weights = {k: (2 * t).requires_grad_() for k, t in _weights(model).items()}
        return list(torch.autograd.grad(loss(model, weights, x), list(weights.values())))

    expected = gradients()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, verify=True) as handle:
        for _ in range(2):
            assert all(map(same_bits, expected, gradients()))
            assert handle.stats().packs > 0
            assert_nothing_left(handle._engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_torchs_older_functional_api(policy: str) -> None:
    model, x = gated_model(), torch.randn(4, WIDTH)
    functional: Any = torch.autograd.functional

    def found() -> list[Tensor]:
        by_rows = functional.jacobian(model, x)
        at_once = functional.jacobian(model, x, vectorize=True)
        second = functional.hessian(lambda v: model(v).sum(), x[:1])
        fed = x.clone().requires_grad_()
        many = torch.autograd.grad(model(fed), fed, torch.eye(x.numel()).view(-1, *x.shape), is_grads_batched=True)
        return [by_rows, at_once, second, *many]

    expected = found()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
        assert all(map(same_bits, expected, found()))
        assert_nothing_left(handle._engine)


def test_a_transform_under_an_open_context_is_refused_by_torch() -> None:
    x = torch.randn(4)
    with (
        ebbtide.offload_saved_tensors(min_bytes=0),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        grad(lambda v: v.sin().sum())(x)
    assert hooks_are_closed()


@pytest.mark.parametrize("policy", ["offload", "minimal"])
def test_forward_mode_gradients(policy: str) -> None:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))  # whose backward has tangents too
    model, x = nn.Sequential(*blocks), torch.randn(4, WIDTH)

    def tangents() -> list[Tensor]:
        with forward_ad.dual_level():
            fed = x.clone().requires_grad_()
            y = forward_ad.unpack_dual(model(forward_ad.make_dual(fed, torch.ones_like(x))))
            return [y.tangent.detach(), *torch.autograd.grad(y.primal.sum(), fed)]

    expected = tangents()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, target="disk") as handle:
        for _ in range(2):
            assert all(map(same_bits, expected, tangents()))
            assert_nothing_left(handle._engine)


@pytest.mark.parametrize("tracer", [make_fx, "linearize"], ids=["make_fx", "linearize"])
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_a_traced_forward_is_left_alone(tracer: Any) -> None:
    model, x = gated_model(), torch.randn(4, WIDTH)

    def traced() -> Tensor:
        return linearize(model, x)[1](torch.ones_like(x)) if tracer == "linearize" else make_fx(model)(x)(x)

    expected = traced().detach()
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        assert same_bits(expected, traced())
        assert hooks_are_closed()
        if tracer is make_fx:  # linearize begins with an ordinary forward
            assert handle.stats().packs == 0


def test_a_tangent_of_zeros_is_no_memory() -> None:
    x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)

    def step() -> list[Tensor]:
        with forward_ad.dual_level():
            d = forward_ad.make_dual(x, torch.ones_like(x))
            tangent = forward_ad.unpack_dual(torch.tanh(d @ w) * d).tangent
            assert tangent is not None
            return [tangent.detach(), *torch.autograd.grad(tangent.sum(), (x, w))]

    expected = step()
    with ebbtide.offload_saved_tensors(min_bytes=0):
        assert all(map(same_bits, expected, step()))


@pytest.mark.parametrize("tracer", ["export", "strict export", "fx", "jit"])
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.torch.jit.* is deprecated", "ignore:The .grad attribute of a Tensor"
)
def test_a_model_under_a_handle_is_exported_as_it_is_alone(tracer: str) -> None:
    model, x = gated_model(), torch.randn(4, WIDTH)

    def exported() -> Tensor:
        if tracer == "fx":
            return torch.fx.symbolic_trace(model)(x)
        if tracer == "jit":
            return torch.jit.trace(model, x)(x)
        return torch.export.export(model, (x,), strict=tracer == "strict export").module()(x)

    expected = exported().detach()
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        assert same_bits(expected, exported())
        assert hooks_are_closed()


def test_a_model_whose_blocks_are_checkpointed_is_traced_by_fx(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(lambda model: model(torch.ones(8, 16)).square().mean())
    model, plan = sgd(Stack(*(Block() for _ in range(3)))), ByTable(Action.KEEP, Action.CHECKPOINT)
    with ebbtide.enable_activation_offloading(model, policy=plan, min_bytes=0) as handle:
        for _ in range(2):
            step(model, 0)
        before = handle.stats(), handle.explain()
        assert before[0].checkpointed_blocks == 3
        assert torch.fx.symbolic_trace(model)(torch.ones(8, 16)).shape == (8, 16)
        assert (handle.stats(), handle.explain()) == before
        step(model, 0)
        assert handle.stats().checkpointed_blocks == 3
    assert "nothing is offloaded inside tracing (torch.fx)" in caplog.text and "Proxy" not in caplog.text


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_without_memory(policy: str) -> None:
    """Fake and meta tensors go through a model under a handle, as in memory estimates."""
    model, x = gated_model(), torch.randn(4, WIDTH)
    with torch.device("meta"):
        empty = gated_model()
    for made in (model, empty):
        with ebbtide.enable_activation_offloading(made, policy=policy, min_bytes=0) as handle:
            if made is empty:
                made(torch.empty(4, WIDTH, device="meta")).sum().backward()
            else:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    made(mode.from_tensor(x)).sum().backward()
            assert handle.stats().offloaded_bytes == 0
            assert_nothing_left(handle._engine)
    assert empty.layers[0].a.weight.grad is not None


class TakesGradient(nn.Module):
    """A block that calls a transform inside its forward, where hooks are open."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + grad(lambda v: v.square().sum())(x)


def test_a_gradient_transform_inside_a_block_is_torchs_error_with_a_hint() -> None:
    model = nn.Sequential(*[TakesGradient() for _ in range(3)])
    with ebbtide.enable_activation_offloading(model, min_bytes=0):
        with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
            model(torch.randn(2, 8))
        (note,) = caught.value.__notes__
        assert "block '0'" in note and "hint: take the gradient with torch.autograd.grad" in note
    assert model(torch.randn(2, 8)).shape == (2, 8)
