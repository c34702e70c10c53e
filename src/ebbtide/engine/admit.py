"""What a block does with a storage that it saves: its entry, and the action that the plan chose for it."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.base.actions import STORAGE_ACTIONS, Action, Candidate, NoRecipe, Site, StandingPlan, checked_action
from ebbtide.engine.build import Builder
from ebbtide.engine.engine import Engine, operators_begun
from ebbtide.engine.inputs import CAST, BlockInputs, name_of
from ebbtide.engine.layout import Layout, byte_view, checksum, has_layout, region
from ebbtide.engine.memo import Memo, memo_of
from ebbtide.engine.modules import Running
from ebbtide.engine.narrow import narrowed, narrower
from ebbtide.engine.numerics import current_numerics
from ebbtide.engine.passes import Block, Pass, RunRecord
from ebbtide.engine.sites import Known, Sites
from ebbtide.engine.tickets import Entry, Expr, KeptStorage, KeptTicket, Ticket, Version, version_probe
from ebbtide.engine.timing import StepTimer
from ebbtide.engine.views import shows
from ebbtide.engine.weights import Weights
from ebbtide.engine.wrappers import Outer

if TYPE_CHECKING:
    from torch.autograd.graph import Node

KEEP, OFFLOAD, RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE

_WITHOUT_RECIPES = STORAGE_ACTIONS[:-1]


@functools.cache
def _caster(dtype: torch.dtype, *, copy: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype, copy=copy)


class Admission(RunRecord):
    """The part of a block's forward that makes entries and carries out the plan."""

    def __init__(
        self, engine: Engine, block: Block, pass_: Pass, inputs: list[torch.Tensor], *, checkpointed: bool = False
    ) -> None:
        self.engine = engine
        self.builder: Builder | None = None  # made last, because an interrupt may strike before
        super().__init__(block, pass_, engine.orders, engine.live_tickets, checkpointed=checkpointed)
        self.jagged = False  # it saved a jagged tensor, or a part of one
        self.filtered = False  # it saved a tensor, no input of its, that keep_filter keeps
        self.replays = False  # uses memos: see [Note: memo]
        self._memo: Memo | None = None  # of the tensor that is saved now
        self._seen: set[weakref.ref[Entry]] = set()
        self.running: list[Running] = []  # modules of the block, innermost last
        self._sites = Sites(block, engine.known_sites.setdefault(block.name, Known()))
        self.weights = Weights(engine.weights, block.weights)
        self.recipes = engine.plan.recomputes
        recomputes_in: Callable[[str], bool] | None = getattr(engine.plan, "recomputes_in", None)
        self.notes = self.recipes and (recomputes_in is None or recomputes_in(block.name))  # operands of recipes
        self._allowed = STORAGE_ACTIONS if self.recipes else _WITHOUT_RECIPES
        self._reads_kept: bool = getattr(engine.plan, "reads_kept_bytes", True)
        self._needs_recipe: Callable[[Candidate], bool] | None = getattr(engine.plan, "needs_recipe", None)
        current: Any = getattr(engine.plan, "current", engine.plan)
        self._standing: StandingPlan | None = current if hasattr(current, "stands_until") else None
        self.saved: list[tuple[Site, Action, int, bool]] = []  # what was replayed, until ``close`` counts it
        self._inputs = BlockInputs(inputs)
        self.device = next((t.device for t in inputs if engine.tier.owns(t)), None)
        device = self.device or next((weight.device for weight in block.weights()), None)
        self.device_type = "cpu" if device is None else device.type
        self.tally.input_bytes, self.tally.largest_input_bytes = self._inputs.nbytes, self._inputs.largest_bytes
        self.compared = engine.trust.begin_block(
            block.name, (block.kind, checkpointed), accelerator=self.device_type != "cpu"
        )
        self.is_open = True
        self.builder = Builder(
            engine.rules,
            self.weights,
            self._inputs,
            self._saved_input,
            functools.partial(engine.guard.watch, compared=self.compared),
            checks_weights=engine.weights.checked,
        )

    def _entry(
        self, tensor: torch.Tensor, layout: Layout, storage: torch.UntypedStorage, at: Version, outer: Outer | None
    ) -> Entry:
        """Return the entry of a storage, a new one if this version of it was not saved before."""
        engine = self.engine
        entry = engine.index.find(storage, at, layout.first, layout.last)
        if entry is None:
            entry = self._admit(tensor, layout, storage, at, outer)
            engine.index.remember(storage, entry)
        else:
            if (
                engine.weights.move
                and weakref.ref(entry) not in self._seen
                and not self.weights.can_recompute(entry.recipe)
            ):
                self._store(entry, tensor)
            if outer is None and self._memo is None:
                self._remember(tensor, None)
        return entry

    def _remember(self, tensor: torch.Tensor, candidate: Candidate | None) -> None:
        """Make, or correct, the memo of a tensor.

        Args:
            tensor: The saved tensor.
            candidate: See ``Memo``.
        """
        if self.replays and self._memo is None:
            self._memo = memo_of(tensor, self.engine.empty(tensor))
        if self._memo is not None:
            self._memo.candidate, self._memo.decision = candidate, None

    def _admit(
        self, tensor: torch.Tensor, layout: Layout, storage: torch.UntypedStorage, at: Version, outer: Outer | None
    ) -> Entry:
        """Make the entry of a storage and carry out the action chosen for it."""
        engine = self.engine
        viewed = tensor._base
        base, base_layout = (tensor, layout) if viewed is None else (viewed, Layout.of(viewed))
        nbytes, node = storage.nbytes(), base.grad_fn
        covered = base_layout.covers(nbytes) and base.untyped_storage() is storage
        covered = covered and self._is_as_made(tensor, base, node)
        shown = node if node is not None and (viewed is None or shows(tensor, node)) else None
        made_by = name_of(node)
        came_in = id(storage) in self._inputs.storages
        is_input = came_in or (made_by == CAST and self._inputs.casts(base))
        made = "input" if is_input else outer.node if outer is not None else made_by
        site = self._sites.next(self.running[-1].name if self.running else "", made)
        allowed = engine.may_recompute(tensor)
        self.filtered |= not (allowed or came_in)  # a checkpoint holds inputs
        may_recompute = covered and allowed
        weight = None
        if may_recompute and (node is None or (made_by == CAST and shown is not None)):
            weight = self.weights.copied(base, self._innermost)
        kept_bytes = engine.kept.total if self._reads_kept else 0
        candidate = self._sites.candidate(site, nbytes, block_input=is_input, kept_bytes=kept_bytes)
        described = candidate if covered else None
        recipe, without_recipe = None, False
        if weight is not None:
            recipe = self._cast_again(weight, base_layout.dtype)
        elif may_recompute and not came_in and shown is not None and self.builder is not None and self.recipes:
            without_recipe = self._needs_recipe is not None and not self._needs_recipe(candidate)
            recipe = None if without_recipe else self.builder.recipe(shown, base.output_nr)
        if recipe is not None:
            candidate = self._sites.candidate(
                site, nbytes, block_input=is_input, kept_bytes=kept_bytes, flops=recipe.flops
            )
        moved = (0, nbytes)
        if recipe is None and not without_recipe and (layout.first, layout.last) != moved:
            moved = region(layout, nbytes, engine.index.bytes_apart(storage, at))
        empty, live = engine.empty(tensor), engine.live_entries
        entry = Entry(empty, site=site, region=moved, base_layout=base_layout, at=at, live=live)
        if outer is None:
            self._remember(tensor, described)
        action = self._choose(candidate)
        if weight is not None and action is not KEEP:
            action = RECOMPUTE
            entry.part_only = not self.weights.usable(weight)
        timer = engine.timer
        if timer is not None and not timer.measuring:
            timer = None
        began = 0.0 if timer is None else time.perf_counter()
        if action is KEEP:
            engine.keep(entry, storage)
        else:
            self._carry_out(action, entry, tensor, base, recipe)
        if timer is not None:
            why = self._why_no_recipe(node, shown, is_input=is_input, covered=covered, may_recompute=may_recompute)
            why = None if recipe is not None or without_recipe else why
            self._inform_timer(timer, entry, candidate, tensor, base, recipe, why, time.perf_counter() - began)
        self.pass_.add_site(site, entry.nbytes, entry.action)
        self.tally.add(entry.action, entry.nbytes, must_keep=not (recipe or without_recipe or is_input))
        return entry

    def _is_as_made(self, tensor: torch.Tensor, base: torch.Tensor, node: Node | None) -> bool:
        """Whether nothing has written into a tensor but what made it.

        An operator in place may save its result: its node is then the newest, since an operator that saves a tensor
        made by another has a newer one, and the version is 1, so the operator's input, which nobody saved, was as it
        was made, too. Of a layer in place it is known that nothing else wrote. See ``Builder.note_in_place``.
        """
        if base._version != 1 or node is None:
            return base._version == 0
        if base is tensor and node._sequence_nr() + 1 == operators_begun():
            return True
        builder = self.builder if self.notes else None
        if builder is not None and base is not tensor and self.running:  # the layer may run still, and save its result
            builder.note_in_place(self.running[-1], tensor)
        return builder is not None and (id(node), base.output_nr) in builder.in_place

    def _cast_again(self, weight: torch.Tensor, dtype: torch.dtype) -> Expr:
        """Return the recipe of a weight's copy in another type."""
        if self.builder is None:
            raise RuntimeError("the block is not open")
        operand = self.builder.watched(weight, weight._version)
        return Expr(_caster(dtype, copy=True), (operand,), key=("cast", dtype))

    def _choose(self, candidate: Candidate) -> Action:
        plan = self.engine.plan
        return checked_action(plan.choose(candidate), self._allowed, plan, "choose")

    def _inform_timer(
        self,
        timer: StepTimer,
        entry: Entry,
        candidate: Candidate,
        tensor: torch.Tensor,
        base: torch.Tensor,
        recipe: Expr | None,
        no_recipe: NoRecipe | None,
        host_seconds: float,
    ) -> None:
        """Record in the measured step what was saved and what was done with it."""
        engine = self.engine
        narrow = narrower(entry, tensor, base)
        narrowed = entry.recipe is not None and entry.recipe is not recipe
        timer.saw(
            self,
            OFFLOAD if narrowed else entry.action,
            candidate,
            tensor.untyped_storage(),
            movable=engine.may_move(tensor),
            narrow_bytes=None if narrow is None else base.numel() * narrow.itemsize,
            prepare=None
            if recipe is None
            else functools.partial(engine.recomputer, self.block.name, entry, recipe, base),
            no_recipe=no_recipe,
            host_seconds=host_seconds,
        )

    def _why_no_recipe(
        self, node: Node | None, shown: Node | None, *, is_input: bool, covered: bool, may_recompute: bool
    ) -> NoRecipe | None:
        """Return why a storage that ``node`` made has no recipe; None where recipes are not built."""
        if is_input:
            return NoRecipe.INPUT
        if covered and not may_recompute:
            return NoRecipe.FILTERED
        if node is None:
            return NoRecipe.NO_OPERATOR
        if not covered or shown is None:
            return NoRecipe.PART
        if self.builder is None or not self.recipes:
            return None
        return NoRecipe.NO_OPERAND if name_of(node) in self.builder.rules else NoRecipe.NO_RULE

    def _carry_out(
        self, action: Action, entry: Entry, tensor: torch.Tensor, base: torch.Tensor, recipe: Expr | None
    ) -> None:
        engine = self.engine
        if engine.options.verify:
            entry.checksum = checksum(byte_view(tensor.untyped_storage(), entry.first, entry.last, tensor))
        if action is RECOMPUTE and recipe is not None:
            numerics = current_numerics()
            # What is recomputed on the way is recomputed under the numerics of this entry.
            if recipe.under in (None, numerics) and engine.trusts(self.block.name, entry, recipe, base, numerics):
                entry.action, entry.recipe, entry.numerics = RECOMPUTE, recipe, numerics
                entry.fingerprint = engine.trust.fingerprint(base, self.compared)
                return
        if engine.may_move(tensor):
            narrow = narrower(entry, tensor, base)
            if narrow is not None and self._offload_narrowed(entry, base, narrow):
                return
            entry.action = OFFLOAD
            engine.offload(self, entry, tensor)
            return
        entry.checksum = None
        engine.keep(entry, tensor.untyped_storage())

    def _store(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Offload or keep an output of an earlier block that is recomputed from weights which this backward lacks."""
        entry.recipe = entry.fingerprint = entry.numerics = None
        self.pass_.add_site(entry.site, -entry.nbytes, RECOMPUTE, -1)
        if self.engine.may_move(tensor):
            entry.action = OFFLOAD
            self.engine.offload(self, entry, tensor)
        else:
            self.engine.keep(entry, tensor.untyped_storage())
        self.tally.add_narrowed(entry.nbytes, entry.action)
        self.pass_.add_site(entry.site, entry.nbytes, entry.action)

    def _offload_narrowed(self, entry: Entry, base: torch.Tensor, dtype: torch.dtype) -> bool:
        """Offload a tensor in the type that it was cast up from; False, and nothing is done, if that would change it.

        Values that were written into it after the cast, without a new version, may not fit into that type.

        Args:
            entry: The tensor's.
            base: The tensor.
            dtype: That type.
        """
        engine, wide = self.engine, base.dtype
        if entry.site in engine.trust.demoted:
            return False
        small = narrowed(base, dtype)
        widened = Expr(_caster(wide), (), key=("cast", wide))
        if not engine.trust.holds((self.block.name, None), entry, widened, base, lambda: small.to(wide)):
            return False
        layout, nbytes, empty = Layout.of(small), small.untyped_storage().nbytes(), engine.empty(small)
        inner = Entry(empty, site=entry.site, region=(0, nbytes), base_layout=layout, at=0, live=engine.live_entries)
        inner.action = OFFLOAD
        engine.offload(self, inner, small, written=True)
        ticket = Ticket(inner, layout, self, version_probe(small, empty), 0)
        action = inner.action  # KEEP where the store refused it
        self.tally.add_narrowed(inner.nbytes, action)
        self.pass_.add_site(inner.site, -inner.nbytes, RECOMPUTE, 0)
        self.pass_.add_site(inner.site, inner.nbytes, action)
        self._note_entry(inner)
        entry.action, entry.recipe = RECOMPUTE, Expr(widened.fn, (ticket,), key=("cast", wide))
        entry.fingerprint = engine.trust.fingerprint(base, self.compared)
        return True

    def _ticket_of(
        self,
        tensor: torch.Tensor,
        entry: Entry,
        layout: Layout,
        storage: torch.UntypedStorage,
        outer: Outer | None = None,
    ) -> Ticket:
        """Return the ticket of a saved tensor whose storage has an entry."""
        probe = tensor.detach() if outer is None else outer.probe
        alias = outer is None and entry.kept is storage
        if outer is None and not alias:
            probe.data = entry.empty  # [Note: version probe]
        version = tensor._version if outer is None else outer.version
        ticket = Ticket(entry, layout, self, probe, version, alias=alias)
        if outer is None and tensor.is_leaf:
            ticket.leaf = weakref.ref(tensor)
        if entry.action is not KEEP and weakref.ref(entry) not in self._seen:
            self._note_entry(entry)
        return ticket

    def _note_entry(self, entry: Entry) -> None:
        """Note an entry that this block did not keep: its backward will read it."""
        reference = weakref.ref(entry)  # equal to no other's, when this one is dead
        self._seen.add(reference)
        self.entries.append(reference)

    def _find_kept(self, storage: torch.UntypedStorage) -> KeptStorage | None:
        """Return what is known of a storage that is kept without an entry."""
        reference = self.engine.kept_storages.get(id(storage))
        kept = None if reference is None else reference()
        return kept if kept is not None and kept() is storage else None

    def _saved_input(self, tensor: torch.Tensor) -> Ticket | KeptTicket | None:
        """Return a ticket of an input of the block, if it or a view of it was saved and its bytes are stored.

        An input that an earlier block recomputes is left out: that block's weights may be freed by now, and chains
        would grow from block to block.
        """
        engine = self.engine
        if type(tensor) not in engine.tensor_types or not has_layout(tensor):
            return None
        layout, storage = Layout.of(tensor), tensor.untyped_storage()
        kept = None if tensor._version else self._find_kept(storage)
        if kept is not None:
            return KeptTicket(tensor, self, kept)
        entry = engine.index.find(storage, tensor._version, layout.first, layout.last)
        if entry is None or entry.recipe is not None:
            return None
        return Ticket(entry, layout, self, version_probe(tensor, engine.empty(tensor)), tensor._version)

    @property
    def _casts(self) -> bool:
        """Whether autocast is on in the innermost module: a tensor that nothing made may be a copy of its weight."""
        return bool(self.running) and self.running[-1].casts_to is not None

    @property
    def _innermost(self) -> Running | None:
        return self.running[-1] if self.running else None
