"""Recipes: how a tensor is recomputed.

[Note: recipe]
A recipe is an ``Expr``: a function and its operands, which are tickets (strongly held), other expressions, or weights.
It is built when the tensor is saved, and holds no autograd node: a recipe that held the node would break when another
backward had freed that node, and would make cycles that nobody collects.

Every saved operand is read through its entry, which keeps what was recomputed until its last reader in this backward;
without that, a diamond of depth 12 costs 24,510 evaluations. A recipe in which no value has two readers and none must
be recomputed first is evaluated from the outside in; any other one in topological order, without recursion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from ebbtide.engine.guard import Watched
from ebbtide.engine.layout import with_layout
from ebbtide.engine.tickets import Entry, Expr, Operand, Residence, Ticket, operand_error

MAX_DEPTH = 48
"""Most values in a chain that nobody saved; longer chains are not recomputed."""

_NONE: dict[int, torch.Tensor] = {}

_PRESENT = Residence.RESIDENT, Residence.RESTORED
"""Residences of an entry that need no recompute."""

Reader = Callable[[Entry], torch.Tensor | None]
"""Returns an entry's content if it needs no recompute, else None."""

Keeper = Callable[[Entry, torch.Tensor], None]
"""Receives each entry that was recomputed, and its content."""


def _weight(watched: Watched) -> torch.Tensor:
    return watched.tensor


def evaluate(
    target: Expr | Entry,
    read: Reader,
    keep: Keeper | None,
    weight: Callable[[Watched], torch.Tensor] = _weight,
) -> torch.Tensor:
    """Recompute a value.

    Args:
        target: An expression, or an entry whose recipe is to be run.
        read: Returns the content of an entry that needs no recompute.
        keep: Called with every entry recomputed on the way, and its content; ``None``: nothing outlives this call.
        weight: Returns the value of a weight, or raises if it changed.

    Returns:
        The value (of an expression) or the content of the storage (of an entry).
    """
    recipe = target if isinstance(target, Expr) else _recipe_of(target)
    value = _evaluate(recipe, read, weight) if _is_plain(recipe) else None
    if value is None:
        return _in_order(target, read, keep, weight)
    if isinstance(target, Expr):
        return value
    value = with_layout(value, target.base_layout)
    if keep is not None:
        keep(target, value)
    return value


def _is_plain(recipe: Expr) -> bool:
    """Whether no value in a recipe has two readers, and none must be recomputed first: so are most."""
    if not recipe.linear or recipe.depth > MAX_DEPTH:
        return False
    for operand in recipe.operands:
        if isinstance(operand, Ticket):
            if operand.entry.recipe is not None and operand.entry.residence not in _PRESENT:
                return False
        elif isinstance(operand, Expr) and operand.operands and not _is_plain(operand):
            return False
    return True


def _evaluate(recipe: Expr, read: Reader, weight: Callable[[Watched], torch.Tensor]) -> torch.Tensor | None:
    """Return the value of a plain recipe; None if a backward has changed an operand that was recomputed before."""
    values: list[torch.Tensor] = []
    for operand in recipe.operands:
        if isinstance(operand, Ticket):
            content = read(operand.entry)
            if content is None:
                return None
            values.append(operand.layout.over(content, operand.entry.first))
        elif isinstance(operand, Expr):
            value = _evaluate(operand, read, weight) if operand.operands else operand.fn()
            if value is None:
                return None
            values.append(value)
        else:
            values.append(weight(operand) if isinstance(operand, Watched) else _value(_NONE, weight, operand))
    return _compute(recipe, values)


def _in_order(
    target: Expr | Entry, read: Reader, keep: Keeper | None, weight: Callable[[Watched], torch.Tensor]
) -> torch.Tensor:
    """Return the value of any recipe: evaluated in topological order, each value held until its last reader."""
    values: dict[int, torch.Tensor] = {}
    value, waiting = functools.partial(_value, values, weight), _count_readers(target)
    stack: list[Expr | Entry] = [target]
    while stack:
        node = stack[-1]
        if id(node) in values:
            stack.pop()
            continue
        if isinstance(node, Entry):
            recipe, content = node.recipe, None
            made = recipe is not None and id(recipe) in values
            if node is not target and not made:  # the caller has tried to read the target
                content = read(node)
            if content is None:
                recipe = recipe or _recipe_of(node)
                if not made:
                    stack.append(recipe)
                    continue
                content = with_layout(values.pop(id(recipe)), node.base_layout)
                if keep is not None:
                    keep(node, content)
            values[id(node)] = content
            stack.pop()
            continue
        before = len(stack)
        for operand in node.operands:
            inner = operand.entry if isinstance(operand, Ticket) else operand
            if isinstance(inner, (Entry, Expr)) and id(inner) not in values:
                stack.append(inner)
        if len(stack) > before:
            continue
        values[id(node)] = _compute(node, map(value, node.operands))
        for operand in node.operands:
            if isinstance(operand, Expr):
                waiting[id(operand)] -= 1
                if not waiting[id(operand)]:
                    del values[id(operand)]
        stack.pop()
    return values[id(target)]


def _compute(expr: Expr, values: Iterable[torch.Tensor]) -> torch.Tensor:
    made = expr.fn(*values)
    return made if expr.dtype is None or made.dtype is expr.dtype else made.to(expr.dtype)


def _value(
    values: dict[int, torch.Tensor], weight: Callable[[Watched], torch.Tensor], operand: Operand
) -> torch.Tensor:
    if isinstance(operand, Ticket):
        return operand.layout.over(values[id(operand.entry)], operand.entry.first)
    if isinstance(operand, Expr):
        return values[id(operand)]
    if isinstance(operand, Watched):
        return weight(operand)
    if operand.changed:
        raise operand_error(operand.description)
    return operand.tensor


def _recipe_of(entry: Entry) -> Expr:
    if entry.recipe is None:
        raise RuntimeError(f"entry at {entry.site} has neither bytes nor a recipe")
    return entry.recipe


def _count_readers(target: Expr | Entry) -> dict[int, int]:
    """Count how many operands of the expressions below ``target`` name each inner expression."""
    counts: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[Expr | Entry] = [target]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Entry):
            if node.recipe is not None and node.residence not in _PRESENT:
                stack.append(node.recipe)
            continue
        for operand in node.operands:
            if isinstance(operand, Expr):
                counts[id(operand)] = counts.get(id(operand), 0) + 1
            inner = operand.entry if isinstance(operand, Ticket) else operand
            if isinstance(inner, (Entry, Expr)):
                stack.append(inner)
    return counts
