"""One executed block: what its forward saves, and in which order its backward wants it."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable

import torch

from ebbtide.base.actions import Action, Candidate, Site
from ebbtide.base.errors import note_place
from ebbtide.engine.build import Builder
from ebbtide.engine.inputs import Inputs
from ebbtide.engine.layout import Layout, has_layout, region
from ebbtide.engine.modules import Running
from ebbtide.engine.narrow import Narrow, narrower
from ebbtide.engine.numerics import current_numerics
from ebbtide.engine.passes import Block, Pass, RunRecord
from ebbtide.engine.services import Services
from ebbtide.engine.sites import Sites
from ebbtide.engine.tickets import Entry, Expr, LightTicket, Place, Ticket, Version, version_probe
from ebbtide.engine.timing import StepTimer
from ebbtide.engine.weights import Weights
from ebbtide.engine.wrappers import Outer, WrapperTicket, pack_wrapper

CAST = "ToCopyBackward0"
"""The node of a cast."""

KEEP, OFFLOAD, RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE


class BlockRun(RunRecord):
    """The forward of one block, open while it runs."""

    def __init__(
        self, engine: Services, block: Block, pass_: Pass, inputs: list[torch.Tensor], *, checkpointed: bool = False
    ) -> None:
        self.engine = engine
        self.builder: Builder | None = None  # made last: an interrupt may strike before
        super().__init__(block, pass_, engine.orders, engine.live_tickets, checkpointed=checkpointed)
        self.jagged = False  # it saved a jagged tensor, or a part of one
        self._seen: set[int] = set()
        self._narrow: dict[tuple[int, int], Ticket] = {}  # what was stored in the type that it was cast up from
        self.running: list[Running] = []  # modules of the block, innermost last
        self._sites = Sites(block, engine.known_sites.setdefault(block.name, {}))
        self.place: Place = "(block)", block.name  # as errors name it
        self.weights = Weights(engine.weights, block.weights)
        self.recipes = engine.plan.recomputes  # operands of recipes are noted
        self._needs_recipe: Callable[[Candidate], bool] | None = getattr(engine.plan, "needs_recipe", None)
        self._inputs = Inputs(inputs)
        self.where = next((t.device for t in inputs if engine.tier.owns(t)), None)
        self.tally.input_bytes = self._inputs.nbytes
        self.compared = engine.trust.begin_block(
            (block.name, checkpointed), block.count, accelerator=self._inputs.device_type != "cpu"
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

    # Forward

    def pack(self, tensor: torch.Tensor, outer: Outer | None = None) -> Ticket | LightTicket | WrapperTicket:
        """Return the ticket of a saved tensor: the pack hook.

        Args:
            tensor: The saved tensor.
            outer: The saved tensor that it is inside of. See [Note: wrapper subclasses].
        """
        engine = self.engine
        layout = self._light(tensor, outer)
        if not isinstance(layout, Layout):
            if self.recipes and isinstance(layout, LightTicket) and tensor.grad_fn is not None:
                self._note(tensor, layout)
            return layout
        storage = tensor.untyped_storage()
        version = tensor._version if outer is None else outer.version
        try:
            with engine.lock:
                at = version if outer is None else (version, tensor._version)
                entry = engine.index.find(storage, at, layout.first, layout.last)
                if entry is None:
                    known = self._known_value(tensor, layout) if self._narrow else None
                    entry = known or self._admit(tensor, layout, storage, at, outer)
                    engine.index.remember(storage, entry, same_bytes=known is None)
                elif (
                    engine.weights.move and id(entry) not in self._seen and not self.weights.can_recompute(entry.recipe)
                ):
                    self._store(entry, tensor)
                probe = tensor.detach() if outer is None else outer.probe
                alias = outer is None and entry.kept is storage
                if outer is None and not alias:
                    probe.data = entry.empty  # [Note: version probe]
                ticket = Ticket(entry, layout, self, probe, version, alias=alias)
                if entry.action is not KEEP and id(entry) not in self._seen:
                    self._list(entry)
        except BaseException as error:
            module, block = self.place
            note_place(error, f"while saving a {list(tensor.shape)} tensor in {module} of block {block!r}")
            raise
        tally = self.tally
        tally.packs += 1
        tally.saved += layout.logical_bytes
        if self.recipes:
            self._note(tensor, ticket)
        return ticket

    def enter(self, name: str, module: torch.nn.Module) -> None:
        """A module of the block begins to run.

        Args:
            name: Its path in the block.
            module: The module.
        """
        self.running.append(Running.here(name, module, self._inputs.device_type))
        self.place = name, self.block.name

    def leave(self) -> Running | None:
        """End the innermost module, and return it."""
        left = self.running.pop() if self.running else None
        self.place = self.running[-1].name if self.running else "(block)", self.block.name
        return left

    def close(self) -> None:
        """Forget what only the block's forward needed."""
        self.is_open = False
        self.builder = None
        self._inputs.forget()
        self.running.clear()
        self._seen.clear()
        self._narrow.clear()
        self.weights.forget()

    def _list(self, entry: Entry) -> None:
        self._seen.add(id(entry))
        self.entries.append(weakref.ref(entry))

    def _light(self, tensor: torch.Tensor, outer: Outer | None) -> LightTicket | WrapperTicket | Layout:
        """Return the ticket of a tensor that stays, or of one whose inner tensors have their own; else its layout."""
        engine = self.engine
        if self.weights.include(tensor):
            return LightTicket(tensor, weight=True, checked=engine.weights.checked, place=self.place)
        odd = tensor.is_nested or tensor._has_symbolic_sizes_strides
        if odd:
            self.jagged = True
        kind = type(tensor)
        if kind is not torch.Tensor and kind not in engine.tensor_types:
            copied = self.weights.copied(tensor, self._innermost)
            ticket = pack_wrapper(tensor, self.pack, engine.empty, self.place) if copied is None else None
            return ticket or LightTicket(tensor, place=self.place)
        base = tensor._base
        strided = not odd and tensor.layout is torch.strided and (base is None or has_layout(base))
        if not (strided and engine.tier.owns(tensor)):
            return LightTicket(tensor, place=self.place)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not tensor.numel() or nbytes < engine.options.min_bytes:
            self.tally.add_saved(nbytes)
            if nbytes and self.pass_.first_stays(storage):
                self.tally.add_small(nbytes)
            return LightTicket(tensor, place=self.place)
        layout = Layout.of(tensor)
        viewed = outer.owner if outer is not None else tensor if base is None else base
        owner = layout if viewed is tensor else Layout.of(viewed)
        if (
            # A part of a storage that is no view of the whole, as unsafe_chunk makes: its siblings may change in place
            # and its version does not tell. It stays where it lies, which is what plain autograd reads.
            owner.first != 0
            or owner.last != nbytes
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
            or tensor._is_zerotensor()
        ):
            self._keep_light(tensor, storage)
            return LightTicket(tensor, place=self.place)
        return layout

    def _keep_light(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Count a storage of which a part, or a kind that is not moved, stays."""
        nbytes = storage.nbytes()
        self.tally.add_saved(tensor.numel() * tensor.itemsize)
        if self.pass_.first_stays(storage):
            self.tally.add(KEEP, nbytes, must_keep=True)
            node = tensor.grad_fn
            module = self.running[-1].name if self.running else ""
            site = self._sites.next(module, "leaf" if node is None else node.name())
            self.pass_.add_site(site, nbytes, KEEP)

    def _note(self, tensor: torch.Tensor, ticket: Ticket | LightTicket) -> None:
        builder, node = self.builder, tensor.grad_fn
        if builder is None:
            return
        if node is None and tensor.requires_grad and tensor._base is None and isinstance(ticket, Ticket):
            node = torch.autograd.graph.get_gradient_edge(tensor).node  # an input that is a leaf
        if node is not None:
            builder.note_ticket(node, tensor.output_nr, ticket)
            if tensor._base is not None and isinstance(ticket, Ticket):
                builder.note_view(tensor._base, ticket)

    def _saved_input(self, tensor: torch.Tensor) -> Ticket | None:
        """Return a ticket of what came into the block, if it or a view of it was saved and its bytes were stored.

        One that an earlier block recomputes is left out: its weights may be gone by now, and chains would grow from
        block to block.
        """
        engine = self.engine
        if type(tensor) not in engine.tensor_types or not has_layout(tensor):
            return None
        layout = Layout.of(tensor)
        entry = engine.index.find(tensor.untyped_storage(), tensor._version, layout.first, layout.last)
        if entry is None or entry.recipe is not None:
            return None
        return Ticket(entry, layout, self, version_probe(tensor, engine.empty(tensor)), tensor._version)

    @property
    def _innermost(self) -> Running | None:
        return self.running[-1] if self.running else None

    def _known_value(self, tensor: torch.Tensor, layout: Layout) -> Entry | None:
        """Return the entry of the same value under another storage: what was narrowed is saved again later."""
        node = tensor.grad_fn
        if node is None or tensor._is_view() or tensor._version:
            return None
        ticket = self._narrow.get((id(node), tensor.output_nr))
        return ticket.entry if ticket is not None and ticket.layout == layout else None

    def _admit(
        self, tensor: torch.Tensor, layout: Layout, storage: torch.UntypedStorage, at: Version, outer: Outer | None
    ) -> Entry:
        """Make the entry of a storage and carry out the action chosen for it."""
        engine = self.engine
        viewed = tensor._base
        base, base_layout = (tensor, layout) if viewed is None else (viewed, Layout.of(viewed))
        nbytes = storage.nbytes()
        covered = base_layout.covers(nbytes) and base._version == 0 and base.untyped_storage() is storage
        node = base.grad_fn
        made_by = "leaf" if node is None else node.name()
        came_in = id(storage) in self._inputs.storages
        is_input = came_in or (made_by == CAST and self._inputs.casts(base))
        made = "input" if is_input else outer.node if outer is not None else made_by
        site = self._sites.next(self.running[-1].name if self.running else "", made)
        may_recompute = covered and (engine.keep_filter is None or engine.keep_filter(tensor))
        weight = None
        if may_recompute and (node is None or made_by == CAST):
            weight = self.weights.copied(base, self._innermost)
        kept_bytes = engine.kept.total
        candidate = self._sites.candidate(site, nbytes, block_input=is_input, kept_bytes=kept_bytes)
        recipe, settled = None, False
        if weight is not None and self.builder is not None:
            operand = self.builder.watched(weight, weight._version)
            recipe = Expr(lambda w: w.to(base_layout.dtype), (operand,), key=("cast", base_layout.dtype))
        elif may_recompute and not came_in and node is not None and self.builder is not None and self.recipes:
            settled = self._needs_recipe is not None and not self._needs_recipe(candidate)
            recipe = None if settled else self.builder.recipe(node, base.output_nr)
        if recipe is not None:
            candidate = self._sites.candidate(
                site, nbytes, block_input=is_input, kept_bytes=kept_bytes, flops=recipe.flops
            )
        moved = (0, nbytes)
        if recipe is None and not settled and (layout.first, layout.last) != moved:
            moved = region(layout, nbytes, engine.index.bytes_apart(storage, at))
        entry = Entry(
            engine.empty(tensor),
            site=site,
            region=moved,
            base_layout=base_layout,
            at=at,
            live=engine.live_entries,
        )
        action = engine.plan.choose(candidate)
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
            self._inform_timer(timer, entry, candidate, tensor, base, recipe, time.perf_counter() - began)
        self.pass_.add_site(site, entry.nbytes, entry.action)
        self.tally.add(entry.action, entry.nbytes, must_keep=not (recipe or settled or is_input))
        return entry

    def _inform_timer(
        self,
        timer: StepTimer,
        entry: Entry,
        candidate: Candidate,
        tensor: torch.Tensor,
        base: torch.Tensor,
        recipe: Expr | None,
        host_seconds: float,
    ) -> None:
        """Let a step that is measured know what was saved, and what was done with it."""
        engine = self.engine
        narrow = narrower(self.builder, entry, base)
        narrowed = entry.recipe is not None and entry.recipe is not recipe
        timer.saw(
            self,
            OFFLOAD if narrowed else entry.action,
            candidate,
            tensor.untyped_storage(),
            movable=engine.may_move(tensor),
            narrow_bytes=None if narrow is None else narrow.nbytes,
            prepare=None
            if recipe is None
            else functools.partial(engine.recomputer, self.block.name, entry, recipe, base),
            host_seconds=host_seconds,
        )

    def _carry_out(
        self, action: Action, entry: Entry, tensor: torch.Tensor, base: torch.Tensor, recipe: Expr | None
    ) -> None:
        engine = self.engine
        if engine.options.verify:
            engine.take_checksum(entry, tensor)
        if action is RECOMPUTE and recipe is not None:
            numerics = current_numerics()
            if engine.trusts(self.block.name, entry, recipe, base, numerics):
                entry.action, entry.recipe, entry.numerics = RECOMPUTE, recipe, numerics
                entry.fingerprint = engine.trust.fingerprint(base, self.compared)
                return
        if engine.may_move(tensor):
            narrow = narrower(self.builder, entry, base)
            if narrow is not None:
                entry.action, entry.recipe = RECOMPUTE, self._offload_narrowed(entry, base, narrow)
                return
            entry.action = OFFLOAD
            engine.park(self, entry, tensor)
            return
        entry.action, entry.checksum = KEEP, None
        engine.keep(entry, tensor.untyped_storage())

    def _store(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Offload or keep an output of an earlier block that is recomputed from weights which this backward lacks."""
        entry.recipe = entry.fingerprint = entry.numerics = None
        self.pass_.add_site(entry.site, -entry.nbytes, RECOMPUTE, -1)
        if self.engine.may_move(tensor):
            entry.action = OFFLOAD
            self.engine.park(self, entry, tensor)
        else:
            entry.action = KEEP
            self.engine.keep(entry, tensor.untyped_storage())
        self.tally.add_narrowed(entry.nbytes, entry.action)
        self.pass_.add_site(entry.site, entry.nbytes, entry.action)

    def _offload_narrowed(self, entry: Entry, base: torch.Tensor, narrow: Narrow) -> Expr:
        """Offload a tensor in the type that it was cast up from; return how to cast it up again.

        Args:
            entry: The tensor's.
            base: The tensor.
            narrow: As ``narrower`` returned it.
        """
        engine, wide = self.engine, base.dtype
        with torch.no_grad():
            small = base.detach().to(narrow.dtype)
        layout, nbytes, empty = Layout.of(small), small.untyped_storage().nbytes(), engine.empty(small)
        inner = Entry(empty, site=entry.site, region=(0, nbytes), base_layout=layout, at=0, live=engine.live_entries)
        inner.action = OFFLOAD
        engine.park(self, inner, small)
        ticket = Ticket(inner, layout, self, version_probe(small, empty), 0)
        if self.builder is not None:
            self.builder.note_ticket(narrow.node, narrow.output_nr, ticket)  # keeps the node: its id stays its own
        action = inner.action  # KEEP where the store refused it
        self.tally.add_narrowed(inner.nbytes, action)
        self.pass_.move_site(inner.site, inner.nbytes, RECOMPUTE, action)
        self._list(inner)
        self._narrow[id(narrow.node), narrow.output_nr] = ticket
        return Expr(lambda x: x.to(wide), (ticket,), key=("cast", wide))

    def add_checkpointed(self, unique: int) -> None:
        """Count what a block that is re-run whole does not hold.

        Args:
            unique: Bytes of storages that such a block saved when its tensors were last treated one by one.
        """
        dropped = self.tally.add_checkpointed(unique)
        self.pass_.add_site(Site(self.block.kind, "", "forward", 0), dropped, Action.CHECKPOINT)
