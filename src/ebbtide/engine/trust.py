"""Trust is earned: the first remake at a site is compared, bit by bit, with the tensor that is there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.base.events import Bus
from ebbtide.engine.layout import Layout, storage_bytes
from ebbtide.engine.numerics import current_numerics
from ebbtide.engine.recipe import Expr
from ebbtide.engine.tickets import Entry

logger = logging.getLogger("ebbtide.engine")

Key = tuple[Any, ...]


class Trust:
    """Remembers which recipes were compared and found equal.

    A verdict holds for a site, a layout, the recipe's operators and constants, and the numerics that change what a
    kernel computes; whatever differs in one of them is compared anew.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._verdicts: dict[Key, bool] = {}
        self.demoted: dict[str, str] = {}

    def holds(self, entry: Entry, recipe: Expr, base: torch.Tensor, remake: Callable[[Expr], torch.Tensor]) -> bool:
        """Return whether ``recipe`` gives ``base`` exactly; compares when this key was not met before."""
        key = (entry.site, entry.base_layout, recipe.signature, current_numerics())
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._compare(entry, recipe, base, remake)
        return verdict

    def _compare(self, entry: Entry, recipe: Expr, base: torch.Tensor, remake: Callable[[Expr], torch.Tensor]) -> bool:
        try:
            again = remake(recipe)
        except (MemoryError, torch.OutOfMemoryError):  # says nothing about the recipe
            raise
        except Exception as error:  # a rule that cannot run here must not cost the user the step
            return self._demote(entry, f"the rule failed: {type(error).__name__}: {error}")
        if again.shape != base.shape or again.dtype != base.dtype:
            return self._demote(entry, f"made {again.dtype}{list(again.shape)} of {base.dtype}{list(base.shape)}")
        layout = Layout.of(base)
        if again.stride() != layout.stride or again.untyped_storage().nbytes() != layout.logical_bytes:
            again = torch.empty_strided(layout.size, layout.stride, dtype=base.dtype, device=base.device).copy_(again)
        if not self.same_bytes(again, base):
            return self._demote(entry, "the remade bytes differ")
        return True

    def same_bytes(self, again: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether two tensors' storages hold the same bytes."""
        return torch.equal(storage_bytes(again), storage_bytes(base))

    def _demote(self, entry: Entry, reason: str) -> bool:
        site = str(entry.site)
        if site not in self.demoted:
            logger.info("not recomputed, %s: %s", site, reason)
            self._bus.emit("message", level="info", code="demoted", text=f"not recomputed, {site}: {reason}")
        self.demoted[site] = reason
        return False
