"""Rules for element-wise operators, casts, reductions along some dimensions, and softmax."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ebbtide.engine.build import NodeView, Rule
from ebbtide.engine.declared import DeclaredRule, Fn, From, Made, output_number
from ebbtide.engine.rules.making import binary, expression, operator, typed
from ebbtide.engine.tickets import Expr, KeptTicket, Ticket

if TYPE_CHECKING:
    from torch.autograd.graph import Node


def _input_type(node: Node, output_nr: int) -> torch.dtype | None:
    source, number = node.next_functions[0]
    return None if source is None else source._input_metadata[number].dtype


def _make_cast(place: torch.device, kind: torch.dtype, size: torch.Size, before: torch.dtype | None) -> Made:
    # Place and type may be the operand's own: copy=True makes another tensor then, too. What changes neither may change
    # the memory format: see ``_clone``.
    return Made(lambda x: x.to(place, kind, copy=True), loose=before == kind and len(size) in (4, 5))


def _clone(n: NodeView) -> Expr | None:
    """The node has no memory format: the layout of an entry restores it, but other values have no layout."""
    operand = n.input(0)
    contiguous = isinstance(operand, Ticket) and operand.layout.contiguous
    contiguous = contiguous or (isinstance(operand, KeptTicket) and operand.tensor.is_contiguous())
    # Of four or five dimensions the clone of a contiguous tensor may be the one that made it ``channels_last``.
    loose = not contiguous or len(n.shape) in (4, 5)
    return expression(n, lambda x: x.clone(memory_format=torch.contiguous_format), [operand], loose=loose)


def _three(fn: Fn, *names: str) -> DeclaredRule:
    operands = [From(index, name) for index, name in enumerate(names)]
    return DeclaredRule(lambda value: lambda x, y, z: fn(x, y, z, value=value), operands, constants=["value"])


def _make_cumsum(dim: int, place: torch.device, kind: torch.dtype) -> Fn | None:
    """No rule on an accelerator: there a cumulative sum of floats may be added in another order each time."""
    on_host = place.type == "cpu" or not kind.is_floating_point
    return (lambda x: torch.cumsum(x, dim, dtype=kind)) if on_host else None


def _vector_norm(x: torch.Tensor, *constants: Any, dtype: torch.dtype) -> torch.Tensor:
    """Of complex numbers torch wants the complex type, and the norm has that of their parts."""
    return torch.linalg.vector_norm(x, *constants, dtype=dtype.to_complex() if x.is_complex() else dtype)


def _make_dropout(p: float, output_nr: int) -> Fn | None:
    """No random numbers are drawn: the mask was saved."""
    if output_nr:
        return None
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    # Devices round 1 - p to the type in which they multiply, float32 for half types, and divide then: ATen, Dropout.cu.
    scale32 = 0.0 if p == 1 else 1.0 / ctypes.c_float(1.0 - p).value

    def again(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":  # scales the mask and rounds it; devices have one kernel for all
            return x * mask.to(x.dtype).mul_(scale)
        return torch.ops.aten.native_dropout_backward(x, mask, scale if x.dtype is torch.float64 else scale32)

    return again


def _in_place_on_view(n: NodeView) -> Expr | None:
    """Rule for an activation in place on a view of everything: the node hides its own, and the layer says what it is.

    The view's shape is another than the value's, which does not matter to a function of each number.
    """
    computed, operand = n.in_place, n.input(0)
    if computed is None or computed.fn is None or operand is None:
        return None
    return Expr(computed.fn, (operand,), key=(computed.kind, n.dtype), dtype=n.dtype)


_cast = DeclaredRule(_make_cast, [From(0)], metadata=["device", "dtype", "shape"], facts=[_input_type])
_where = DeclaredRule(lambda: torch.where, [From(None, "condition"), From(0), From(1)])
_masked_fill = DeclaredRule(
    lambda: lambda x, mask, value: x.masked_fill(mask, value), [From(0), From(None, "mask"), From(1)]
)
_clamp_between = DeclaredRule(lambda: torch.clamp, [From(0, "self"), From(None, "min"), From(None, "max")])
_power_of_number = DeclaredRule(lambda base: lambda x: torch.pow(base, x), [From(0, "exponent")], constants=["self"])
_lerp = DeclaredRule(
    lambda weight: lambda x, y: torch.lerp(x, y, weight), [From(0, "self"), From(1, "end")], constants=["weight"]
)
_cumsum = DeclaredRule(_make_cumsum, [From(0, "self")], constants=["dim"], metadata=["device", "dtype"])
_dropout = DeclaredRule(_make_dropout, [From(0), From(None, "result1")], constants=["p"], facts=[output_number])


def arithmetic() -> dict[str, Rule]:
    """Return the rules for arithmetic, comparison and casts."""
    return {
        "AddBackward0": binary(torch.add, alpha=True),
        "AddcmulBackward0": _three(torch.addcmul, "self", "tensor1", "tensor2"),
        "ClampBackward0": _clamp_between,
        "ClampBackward1": operator(torch.clamp, min="min", max="max"),
        "ClampMaxBackward0": operator(torch.clamp_max, "max"),
        "ClampMinBackward0": operator(torch.clamp_min, "min"),
        "CloneBackward0": _clone,
        "DivBackward0": binary(torch.div),
        "DivBackward1": operator(torch.ops.aten.div.Scalar, "other"),
        "LerpBackward0": _lerp,
        "MaskedFillBackward1": _masked_fill,
        "MaximumBackward0": binary(torch.maximum),
        "MinimumBackward0": binary(torch.minimum),
        "MulBackward0": binary(torch.mul),
        "MulBackward1": operator(torch.ops.aten.mul.Scalar, "other"),
        "NativeDropoutBackward0": _dropout,
        "PowBackward0": operator(torch.pow, "exponent"),
        "PowBackward1": binary(torch.pow, names=("self", "exponent")),
        "PowBackward2": _power_of_number,
        "RsubBackward0": binary(torch.rsub, alpha=True),
        "SubBackward0": binary(torch.sub, alpha=True),
        "ToCopyBackward0": _cast,
        "WhereBackward0": _where,
    }


def functions() -> dict[str, Rule]:
    """Return the rules for functions of one number, activations among them.

    A node ``...Backward1`` of an activation is that of its operator in place, which saves the result.
    """
    return {
        "AbsBackward0": operator(torch.abs),
        "CeluBackward0": operator(F.celu, alpha="alpha"),
        "CeluBackward1": operator(F.celu, alpha="alpha"),
        "CosBackward0": operator(torch.cos),
        "EluBackward0": operator(torch.ops.aten.elu, "alpha", "scale", "input_scale"),
        "EluBackward1": operator(torch.ops.aten.elu, "alpha", "scale", "input_scale"),
        "ErfBackward0": operator(torch.erf),
        "ExpBackward0": operator(torch.exp),
        "Expm1Backward0": operator(torch.expm1),
        "GeluBackward0": operator(F.gelu, approximate="approximate"),
        "GluBackward0": operator(F.glu, dim="dim"),
        "HardsigmoidBackward0": operator(F.hardsigmoid),
        "HardswishBackward0": operator(F.hardswish),
        "HardtanhBackward0": operator(F.hardtanh, min_val="min_val", max_val="max_val"),
        "LeakyReluBackward0": operator(F.leaky_relu, negative_slope="negative_slope"),
        "LeakyReluBackward1": operator(F.leaky_relu, negative_slope="negative_slope"),
        "Log1PBackward0": operator(torch.log1p),
        "LogBackward0": operator(torch.log),
        "LogSigmoidBackward0": operator(F.logsigmoid),
        "MishBackward0": operator(F.mish),
        "NegBackward0": operator(torch.neg),
        "ReciprocalBackward0": operator(torch.reciprocal),
        "ReluBackward0": operator(F.relu),
        "RsqrtBackward0": operator(torch.rsqrt),
        "SigmoidBackward0": operator(torch.sigmoid),
        "SiluBackward0": operator(F.silu),
        "SinBackward0": operator(torch.sin),
        "SoftplusBackward0": operator(F.softplus, beta="beta", threshold="threshold"),
        "SqrtBackward0": operator(torch.sqrt),
        "TanhBackward0": operator(torch.tanh),
        "torch::autograd::CopySlices": _in_place_on_view,
    }


def reductions() -> dict[str, Rule]:
    """Return the rules for reductions, scans and softmax: exact, for the same kernel runs on the same values."""
    return {
        "AmaxBackward0": operator(torch.amax, "dim", "keepdim"),
        "CumsumBackward0": _cumsum,
        "LinalgVectorNormBackward0": typed(_vector_norm, "ord", "dim", "keepdim"),
        "LogSoftmaxBackward0": typed(torch.log_softmax, "dim"),
        "LogsumexpBackward0": operator(torch.logsumexp, "dim", "keepdim"),
        "MeanBackward1": typed(torch.mean, "dim", "keepdim"),
        "SafeSoftmaxBackward0": typed(torch.ops.aten._safe_softmax, "dim"),
        "SoftmaxBackward0": typed(torch.softmax, "dim"),
        "SumBackward1": typed(torch.sum, "dim", "keepdim"),
    }
