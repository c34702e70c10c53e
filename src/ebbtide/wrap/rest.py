"""Remove everything from the blocks that run without hooks.

[Note: rest] A block of which a plan keeps everything runs as in ordinary training. A replaced forward would still cost
some Python time per block: too much for tiny blocks, and for a device that waits for the host. So once the plan is
judged, it is removed; if that holds for all blocks, only the model's own replaced forward stays. It checks once per
pass whether there is a listener, whether passes are timed, whether the model is called with clearly larger inputs,
whether weights are trained that were not, or whether what was measured no longer holds; then the replaced forwards are
installed again before the first block runs. Of the blocks that keep everything after one that does not, the last keeps
its replaced forward: its backward starts the prefetches of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.base.actions import Action, Site
from ebbtide.engine import Engine
from ebbtide.engine.stats import Tally
from ebbtide.engine.timing import GROWTH
from ebbtide.wrap.forward import is_compiled_inside
from ebbtide.wrap.plain import PlainBlocks, all_kept, plain_site
from ebbtide.wrap.scope import Scope

Scopes = Sequence[tuple[nn.Module, Scope]]


class Rest:
    """Decides on which blocks nothing is installed. See [Note: rest].

    Args:
        engine: Its timer knows which blocks run without hooks.
        plain: Knows in which states of training they may, and what they keep.
    """

    def __init__(self, engine: Engine, plain: PlainBlocks) -> None:
        self._engine, self._plain = engine, plain
        self._scopes: list[tuple[nn.Module, Scope]] = []  # blocks without anything installed
        self._chosen: tuple[frozenset[str], bytes, int] | None = None  # what they were chosen by
        self._elements = 0  # inputs of the measured pass that the plan was made from
        self._before = 0  # inputs of the latest pass
        self._kept: dict[str, tuple[str, Tally, int]] = {}  # by path: kind, and what it kept with so many elements
        self._counts: tuple[int, Tally, dict[Site, tuple[int, int]]] | None = None  # elements; sums; bytes by site

    def holds(
        self,
        scopes: Scopes,
        put_on: Callable[[nn.Module, Scope], None],
        trains: bytes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether the new pass runs with nothing installed on any block; install or remove accordingly.

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
        if self._scopes and timer.outdated():
            timer.want()
        observed = timer.wanted or timer.times_blocks or self._engine.bus.active
        if observed or not 0 < elements <= GROWTH * self._elements:
            self._change([], scopes, put_on)
        elif self._chosen != (timer.unhooked, trains, len(scopes)):
            self._change(self._choose(scopes, timer.unhooked, trains), scopes, put_on)
        known, self._before = elements == self._before, elements
        if not self._scopes or len(self._scopes) < len(scopes):
            return False
        if not (known and self._counts):
            self._engine.last_tally = self._sums()[0]
        return True

    def count(self) -> None:
        """Count what blocks without anything installed keep in the pass that has begun."""
        if not self._scopes:
            return
        if any(scope.inside for _, scope in self._scopes):  # compiled meanwhile: [Note: compiled blocks]
            self._scopes = [(module, scope) for module, scope in self._scopes if not scope.inside]
            self._chosen = self._counts = None
        if self._scopes:
            self._plain.ran, pass_, (total, sites) = True, self._engine._pass, self._sums()
            pass_.tally.add_all(total)
            for site, (count, nbytes) in sites.items():
                pass_.add_site(site, nbytes, Action.KEEP, count)

    def _sums(self) -> tuple[Tally, dict[Site, tuple[int, int]]]:
        """Return what the blocks keep with the inputs of this pass, and storages and bytes by site."""
        if self._counts is None or self._counts[0] != self._before:
            total, sites = Tally(), dict[Site, tuple[int, int]]()
            for _, scope in self._scopes:
                kind, tally, elements = self._kept[scope.block.name]
                kept, site = all_kept(tally, self._before, elements), plain_site(kind)
                total.add_all(kept)
                count, nbytes = sites.get(site, (0, 0))
                sites[site] = count + 1, nbytes + kept.unique
            self._counts = self._before, total, sites
        return self._counts[1:]

    def _choose(self, scopes: Scopes, unhooked: frozenset[str], trains: bytes) -> list[tuple[nn.Module, Scope]]:
        """Return the blocks on which nothing needs to be installed."""
        resting = {id(scope) for _, scope in self._scopes}
        plain = [
            scope.block.name in unhooked
            and (id(scope) in resting or bool(scope.inside))
            and self._plain.knows(scope.block.name, trains)
            and not is_compiled_inside(module)
            for module, scope in scopes
        ]
        first_hooked = plain.index(False) if False in plain else len(plain)
        found, complete = list[tuple[nn.Module, Scope]](), True
        for place, (module, scope) in enumerate(scopes):
            prefetches = place > first_hooked and plain[place : place + 2] != [True, True]
            if plain[place] and not prefetches:
                if id(scope) in resting or scope.block.name in self._plain.counted:
                    found.append((module, scope))
                else:
                    complete = False  # what it keeps is known once it has run without hooks
        self._chosen = (unhooked, trains, len(scopes)) if complete else None
        return found

    def _change(
        self, found: list[tuple[nn.Module, Scope]], scopes: Scopes, put_on: Callable[[nn.Module, Scope], None]
    ) -> None:
        """Remove everything from these blocks, and install it on others from which it was removed."""
        before, now = ({id(scope) for _, scope in each} for each in (self._scopes, found))
        for module, scope in scopes:
            if id(scope) in before - now:
                put_on(module, scope)
        for _, scope in found:
            if id(scope) not in before:
                scope.leave()
                self._kept[scope.block.name] = scope.block.kind, self._plain.counted[scope.block.name], self._before
        if not found:
            self._chosen = None
        if before != now:
            self._scopes, self._counts = found, None
