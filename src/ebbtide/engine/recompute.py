"""Run recipes: in forward to verify them, in backward for their value, and for timing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ebbtide.base.actions import Site
from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.engine.guard import Watched, changed_error
from ebbtide.engine.numerics import exactly
from ebbtide.engine.recipe import Keeper, Reader, evaluate
from ebbtide.engine.tickets import Entry, Expr
from ebbtide.engine.trust import Trust


def recompute(trust: Trust, target: Entry, block: str, read: Reader, keep: Keeper) -> torch.Tensor:
    """Evaluate an entry's recipe. The weights that it reads are compared before they are used.

    Args:
        trust: Raises what a comparison finds.
        target: The entry.
        block: Name of the block that needs it, for errors.
        read: Returns the content of an entry that needs no recompute, else None.
        keep: Compares every entry recomputed on the way with what was saved, and keeps its content.
    """

    def weight(watched: Watched) -> torch.Tensor:
        if (same := watched.same) is not True:
            trust.require(same, functools.partial(_changed, watched.tensor.shape, target.site, block))
        return watched.tensor

    work = functools.partial(evaluate, target, read, keep, weight)
    return exactly(target.empty.device.type, target.numerics, work)


def _changed(shape: torch.Size, site: Site, block: str) -> ModifiedInPlaceError:
    return changed_error("weight", shape, f"recomputes {site} of block {block!r} from it")


def evaluate_now(recipe: Expr, base: torch.Tensor, read: Reader) -> torch.Tensor:
    """Evaluate a recipe in the forward that has just computed its value, ``base``."""
    return exactly(base.device.type, None, lambda: evaluate(recipe, read, None))


def repeatable(recipe: Expr, base: torch.Tensor, read: Reader) -> Callable[[], torch.Tensor]:
    """Return a function that evaluates a recipe from operands in memory, repeatedly, to be timed."""
    present: dict[Entry, torch.Tensor] = {}
    device_type = base.device.type

    def read_present(operand: Entry) -> torch.Tensor | None:
        content = present.get(operand)
        return read(operand) if content is None else content

    def run(target: Expr | Entry) -> torch.Tensor:
        return exactly(device_type, None, lambda: evaluate(target, read_present, present.__setitem__))

    for ticket in recipe.tickets():
        content = read_present(ticket.entry)
        present[ticket.entry] = run(ticket.entry) if content is None else content
    return lambda: run(recipe)
