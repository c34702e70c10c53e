"""Remove everything from the blocks that run without hooks.

[Note: rest] A block of which a plan keeps everything runs as in ordinary training. A replaced forward would still cost
some Python time per block: too much for tiny blocks, and for a device that waits for the host. So once the plan is
judged, it is removed; if that holds for all blocks, only the model's own replaced forward stays. It checks once per
pass whether anything is observed or timed, whether an input of the model is clearly larger than in the measured pass,
whether other inputs or weights take a gradient, or whether what was measured no longer holds; then the replaced
forwards are installed again before the first block runs, and removed after a pass that was like the one before. Of the
blocks that keep everything after one that does not, the last keeps its replaced forward: its backward starts the
prefetches of those before it. What the others keep is counted as in the pass before their rest: of blocks that are
skipped at random, or that somebody checkpoints meanwhile, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ebbtide.base.actions import Action, Site
from ebbtide.engine import Engine
from ebbtide.engine.passes import Pass
from ebbtide.engine.stats import Tally
from ebbtide.wrap.forward import is_compiled
from ebbtide.wrap.plain import PlainBlocks, all_kept, plain_site, shapes_of, within
from ebbtide.wrap.scope import Scope

PutOn = Callable[[Scope], None]


class Rest:
    """Decides on which blocks nothing is installed. See [Note: rest]."""

    def __init__(self, engine: Engine, plain: PlainBlocks) -> None:
        self._engine, self._plain = engine, plain
        self._resting: list[Scope] = []  # blocks without anything installed
        self._state: tuple[object, ...] | None = None  # of the latest pass: what must be equal in the next one
        self._measured: list[torch.Size] = []  # shapes of the inputs of the measured pass that the plan was made from
        self._shapes: list[torch.Size] = []  # of the latest pass
        self._kept: dict[str, tuple[Site, int, Tally]] = {}  # by path: where it counts, how often it ran, what it kept
        self._kept_elements = 0  # of the inputs then
        self._sums: tuple[int, Tally, dict[Site, tuple[int, int]]] | None = None  # elements; sums; bytes by site

    def prepare(
        self, scopes: Sequence[Scope], put_on: PutOn, trains: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Install hooks or remove them; return whether the new pass runs with nothing installed on any block.

        Args:
            scopes: All blocks; a model that is its own block stays as it is.
            put_on: Installs everything on a block.
            trains: ``Tree.trains`` of the model.
        """
        timer = self._engine.timer
        if timer is None or not (timer.wanted or timer.unhooked or self._resting):
            self._state = None
            return False
        if timer.wanted and not self._plain.ran:
            self._measured = self._shapes
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if self._resting and timer.outdated():
            timer.want()
        before, shapes = self._state, self._shapes
        self._shapes = shapes_of(tensors)
        self._state = (timer.unhooked, trains, tuple([x.requires_grad for x in tensors]), len(scopes))
        observed = timer.wanted or timer.times_blocks or self._engine.bus.active
        fits = bool(tensors) and within(self._shapes, self._measured)
        if observed or before != self._state or not fits:
            self._wake(scopes, put_on)
        elif not self._resting:
            self._leave(scopes, timer.unhooked, _elements(shapes))
        if not self._resting or len(self._resting) < len(scopes):
            return False
        if self._sums is None or self._sums[0] != _elements(self._shapes):
            done = self._engine.last_pass = Pass()
            self._engine.last_tally = done.tally
            self._add_to(done)
        return True

    def pass_begins(self) -> None:
        """Count what blocks without anything installed keep in the pass that has begun."""
        if not self._resting:
            return
        if any(scope.inside for scope in self._resting):  # compiled meanwhile: [Note: compiled blocks]
            self._resting = [scope for scope in self._resting if not scope.inside]
            self._sums = None
        self._plain.ran = True
        self._add_to(self._engine.current_pass)

    def _add_to(self, pass_: Pass) -> None:
        """Add what the blocks keep to a pass."""
        total, sites = self._count()
        pass_.tally.add_all(total)
        for site, (count, nbytes) in sites.items():
            pass_.add_site(site, nbytes, Action.KEEP, count)

    def pass_begins_without_model(self, scopes: Sequence[Scope], put_on: PutOn) -> None:
        """Install everything: blocks are called without the model's forward, and nobody looks at its inputs."""
        self._state = None
        self._wake(scopes, put_on)

    def _count(self) -> tuple[Tally, dict[Site, tuple[int, int]]]:
        """Return what the blocks keep with the inputs of this pass, and storages and bytes by site."""
        elements = _elements(self._shapes)
        if self._sums is None or self._sums[0] != elements:
            total, sites = Tally(), dict[Site, tuple[int, int]]()
            for scope in self._resting:
                site, runs, tally = self._kept[scope.block.name]
                kept = all_kept(tally, elements, self._kept_elements)
                total.add_all(kept)
                count, nbytes = sites.get(site, (0, 0))
                sites[site] = count + runs, nbytes + kept.unique
            self._sums = elements, total, sites
        return self._sums[1:]

    def _leave(self, scopes: Sequence[Scope], unhooked: frozenset[str], elements: int) -> None:
        """Remove everything from unhooked blocks on which nothing needs to be installed, as the latest pass showed."""
        order, kept = self._plain.order, self._plain.counted
        first = next((place for place, name in enumerate(order) if name not in kept), len(order))
        stay = {  # the next one does not run plain, or there is none: each starts the prefetches of those before it
            name
            for place, name in enumerate(order)
            if place > first and kept.keys().isdisjoint(order[place + 1 : place + 2])
        }
        for scope in scopes:
            name = scope.block.name
            if name in unhooked and name in kept and name not in stay and _ours(scope):
                scope.leave()
                self._resting.append(scope)
                self._kept[name] = plain_site(scope.block.kind), order.count(name), kept[name]
        self._kept_elements, self._sums = elements, None

    def _wake(self, scopes: Sequence[Scope], put_on: PutOn) -> None:
        """Install everything again on the blocks from which it was removed."""
        for scope in scopes:
            if scope in self._resting:
                put_on(scope)
        self._resting, self._sums = [], None


def _ours(scope: Scope) -> bool:
    """Whether nobody has replaced a block's replaced forward, which would stay behind theirs."""
    stand_ins = [getattr(remove, "__self__", None) for remove in scope.inside]
    return stand_ins == [vars(scope.module).get("forward", scope)] and not is_compiled(scope.module)


def _elements(shapes: Sequence[torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes)
