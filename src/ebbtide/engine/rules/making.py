"""Rule constructors: one for each form of rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbtide.engine.build import NodeView
from ebbtide.engine.declared import DeclaredRule, Fn, From, output_number
from ebbtide.engine.tickets import Expr, Operand


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
    return Expr(fn, tuple(found), key=(type(n.node).name(n.node), n.dtype), flops=flops, dtype=n.dtype, loose=loose)


def typed(fn: Fn, *constants: str) -> DeclaredRule:
    """Rule for a reduction: ``fn(x, *constants, dtype=...)``, in the dtype of the value."""

    def make(*values: Any) -> Fn:
        *fixed, kind = values
        return lambda x: fn(x, *fixed, dtype=kind)

    return DeclaredRule(make, [From(0, "self")], constants=constants, metadata=["dtype"])


def binary(fn: Fn, *, alpha: bool = False, names: tuple[str, str] = ("self", "other")) -> DeclaredRule:
    """Rule for an operator of two tensors, or of a tensor and a number that autograd saved as a tensor."""
    operands = [From(index, name) for index, name in enumerate(names)]
    if not alpha:
        return DeclaredRule(lambda: fn, operands)
    return DeclaredRule(lambda a: lambda x, y: fn(x, y, alpha=a), operands, constants=["alpha"])


def method(name: str, *constants: str) -> DeclaredRule:
    """Rule for a tensor's method of some constants."""
    return DeclaredRule(lambda *values: lambda x: getattr(x, name)(*values), [From(0)], constants=constants)


def part(name: str, *constants: str) -> DeclaredRule:
    """Rule for a tensor's method with several results, all views of its input."""

    def make(*values: Any) -> Fn:
        *fixed, which = values
        return lambda x: getattr(x, name)(*fixed)[which]

    return DeclaredRule(make, [From(0)], constants=constants, facts=[output_number])


def to_shape(name: str) -> DeclaredRule:
    """Rule for a tensor's method of the shape of its result."""
    return DeclaredRule(lambda size: lambda x: getattr(x, name)(size), [From(0)], metadata=["shape"])


def operator(fn: Fn, *constants: str, **named: str) -> DeclaredRule:
    """Rule for an operator of one tensor and saved attributes, in their order or by keyword argument of ``fn``."""

    def make(*values: Any) -> Fn:
        fixed, by_name = values[: len(constants)], dict(zip(named, values[len(constants) :], strict=True))
        return lambda x: fn(x, *fixed, **by_name)

    kept = [*constants, *named.values()]
    return DeclaredRule(make if kept else lambda: fn, [From(0, "self")], constants=kept)
