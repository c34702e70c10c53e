"""Remove everything from the blocks while no block needs hooks.

[Note: rest] If a plan keeps everything, blocks run as in ordinary training. A replaced forward would still cost some
Python time per block, and two hooks per module: too much for tiny blocks. So once the plan is judged, all of it is
removed. Only the model's own replaced forward stays. It checks once per pass whether there is a listener, whether the
model is called with clearly larger inputs, or whether what was measured no longer holds; then everything is installed
again before the first block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.engine import Engine
from ebbtide.engine.timing import GROWTH
from ebbtide.wrap.forward import is_compiled_inside
from ebbtide.wrap.scope import Scope


class Rest:
    """Decides whether anything is installed on the blocks. See [Note: rest].

    Args:
        engine: Its timer knows which blocks run without hooks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scopes: list[tuple[nn.Module, Scope]] = []  # blocks without anything installed
        self._elements = 0  # inputs of the measured pass that the plan was made from
        self._before = 0  # inputs of the latest pass

    def holds(
        self,
        scopes: Sequence[tuple[nn.Module, Scope]],
        put_on: Callable[[nn.Module, Scope], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether the new pass runs with nothing installed on the blocks; install or remove accordingly.

        Args:
            scopes: All blocks; a model that is its own block stays as it is.
            put_on: Installs everything on a block.
            args: The model's positional arguments.
            kwargs: The model's keyword arguments.
        """
        timer = self._engine.timer
        if timer is None:
            return False
        if timer.wanted and not timer.plain:
            self._elements = self._before
        elements = sum(x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if not self._scopes and 0 < elements <= GROWTH * self._elements and self._possible(scopes):
            self._scopes = list(scopes)
            for _, scope in self._scopes:
                scope.leave()
        if self._scopes and timer.outdated():
            timer.want()
        if self._scopes and (timer.wanted or self._engine.bus.active or elements > GROWTH * self._elements):
            while self._scopes:
                put_on(*self._scopes.pop())
        self._before = elements
        return bool(self._scopes)

    def _possible(self, scopes: Sequence[tuple[nn.Module, Scope]]) -> bool:
        timer = self._engine.timer
        if timer is None or timer.wanted or timer.times_blocks or self._engine.bus.active:
            return False
        return all(
            scope.block.name in timer.unhooked and scope.inside and not is_compiled_inside(module)
            for module, scope in scopes
        )
