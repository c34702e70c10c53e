"""Rule constructors: one for each form of rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ebbtide.engine.build import NodeView, Rule
from ebbtide.engine.tickets import Expr, Operand

Fn = Callable[..., torch.Tensor]


def expression(
    n: NodeView, fn: Fn, operands: Sequence[Operand | None], *, flops: float = 0.0, loose: bool = False
) -> Expr | None:
    """Return ``fn`` of the operands, or None if one of them is unavailable.

    Args:
        n: The node; its name is part of what trust is bound to.
        fn: Called with the operands' values.
        operands: In the order in which ``fn`` takes them.
        flops: Multiply-add work in FLOP.
        loose: See ``Expr``.
    """
    found: list[Operand] = []
    for operand in operands:
        if operand is None:
            return None
        found.append(operand)
    dtype = n.node._input_metadata[n.output_nr].dtype
    return Expr(fn, tuple(found), key=(n.node.name(), dtype), flops=flops, dtype=dtype, loose=loose)


def typed(fn: Fn, *constants: str) -> Rule:
    """Rule for a reduction: ``fn(x, *constants, dtype=...)``, in the dtype of the value."""

    def rule(n: NodeView) -> Expr | None:
        values, dtype = [n.constant(name) for name in constants], n.dtype
        return expression(n, lambda x: fn(x, *values, dtype=dtype), [n.operand("self", 0)])

    return rule


def binary(fn: Fn, *, alpha: bool = False, names: tuple[str, str] = ("self", "other")) -> Rule:
    """Rule for an operator of two tensors, or of a tensor and a number that autograd saved as a tensor."""

    def rule(n: NodeView) -> Expr | None:
        operands = [n.operand(name, index) for index, name in enumerate(names)]
        if not alpha:
            return expression(n, fn, operands)
        a = n.constant("alpha")
        return expression(n, lambda x, y: fn(x, y, alpha=a), operands)

    return rule


def method(name: str, *constants: str) -> Rule:
    """Rule for a tensor's method of some constants."""

    def rule(n: NodeView) -> Expr | None:
        values = tuple(n.constant(c) for c in constants)
        return expression(n, lambda x: getattr(x, name)(*values), [n.input(0)])

    return rule


def operator(fn: Fn, *constants: str, **named: str) -> Rule:
    """Rule for an operator of one tensor and saved attributes, in their order or by keyword argument of ``fn``."""

    def rule(n: NodeView) -> Expr | None:
        values = [n.constant(c) for c in constants]
        by_name = {keyword: n.constant(c) for keyword, c in named.items()}
        return expression(n, lambda x: fn(x, *values, **by_name), [n.operand("self", 0)])

    return rule if constants or named else lambda n: expression(n, fn, [n.operand("self", 0)])
