"""Remove everything from the blocks while no block needs hooks.

[Note: rest] If a plan keeps everything, blocks run as in ordinary training. A replaced forward would still cost some
Python time per block: too much for tiny blocks. So once the plan is judged, it is removed. Only the model's own
replaced forward stays. It checks once per pass whether there is a listener, whether the model is called with clearly
larger inputs, whether weights are trained that were not, or whether what was measured no longer holds; then the
replaced forwards are installed again before the first block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.engine import Engine
from ebbtide.engine.stats import Tally
from ebbtide.engine.timing import GROWTH
from ebbtide.wrap.forward import is_compiled_inside
from ebbtide.wrap.plain import PlainBlocks, all_kept
from ebbtide.wrap.scope import Scope


class Rest:
    """Decides whether anything is installed on the blocks. See [Note: rest].

    Args:
        engine: Its timer knows which blocks run without hooks.
        plain: Knows in which states of training they may.
    """

    def __init__(self, engine: Engine, plain: PlainBlocks) -> None:
        self._engine, self._plain = engine, plain
        self._trains = b""  # the state of training in which nothing is installed
        self._scopes: list[tuple[nn.Module, Scope]] = []  # blocks without anything installed
        self._elements = 0  # inputs of the measured pass that the plan was made from
        self._before = 0  # inputs of the latest pass
        self._seen, self._seen_elements = Tally(), 0  # of the last pass before the blocks' rest

    def holds(
        self,
        scopes: Sequence[tuple[nn.Module, Scope]],
        put_on: Callable[[nn.Module, Scope], None],
        trains: bytes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether the new pass runs with nothing installed on the blocks; install or remove accordingly.

        Args:
            scopes: All blocks; a model that is its own block stays as it is.
            put_on: Installs everything on a block.
            trains: ``Tree.trains`` of the model.
            args: The model's positional arguments.
            kwargs: The model's keyword arguments.
        """
        timer = self._engine.timer
        if timer is None:
            return False
        if timer.wanted and not self._plain.ran:
            self._elements = self._before
        elements = sum(x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if not self._scopes and 0 < elements <= GROWTH * self._elements and self._possible(scopes, trains):
            self._scopes, self._trains = list(scopes), trains
            self._seen, self._seen_elements = self._engine.last_tally, self._before
            for _, scope in self._scopes:
                scope.leave()
        if self._scopes and timer.outdated():
            timer.want()
        if trains != self._trains and all(self._plain.knows(scope.block.name, trains) for _, scope in self._scopes):
            self._trains = trains
        other = trains != self._trains or elements > GROWTH * self._elements
        if self._scopes and (timer.wanted or self._engine.bus.active or other):
            while self._scopes:
                put_on(*self._scopes.pop())
        if self._scopes and elements != self._before:
            self._engine.last_tally = all_kept(self._seen, elements, self._seen_elements)
        self._before = elements
        return bool(self._scopes)

    def _possible(self, scopes: Sequence[tuple[nn.Module, Scope]], trains: bytes) -> bool:
        timer = self._engine.timer
        if timer is None or timer.wanted or timer.times_blocks or self._engine.bus.active:
            return False
        return all(
            scope.block.name in timer.unhooked
            and scope.inside
            and self._plain.knows(scope.block.name, trains)
            and not is_compiled_inside(module)
            for module, scope in scopes
        )
