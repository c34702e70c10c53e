"""Rules for element-wise operators, casts, reductions along some dimensions, and softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ebbtide.engine.build import NodeView, Rule
from ebbtide.engine.rules.making import binary, expression, operator, typed
from ebbtide.engine.tickets import Expr, KeptTicket, Ticket


def _cast(n: NodeView) -> Expr | None:
    device, dtype = n.device, n.dtype  # they may be the operand's own: copy=True makes another tensor then, too
    source, number = n.node.next_functions[0]
    copies = source is not None and source._input_metadata[number].dtype == dtype and len(n.shape) in (4, 5)
    # What changes neither type nor device may change the memory format: see ``_clone``.
    return expression(n, lambda x: x.to(device, dtype, copy=True), [n.input(0)], loose=copies)


def _where(n: NodeView) -> Expr | None:
    return expression(n, torch.where, [n.slot("condition"), n.input(0), n.input(1)])


def _masked_fill(n: NodeView) -> Expr | None:
    return expression(n, lambda x, mask, value: x.masked_fill(mask, value), [n.input(0), n.slot("mask"), n.input(1)])


def _clone(n: NodeView) -> Expr | None:
    """The node has no memory format: the layout of an entry restores it, but other values have no layout."""
    operand = n.input(0)
    contiguous = isinstance(operand, Ticket) and operand.layout.contiguous
    contiguous = contiguous or (isinstance(operand, KeptTicket) and operand.tensor.is_contiguous())
    # Of four or five dimensions the clone of a contiguous tensor may be the one that made it ``channels_last``.
    loose = not contiguous or len(n.shape) in (4, 5)
    return expression(n, lambda x: x.clone(memory_format=torch.contiguous_format), [operand], loose=loose)


def _clamp_between(n: NodeView) -> Expr | None:
    low, high = (n.slot(name) for name in ("min", "max"))
    if low is None or high is None:
        return None
    return expression(n, torch.clamp, [n.operand("self", 0), low, high])


def _power_of_number(n: NodeView) -> Expr | None:
    base = n.constant("self")
    return expression(n, lambda x: torch.pow(base, x), [n.operand("exponent", 0)])


def _lerp(n: NodeView) -> Expr | None:
    weight = n.constant("weight")
    return expression(n, lambda x, y: torch.lerp(x, y, weight), [n.operand("self", 0), n.operand("end", 1)])


def _three(fn: object, *names: str) -> Rule:
    def rule(n: NodeView) -> Expr | None:
        value = n.constant("value")
        operands = [n.operand(name, index) for index, name in enumerate(names)]
        return expression(n, lambda x, y, z: fn(x, y, z, value=value), operands)  # pyright: ignore

    return rule


def _cumsum(n: NodeView) -> Expr | None:
    """No rule on an accelerator: there a cumulative sum of floats may be added in another order each time."""
    on_host = n.device.type == "cpu" or not n.dtype.is_floating_point
    return typed(torch.cumsum, "dim")(n) if on_host else None


def _dropout(n: NodeView) -> Expr | None:
    """No random numbers are drawn: the mask was saved."""
    p = n.constant("p")
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    if n.output_nr:
        return None

    def again(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":  # scales the mask and rounds it; devices have one kernel for all
            return x * mask.to(x.dtype).mul_(scale)
        return torch.ops.aten.native_dropout_backward(x, mask, scale)

    return expression(n, again, [n.input(0), n.slot("result1")])


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
    """Return the rules for functions of one number, activations among them."""
    return {
        "AbsBackward0": operator(torch.abs),
        "CeluBackward0": operator(F.celu, alpha="alpha"),
        "CosBackward0": operator(torch.cos),
        "EluBackward0": operator(torch.ops.aten.elu, "alpha", "scale", "input_scale"),
        "ErfBackward0": operator(torch.erf),
        "ExpBackward0": operator(torch.exp),
        "Expm1Backward0": operator(torch.expm1),
        "GeluBackward0": operator(F.gelu, approximate="approximate"),
        "GluBackward0": operator(F.glu, dim="dim"),
        "HardsigmoidBackward0": operator(F.hardsigmoid),
        "HardswishBackward0": operator(F.hardswish),
        "HardtanhBackward0": operator(F.hardtanh, min_val="min_val", max_val="max_val"),
        "LeakyReluBackward0": operator(F.leaky_relu, negative_slope="negative_slope"),
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
    }


def reductions() -> dict[str, Rule]:
    """Return the rules for reductions, scans and softmax: exact, for the same kernel runs on the same values."""
    return {
        "AmaxBackward0": operator(torch.amax, "dim", "keepdim"),
        "CumsumBackward0": _cumsum,
        "LinalgVectorNormBackward0": typed(torch.linalg.vector_norm, "ord", "dim", "keepdim"),
        "LogSoftmaxBackward0": typed(torch.log_softmax, "dim"),
        "LogsumexpBackward0": operator(torch.logsumexp, "dim", "keepdim"),
        "MeanBackward1": typed(torch.mean, "dim", "keepdim"),
        "SafeSoftmaxBackward0": typed(torch.ops.aten._safe_softmax, "dim"),
        "SoftmaxBackward0": typed(torch.softmax, "dim"),
        "SumBackward1": typed(torch.sum, "dim", "keepdim"),
    }
