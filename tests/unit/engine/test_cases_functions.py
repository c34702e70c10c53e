"""Functions with their own backward, under every policy over both tiers: tensors they save, change and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import ebbtide
from tests.helpers.engines import (
    POLICIES,
    Leaves,
    assert_nothing_left,
    check_everywhere,
    compare,
    forward_pass,
    leaf,
    observe,
    open_engine,
)


class SavesInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class SavesIntermediates(Function):
    """Saves private tensors, a view of one, None, and attributes that no hook sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y, y.view(-1)[2:10], None)
        ctx.unsaved, ctx.number = y.cos(), 3
        return y * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y, part, nothing = ctx.saved_tensors
        assert nothing is None and ctx.number == 3
        return grad * y + part.sum() * ctx.unsaved + x


class SavesViewsMadeInside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.t(), x[1:3], x.exp())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, turned, rows, y = ctx.saved_tensors
        found = grad * x + turned.t() + y
        found[1:3] += rows
        return found


class MarksDirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class SortsWithIndices(Function):
    """Outputs without a gradient, and gradients that may be absent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, order = x.sort(-1)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order, values)
        return values, order, values * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_order: Tensor | None, doubled: Tensor | None) -> Tensor:
        order, values = ctx.saved_tensors
        assert of_order is None
        found = torch.zeros_like(values)
        for part, factor in ((grad, 1), (doubled, 2)):
            found = found if part is None else found + part * factor
        return torch.zeros_like(values).scatter(-1, order, found)


class WithVmapRule(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp() * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp() * (x + 1)


class WithSetupContext(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, y, product = ctx.saved_tensors
        return grad * y + of_sum + 0 * product, grad * x + of_sum


class OnceDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class ReturnsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class ReturnsView(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(ctx.shape)


class GradientIsViewOfSaved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.view(-1).view(x.shape)


class ChangesSavedInBackward(Function):
    """Its backward overwrites its saved tensor with the result, like fused kernels that save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2)


class HoldsGraph(Function):
    """Has its own graph, made in forward and used in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = (ctx.x.sin() * ctx.x).sum()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.autograd.grad(ctx.y, ctx.x, grad)[0]


class NamesItself(Function):
    """Sets attributes that hide what torch says of a node: a custom function's is its ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.name, ctx.variable, ctx.factor = "layer", 3, factor
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert (ctx.name, ctx.variable) == ("layer", 3)
        return grad * ctx.factor, None


CASES: dict[str, Callable[[Leaves], list[Tensor]]] = {}


def case(program: Callable[[Leaves], list[Tensor]]) -> Callable[[Leaves], list[Tensor]]:
    CASES[program.__name__] = program
    return program


@case
def saved_inputs(v: Leaves) -> list[Tensor]:
    return [SavesInput.apply(v["x"]), SavesInput.apply(v["x"].cumsum(0)), SavesInput.apply(v["x"].t()[:4])]


@case
def saved_intermediates_and_attributes(v: Leaves) -> list[Tensor]:
    return [SavesIntermediates.apply(v["x"].cumsum(0))]


@case
def saved_views_made_inside(v: Leaves) -> list[Tensor]:
    return [SavesViewsMadeInside.apply(v["x"].cumsum(0))]


@case
def mark_dirty(v: Leaves) -> list[Tensor]:
    y = MarksDirty.apply(v["x"] * 1)
    return [y * 2, y.sin()]


@case
def mark_dirty_on_a_view(v: Leaves) -> list[Tensor]:
    base = v["x"] * 1
    changed = MarksDirty.apply(base.t()[:4])
    return [changed * 2, base.sin()]


@case
def mark_non_differentiable_without_materialized_gradients(v: Leaves) -> list[Tensor]:
    values, order, _ = SortsWithIndices.apply(v["x"].cumsum(0))
    return [values * values, v["x"].gather(-1, order).sin()]


@case
def setup_context(v: Leaves) -> list[Tensor]:
    product, total = WithSetupContext.apply(v["x"].cumsum(0), v["x"].sin())
    return [product * total]


@case
def a_generated_vmap_rule(v: Leaves) -> list[Tensor]:
    return [torch.vmap(WithVmapRule.apply)(v["x"].cumsum(0)).sin()]


@case
def differentiable_once(v: Leaves) -> list[Tensor]:
    return [OnceDifferentiable.apply(v["x"] * 2) * v["x"]]


@case
def its_input_returned(v: Leaves) -> list[Tensor]:
    y = ReturnsInput.apply(v["x"] * 1)
    return [y * y]


@case
def a_view_returned(v: Leaves) -> list[Tensor]:
    y = ReturnsView.apply(v["x"] * 1)
    return [y * y]


@case
def a_gradient_that_is_a_view_of_what_was_saved(v: Leaves) -> list[Tensor]:
    y = v["x"].exp()
    return [GradientIsViewOfSaved.apply(v["x"].sin()) * 2, GradientIsViewOfSaved.apply(v["x"]), y * y]


@case
def what_was_saved_changed_in_backward(v: Leaves) -> list[Tensor]:
    return [ChangesSavedInBackward.apply(v["x"].cumsum(0))]


@case
def a_graph_in_a_function(v: Leaves) -> list[Tensor]:
    return [HoldsGraph.apply(v["x"] * 2)]


@case
def attributes_that_hide_those_of_a_node(v: Leaves) -> list[Tensor]:
    doubled, viewed = NamesItself.apply(v["x"].sin(), 2), NamesItself.apply(v["x"].exp(), 1)
    return [doubled * doubled, NamesItself.apply(v["x"], 3).double().sin(), (viewed + v["x"]).sin(), viewed * viewed]


@pytest.mark.parametrize("name", CASES)
def test_a_function_of_the_users_gives_plain_trainings_bits(name: str) -> None:
    check_everywhere(CASES[name], {"x": leaf(6, 8), "w": leaf(8, 8, parameter=True)})


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_backward_changes_others_cannot_read(policy: str, tier: str) -> None:
    """Plain autograd sees the change in the version that all readers share, and so must every reader here."""

    def program(v: Leaves) -> list[Tensor]:
        y = v["x"].cumsum(0).exp()  # saves its output
        return [ChangesSavedInBackward.apply(y) * 1.0, y.sum()]

    leaves = {"x": leaf(6, 8)}
    expected = observe(program, leaves)
    assert expected.error == (RuntimeError, "backward"), "the case itself"
    with open_engine(policy, tier) as engine:
        for _ in range(2):
            assert compare(expected, observe(program, leaves, engine)) == []
            assert_nothing_left(engine)


@pytest.mark.parametrize("more", [0, 3])
def test_noise_that_is_drawn_after_it_was_saved(more: int) -> None:
    """Its version does not show it; torch's save_on_cpu copies the earlier contents."""

    def program(v: Leaves) -> list[Tensor]:
        y = F.rrelu(v["x"].sin(), training=True)
        for _ in range(more):
            y = F.rrelu(y.sin(), training=True).exp()
        return [y]

    leaves = {"x": leaf(6, 8)}
    with open_engine("offload", rate=1e12, window_bytes=1) as engine:
        assert compare(observe(program, leaves), observe(program, leaves, engine)) == []


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("operator", [torch.nn.BatchNorm1d(8), torch.nn.RReLU()], ids=["statistics", "noise"])
def test_what_is_written_after_it_was_saved_passes_the_check_of_bytes(operator: torch.nn.Module, inside: bool) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    with ebbtide.offload_saved_tensors(verify=True, min_bytes=0, window=1):
        y = operator(x.sin())
        if inside:
            y.sum().backward()  # no later operator saves anything
        else:
            loss = y.square().mean()
    if not inside:
        loss.backward()
    assert x.grad is not None


class Tagged(Tensor):
    """A subclass unknown to torch, with an attribute."""

    tag = ""


class ReadsAttributes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, constant)
        return x @ weight * constant

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, constant = ctx.saved_tensors
        return (grad * constant * weight.scale) @ weight.t() * len(constant.tag), None, None


@pytest.mark.parametrize("policy", ["keep", "offload"])
@pytest.mark.parametrize("kind", [Tagged, Tensor])
def test_attributes_of_saved_tensors_that_need_no_gradient(kind: type[Tensor], policy: str) -> None:
    """Fused layers read attributes of a frozen weight; torch itself drops attributes if a gradient is needed."""
    weight: Any = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
    constant: Any = torch.randn(8).as_subclass(kind)
    weight.scale, constant.tag = 2.0, "abc"
    x = leaf(6, 8)
    expected = torch.autograd.grad(ReadsAttributes.apply(x.exp(), weight, constant).sum(), x)[0]
    with open_engine(policy) as engine:
        with forward_pass(engine, x, weights=[weight]):
            y = ReadsAttributes.apply(x.exp(), weight, constant).sum()
        assert torch.equal(expected.as_subclass(Tensor), torch.autograd.grad(y, x)[0].as_subclass(Tensor))
