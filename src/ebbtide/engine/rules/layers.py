"""Rules for matrix products, convolutions, pooling and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ebbtide.engine.build import NodeView, Rule
from ebbtide.engine.declared import DeclaredRule, Fn, From, Made, input_shape
from ebbtide.engine.guard import Watched
from ebbtide.engine.rules.making import expression, operator
from ebbtide.engine.tickets import Expr, LightTicket, Operand, Ticket

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_BatchNorm = torch.nn.modules.batchnorm._NormBase  # instance norms among them
_Convolution = torch.nn.modules.conv._ConvNd


def _norm(kind: type[torch.nn.Module], call: Callable[..., torch.Tensor]) -> Rule:
    """Rule for a norm whose node lacks its eps: the record of its leaf module has it."""

    def rule(n: NodeView) -> Expr | None:
        record = n.record
        if n.output_nr or record is None or not issubclass(record.kind, kind):
            return None
        shape, eps = n.constant("normalized_shape"), record.eps
        weight, bias = (n.operand(name, i) if n.saved(name) else _ABSENT for i, name in ((1, "weight"), (2, "bias")))
        return _normed(n, lambda x, w, b: call(x, shape, w, b, eps), weight, bias)

    return rule


def _group_norm(n: NodeView) -> Expr | None:
    """Rule for a group norm. Its node has its eps up to torch 2.13; later only the record of its leaf module has."""
    record, kind, eps = n.record, torch.nn.GroupNorm, None
    if hasattr(n.node, "_saved_eps"):
        eps = n.constant("eps")
    elif record is not None and issubclass(record.kind, kind):
        eps = record.eps
    if n.output_nr or eps is None:
        return None
    groups = n.constant("group")
    return _normed(n, lambda x, w, b: F.group_norm(x, groups, w, b, eps), *_affine(n, kind))


def _batch_norm(eps_name: str) -> Rule:
    """Rule for a batch norm. In training it takes the batch's statistics; a recompute touches no running ones."""

    def rule(n: NodeView) -> Expr | None:
        if n.output_nr:
            return None
        eps, training = n.constant(eps_name), n.constant("training")
        running = [] if training else [n.slot("running_mean"), n.slot("running_var")]

        def call(x: torch.Tensor, w: Any, b: Any, mean: Any = None, variance: Any = None) -> torch.Tensor:
            return F.batch_norm(x, mean, variance, w, b, training, 0.0, eps)

        return _normed(n, call, *_affine(n, _BatchNorm), more=running)

    return rule


class _Absent:
    """A weight or bias that a norm does not have."""


_ABSENT = _Absent()
Affine = Operand | _Absent | None


def _affine(n: NodeView, kind: type[torch.nn.Module]) -> tuple[Affine, Affine]:
    """Return weight and bias of a norm that saves its weight alone; None for one that is unavailable or unknown.

    Args:
        n: Its node.
        kind: The layer whose record says whether a frozen bias is there: no other layer knows.
    """
    weight = n.operand("weight", 1) if n.saved("weight") else _ABSENT
    if not n.needs_no_gradient(2):
        return weight, n.input(2)
    record = n.record
    if record is None or not issubclass(record.kind, kind):  # frozen or absent: unknown which
        return weight, None
    return weight, _ABSENT if record.bias is None else _bias(n, 2, kind)


def _normed(
    n: NodeView, call: Callable[..., torch.Tensor], weight: Affine, bias: Affine,
    *, more: Sequence[Operand | None] = (),
) -> Expr | None:  # fmt: skip
    present = [not isinstance(a, _Absent) for a in (weight, bias)]
    affine = [a for a in (weight, bias) if not isinstance(a, _Absent)]

    def again(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        left = iter(values)
        w, b = (next(left) if is_present else None for is_present in present)
        return call(x, w, b, *left)

    return expression(n, again, [n.operand("input", 0), *affine, *more])


def _bias(n: NodeView, index: int, kind: type[torch.nn.Module]) -> Operand | None:
    """Return a bias, which no operator saves: where the operator's input came from, or as the leaf module has it.

    Under autocast the operator took a copy of the module's in its own type.

    Args:
        n: The operator's node.
        index: Which of its inputs the bias is.
        kind: The layer whose record says what a frozen bias is.
    """
    found, record = n.input(index), n.record
    if found is not None or record is None or record.bias is None or not n.needs_no_gradient(index):
        return found
    if not issubclass(record.kind, kind):
        return None
    weight, dtype = n.weight(record.bias), n.dtype
    if weight is None or record.bias.dtype is dtype:
        return weight
    return Expr(lambda w: w.to(dtype), (weight,), key=("cast", dtype))


def _product(fn: Fn, left: str, right: str) -> DeclaredRule:
    """Rule for a product of two matrices."""

    def make(size: torch.Size, length: int) -> Made:
        return Made(fn, flops=_work(size, length))

    return DeclaredRule(make, [From(0, left), From(1, right)], metadata=["shape"], facts=[_inner_length])


def _sum_and_product(fn: Fn, left: str, right: str) -> Rule:
    """Rule for a product of two matrices that is added to a bias."""

    def rule(n: NodeView) -> Expr | None:
        alpha, beta = n.constant("alpha"), n.constant("beta")
        return expression(
            n,
            lambda c, a, b: fn(c, a, b, alpha=alpha, beta=beta),
            [_bias(n, 0, torch.nn.Linear), n.operand(left, 1), n.operand(right, 2)],
            flops=_work(n.shape, _inner_length(n.node, 0, first=1)),
        )

    return rule


def _work(size: Sequence[int], length: int) -> float:
    """Return the FLOP of a product, 2 for each element of the result and each summed over."""
    return 2.0 * math.prod(size) * length


def _inner_length(node: Node, output_nr: int, *, first: int = 0) -> int:
    """Return the length that a product sums over, from whichever of its factors is known."""
    for index, dim in ((first, -1), (first + 1, -2)):
        shape = input_shape(node, index)
        if shape:
            return shape[dim]
    return 1


def _shape_of(operand: Operand | None) -> tuple[int, ...]:
    """Return the shape of an operand of which the graph says nothing, such as a frozen weight."""
    if isinstance(operand, Ticket):
        return operand.layout.size
    return tuple(operand.tensor.shape) if isinstance(operand, (LightTicket, Watched)) else ()


def _grouped_product(n: NodeView) -> Expr | None:
    operands = [n.operand("self", 0), n.operand("mat2", 1), n.slot("offs")]
    work = 2.0 * math.prod(n.shape) * n.constant("self_sym_sizes")[-1]
    return expression(n, lambda a, b, offs: torch.ops.aten._grouped_mm(a, b, offs), operands, flops=work)


def _convolution(n: NodeView) -> Expr | None:
    """No rule where cuDNN benchmarks algorithms: each thread does so itself, and backward runs in another thread."""
    if n.device.type != "cpu" and torch.backends.cudnn.benchmark:
        return None
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    values = [n.constant(name) for name in names]
    operands = [n.operand("input", 0), n.operand("weight", 1)]
    if any(n.constant("bias_sym_sizes_opt")):
        operands.append(_bias(n, 2, _Convolution))

    def again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.convolution(x, weight, bias, *values)

    shape = n.input_shape(1) or _shape_of(operands[1])
    moved = n.input_shape(0) if values[3] else n.shape
    work = 2.0 * math.prod(moved or n.shape) * math.prod(shape[1:])
    return expression(n, again, operands, flops=work)


def products() -> dict[str, Rule]:
    """Return the rules for matrix products and convolutions."""
    return {
        "AddmmBackward0": _sum_and_product(torch.addmm, "mat1", "mat2"),
        "BaddbmmBackward0": _sum_and_product(torch.baddbmm, "batch1", "batch2"),
        "BmmBackward0": _product(torch.bmm, "self", "mat2"),
        "ConvolutionBackward0": _convolution,
        "GroupedMmBackward0": _grouped_product,
        "MmBackward0": _product(torch.mm, "self", "mat2"),
    }


def norms() -> dict[str, Rule]:
    """Return the rules for norms and pooling."""
    pool = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    return {
        "AvgPool2DBackward0": operator(F.avg_pool2d, *pool),
        "AvgPool3DBackward0": operator(F.avg_pool3d, *pool),
        "CudnnBatchNormBackward0": _batch_norm("epsilon"),
        "FusedRmsNormBackward0": _norm(torch.nn.RMSNorm, _rms_norm),
        "MiopenBatchNormBackward0": _batch_norm("epsilon"),
        "NativeBatchNormBackward0": _batch_norm("eps"),
        "NativeGroupNormBackward0": _group_norm,
        "NativeLayerNormBackward0": _norm(torch.nn.LayerNorm, F.layer_norm),
    }


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: None, eps: float | None
) -> torch.Tensor:
    return F.rms_norm(x, shape, weight, eps)
