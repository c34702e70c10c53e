"""The rule table: how the value behind an autograd node is made again.

[Note: rules]
A rule is given a ``NodeView`` and returns an ``Expr``, or None when an operand cannot be had. It must call the very
operator that made the value, on operands of the very dtype and layout, so that the result is equal bit by bit; the
first remake at every site is compared with the tensor that is there, and a site that differs is demoted. Operators
that draw random numbers have no rule. The table was made from a census of what model families save, not by hand; a
new rule needs a line here and a case in ``tests/unit/engine/test_rules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ebbtide.engine.build import NodeView, Rule
from ebbtide.engine.recipe import Expr, Operand
from ebbtide.engine.tickets import LightTicket, Ticket

Fn = Callable[..., torch.Tensor]


def _expr(name: str, fn: Fn, operands: list[Operand | None], *constants: Any, flops: float = 0.0) -> Expr | None:
    if any(o is None for o in operands):
        return None
    return Expr(fn, tuple(o for o in operands if o is not None), key=(name, *constants), flops=flops)


def unary(fn: Fn, slot: str = "self", **constants: str) -> Rule:
    """Rule for an operator of one tensor; ``constants`` maps keyword arguments of ``fn`` to saved attributes."""

    def rule(n: NodeView) -> Expr | None:
        given = {keyword: n.constant(attribute) for keyword, attribute in constants.items()}
        key = tuple(sorted((k, str(v)) for k, v in given.items()))
        return _expr(n.node.name(), lambda x: fn(x, **given), [n.operand(slot, 0)], key)

    return rule


def binary(fn: Fn, *, alpha: bool = False) -> Rule:
    """Rule for an operator of two tensors (or a tensor and a number)."""

    def rule(n: NodeView) -> Expr | None:
        operands = [n.operand("self", 0), n.operand("other", 1)]
        if not alpha:
            return _expr(n.node.name(), fn, operands)
        a = n.constant("alpha")
        return _expr(n.node.name(), lambda x, y: fn(x, y, alpha=a), operands, a)

    return rule


def viewed(make: Callable[[NodeView], tuple[Fn, tuple[Any, ...]]]) -> Rule:
    """Rule for a view: ``make`` returns the function and the constants it was made with."""

    def rule(n: NodeView) -> Expr | None:
        fn, key = make(n)
        return _expr(n.node.name(), fn, [n.input(0)], *key)

    return rule


def _to_shape(method: str) -> Rule:
    def make(n: NodeView) -> tuple[Fn, tuple[Any, ...]]:
        shape = n.shape
        return (lambda x: getattr(x, method)(shape)), (shape,)

    return viewed(make)


def _with(method: str, *names: str) -> Rule:
    def make(n: NodeView) -> tuple[Fn, tuple[Any, ...]]:
        constants = tuple(n.constant(name) for name in names)
        return (lambda x: getattr(x, method)(*constants)), (str(constants),)

    return viewed(make)


def _part(method: str, *names: str) -> Rule:
    """Rule for an operator with several outputs, all views of its input."""

    def make(n: NodeView) -> tuple[Fn, tuple[Any, ...]]:
        constants, which = tuple(n.constant(name) for name in names), n.output_nr
        return (lambda x: getattr(x, method)(*constants)[which]), (str(constants), which)

    return viewed(make)


def _slice(n: NodeView) -> tuple[Fn, tuple[Any, ...]]:
    dim, start, end, step = (n.constant(k) for k in ("dim", "start", "end", "step"))
    return (lambda x: torch.ops.aten.slice(x, dim, start, end, step)), (dim, start, end, step)


def _squeeze(n: NodeView) -> tuple[Fn, tuple[Any, ...]]:
    shape = n.shape
    return (lambda x: x.view(shape) if x.is_contiguous() else x.reshape(shape)), (shape,)


def _cast(n: NodeView) -> Expr | None:
    dtype = n.dtype
    return _expr("cast", lambda x: x.to(dtype), [n.input(0)], dtype)


def _joined(join: Callable[[list[torch.Tensor], int], torch.Tensor]) -> Rule:
    def rule(n: NodeView) -> Expr | None:
        dim = n.constant("dim")
        operands = [n.input(i) for i in range(len(n.node.next_functions))]
        return _expr(n.node.name(), lambda *parts: join(list(parts), dim), operands, dim)

    return rule


def _reduced(fn: Fn) -> Rule:
    def rule(n: NodeView) -> Expr | None:
        dim, keep, dtype = n.constant("dim"), n.constant("keepdim"), n.dtype
        return _expr(
            n.node.name(), lambda x: fn(x, dim, keepdim=keep, dtype=dtype), [n.operand("self", 0)], dim, keep, dtype
        )

    return rule


def _where(n: NodeView) -> Expr | None:
    return _expr("where", torch.where, [n.slot("condition"), n.input(0), n.input(1)])


def _contiguous_clone(x: torch.Tensor) -> torch.Tensor:
    # The node does not tell the memory format; reshape and contiguous make this one, an entry's layout mends others.
    return x.clone(memory_format=torch.contiguous_format)


def _pow(n: NodeView) -> Expr | None:
    exponent = n.constant("exponent")
    return _expr("pow", lambda x: torch.pow(x, exponent), [n.operand("self", 0)], str(exponent))


def _norm(kind: type[torch.nn.Module], fn: Fn, *constants: str) -> Rule:
    """Rule for a norm whose node does not tell all: the record of its leaf module gives eps and the weights."""

    def rule(n: NodeView) -> Expr | None:
        module = n.module
        if n.output_nr or not isinstance(module, kind):
            return None
        given = [getattr(module, name) for name in constants]
        weights = [w for w in (module.weight, module.bias) if isinstance(w, torch.Tensor)]
        pads = 2 - len(weights)

        def again(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
            return fn(x, given[0], *w, *[None] * pads, *given[1:])

        return _expr(n.node.name(), again, [n.operand("input", 0), *map(n.weight, weights)], str(given))

    return rule


def _product(fn: Fn, left: str, right: str, *, bias: bool = False) -> Rule:
    """Rule for a matrix product; its work is 2 x elements of the result x inner length."""

    def rule(n: NodeView) -> Expr | None:
        first = 1 if bias else 0
        operands = [n.operand(left, first), n.operand(right, first + 1)]
        work = 2.0 * math.prod(n.shape) * _inner_length(operands[0])
        if not bias:
            return _expr(n.node.name(), fn, operands, flops=work)
        alpha, beta = n.constant("alpha"), n.constant("beta")
        added = n.input(0)
        if added is None and isinstance(n.module, torch.nn.Linear):
            added = n.weight(n.module.bias)
        return _expr(
            n.node.name(),
            lambda c, a, b: fn(c, a, b, alpha=alpha, beta=beta),
            [added, *operands],
            alpha,
            beta,
            flops=work,
        )

    return rule


def _inner_length(operand: Operand | None) -> int:
    if isinstance(operand, Ticket):
        return operand.layout.size[-1]
    return operand.alias.shape[-1] if isinstance(operand, LightTicket) else 1


def rule_table() -> dict[str, Rule]:
    """Return a new table from node name to rule."""
    return _element_rules() | _shape_rules() | _product_rules()


def _element_rules() -> dict[str, Rule]:
    return {
        "AddBackward0": binary(torch.add, alpha=True),
        "SubBackward0": binary(torch.sub, alpha=True),
        "MulBackward0": binary(torch.mul),
        "DivBackward0": binary(torch.div),
        "NegBackward0": unary(torch.neg),
        "AbsBackward0": unary(torch.abs),
        "ExpBackward0": unary(torch.exp),
        "LogBackward0": unary(torch.log),
        "SinBackward0": unary(torch.sin),
        "CosBackward0": unary(torch.cos),
        "SqrtBackward0": unary(torch.sqrt),
        "RsqrtBackward0": unary(torch.rsqrt),
        "TanhBackward0": unary(torch.tanh),
        "SigmoidBackward0": unary(torch.sigmoid),
        "SiluBackward0": unary(F.silu),
        "ReluBackward0": unary(F.relu),
        "MishBackward0": unary(F.mish),
        "LogSigmoidBackward0": unary(F.logsigmoid),
        "HardswishBackward0": unary(F.hardswish),
        "GeluBackward0": unary(F.gelu, approximate="approximate"),
        "GluBackward0": unary(F.glu, dim="dim"),
        "SoftplusBackward0": unary(F.softplus, beta="beta", threshold="threshold"),
        "LeakyReluBackward0": unary(F.leaky_relu, negative_slope="negative_slope"),
        "PowBackward0": _pow,
        "ToCopyBackward0": _cast,
        "CloneBackward0": unary(_contiguous_clone),
        "MeanBackward1": _reduced(torch.mean),
        "SumBackward1": _reduced(torch.sum),
        "WhereBackward0": _where,
        "CatBackward0": _joined(torch.cat),
        "StackBackward0": _joined(torch.stack),
        "NativeLayerNormBackward0": _norm(torch.nn.LayerNorm, F.layer_norm, "normalized_shape", "eps"),
        "NativeGroupNormBackward0": _norm(torch.nn.GroupNorm, F.group_norm, "num_groups", "eps"),
    }


def _shape_rules() -> dict[str, Rule]:
    return {
        "ViewBackward0": _to_shape("view"),
        "UnsafeViewBackward0": _to_shape("view"),
        "ReshapeAliasBackward0": _to_shape("reshape"),
        "ExpandBackward0": _to_shape("expand"),
        "TBackward0": _with("t"),
        "TransposeBackward0": _with("transpose", "dim0", "dim1"),
        "PermuteBackward0": _with("permute", "dims"),
        "UnsqueezeBackward0": _with("unsqueeze", "dim"),
        "SelectBackward0": _with("select", "dim", "index"),
        "RepeatBackward0": _with("repeat", "repeats"),
        "RollBackward0": _with("roll", "shifts", "dims"),
        "AliasBackward0": _with("detach"),
        "SqueezeBackward0": viewed(_squeeze),
        "SqueezeBackward1": viewed(_squeeze),
        "SliceBackward0": viewed(_slice),
        "SplitBackward0": _part("split", "split_size", "dim"),
        "SplitWithSizesBackward0": _part("split", "split_sizes", "dim"),
        "UnsafeSplitBackward0": _part("split", "split_size", "dim"),
        "UnbindBackward0": _part("unbind", "dim"),
    }


def _product_rules() -> dict[str, Rule]:
    return {
        "MmBackward0": _product(torch.mm, "self", "mat2"),
        "BmmBackward0": _product(torch.bmm, "self", "mat2"),
        "AddmmBackward0": _product(torch.addmm, "mat1", "mat2", bias=True),
        "BaddbmmBackward0": _product(torch.baddbmm, "batch1", "batch2", bias=True),
    }
