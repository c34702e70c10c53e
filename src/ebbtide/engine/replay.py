"""The quick path of a saved tensor: a memo describes it, so what was decided is looked up and carried out.

It runs for each saved tensor of each step, and calls are most of its cost: code that would be small functions
elsewhere is inlined here.
"""

from __future__ import annotations

import weakref

import torch

from ebbtide.base.actions import ALWAYS, Candidate
from ebbtide.engine.admit import KEEP, OFFLOAD, RECOMPUTE, Admission
from ebbtide.engine.layout import region
from ebbtide.engine.memo import Decision, Memo
from ebbtide.engine.tickets import Entry, Expr, KeptStorage, KeptTicket, Ticket
from ebbtide.engine.views import shows


class Replay(Admission):
    """The part of a block's forward that saves what a memo describes. See [Note: memo]."""

    def _replay(self, tensor: torch.Tensor, storage: torch.UntypedStorage, memo: Memo) -> Ticket | KeptTicket | None:
        """Return the ticket of a tensor that a memo describes; None if the memo does not suffice."""
        engine, key = self.engine, id(storage)
        if key in engine.kept_storages and (kept := self._find_kept(storage)) is not None:
            return KeptTicket(tensor, self, kept)
        if (known := engine.index.known.get(key)) is not None and known[0]() is storage:
            entry = engine.index.find(storage, 0, memo.layout.first, memo.layout.last)
            if entry is not None:
                same = entry.recipe is None or not engine.weights.move
                return self._ticket_of(tensor, entry, memo.layout, storage) if same else None
        candidate = memo.candidate
        return None if candidate is None else self._admit_known(tensor, storage, memo, candidate)

    def _admit_known(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, memo: Memo, candidate: Candidate
    ) -> Ticket | KeptTicket | None:
        """Carry out the action for a new storage that a memo describes; None if it is at another site now."""
        engine, site, nbytes, base = self.engine, candidate.site, memo.nbytes, tensor._base
        base, came_in = tensor if base is None else base, id(storage) in self._inputs.storages
        node, cast = base.grad_fn, memo.is_cast
        is_input, weight = came_in or (cast and self._inputs.casts(base)), None
        if (cast and (base is tensor or shows(tensor, node))) or (node is None and self._casts):
            weight = self.weights.copied(base, self._innermost)
        counts, counted = self._sites.counts, (site.module, site.node)
        if is_input is not candidate.block_input or counts.get(counted, 0) != site.ordinal:
            return None
        counts[counted] = site.ordinal + 1
        made_here = self.recipes and not came_in and node is not None and weight is None
        builder = self.builder if made_here and (base is tensor or shows(tensor, node)) else None
        copied = None if weight is None else self._cast_again(weight, memo.base_layout.dtype)
        decision, recipe = memo.decision, copied
        if decision is not None:
            stands = decision.plan is self._standing
            if stands and builder is not None and node is not None and not decision.without_recipe:
                recipe = builder.recipe(node, base.output_nr)
            stands = stands and decision.flops == (None if recipe is None else recipe.flops)
            if not stands or (decision.limit_bytes != ALWAYS and engine.kept.total > decision.limit_bytes):
                decision = None
        if decision is None:
            decision, recipe = self._decide(memo, candidate, base, copied, may_recompute=builder is not None)
        action, without_recipe = decision.action, decision.without_recipe
        if action is KEEP:
            kept = KeptStorage(storage)
            kept.nbytes, kept.site = nbytes, site
            engine.kept_storages[id(storage)] = engine.kept.add(kept)
            ticket = KeptTicket(tensor, self, kept)
        else:
            layout, moved = memo.layout, (0, nbytes)
            if recipe is None and not without_recipe and (layout.first, layout.last) != moved:
                moved = region(layout, nbytes, engine.index.bytes_apart(storage, 0))
            base_layout, live = memo.base_layout, engine.live_entries
            entry = Entry(memo.empty, site=site, region=moved, base_layout=base_layout, at=0, live=live)
            if weight is not None:
                action, entry.part_only = RECOMPUTE, not self.weights.usable(weight)
            if recipe is None and engine.tensor_filter is None and not cast:  # what was cast up is stored as it was
                entry.action = OFFLOAD
                engine.offload(self, entry, tensor)
            else:
                self._carry_out(action, entry, tensor, base, recipe)
            engine.index.remember(storage, entry)
            probe, alias = tensor.detach(), entry.kept is storage
            if not alias:
                probe.data = memo.empty  # [Note: version probe]
            ticket = Ticket(entry, layout, self, probe, 0, alias=alias)
            if tensor.is_leaf:
                ticket.leaf = weakref.ref(tensor)
            if entry.action is not KEEP:
                reference = weakref.ref(entry)
                self._seen.add(reference)
                self.entries.append(reference)
            action, nbytes = entry.action, entry.nbytes
        self.saved.append((site, action, nbytes, not (recipe or without_recipe or is_input)))
        return ticket

    def _decide(
        self, memo: Memo, candidate: Candidate, base: torch.Tensor, recipe: Expr | None, *, may_recompute: bool
    ) -> tuple[Decision, Expr | None]:
        """Call the plan, and remember its answer while that stands.

        Args:
            memo: Of the saved tensor.
            candidate: The memo's.
            base: The tensor, or what it is a view of.
            recipe: Of a copy of a weight.
            may_recompute: Whether a recipe may be built.

        Returns:
            What it decided, and the recipe, if there is one.
        """
        plan, kept_bytes, node = self.engine.plan, 0, base.grad_fn
        if self._reads_kept:
            kept_bytes = self.engine.kept.total
            candidate = candidate.with_kept(kept_bytes)
        without_recipe = may_recompute and self._needs_recipe is not None and not self._needs_recipe(candidate)
        if may_recompute and not without_recipe and self.builder is not None and node is not None:
            recipe = self.builder.recipe(node, base.output_nr)
        if recipe is not None:
            candidate = self._sites.candidate(
                candidate.site,
                memo.nbytes,
                block_input=candidate.block_input,
                kept_bytes=kept_bytes,
                flops=recipe.flops,
            )
        standing, flops = self._standing, None if recipe is None else recipe.flops
        limit_bytes = None if standing is None else standing.stands_until(candidate)
        decision = Decision(standing or plan, limit_bytes or 0, without_recipe, flops, self._choose(candidate))
        memo.decision = None if limit_bytes is None else decision
        return decision, recipe
