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
    """Return ``fn`` of the operands, or None when one of them cannot be had.

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


def unary(fn: Fn, slot: str = "self", **constants: str) -> Rule:
    """Rule for an operator of one tensor; ``constants`` maps keyword arguments of ``fn`` to saved attributes."""

    def rule(n: NodeView) -> Expr | None:
        values = {keyword: n.constant(attribute) for keyword, attribute in constants.items()}
        return expression(n, lambda x: fn(x, **values), [n.operand(slot, 0)])

    return rule if constants else lambda n: expression(n, fn, [n.operand(slot, 0)])


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


def with_number(fn: Fn, name: str) -> Rule:
    """Rule for an operator of a tensor and a number that autograd saved as the attribute ``name``."""

    def rule(n: NodeView) -> Expr | None:
        number = n.constant(name)
        return expression(n, lambda x: fn(x, number), [n.operand("self", 0)])

    return rule


def method(name: str, *constants: str) -> Rule:
    """Rule for a tensor's method of some constants."""

    def rule(n: NodeView) -> Expr | None:
        values = tuple(n.constant(c) for c in constants)
        return expression(n, lambda x: getattr(x, name)(*values), [n.input(0)])

    return rule


def operator(fn: Fn, *constants: str, slot: str = "self") -> Rule:
    """Rule for an operator of one tensor and some constants, in their order."""

    def rule(n: NodeView) -> Expr | None:
        values = [n.constant(c) for c in constants]
        return expression(n, lambda x: fn(x, *values), [n.operand(slot, 0)])

    return rule
