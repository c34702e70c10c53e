"""One executed block: what its forward saves, and in which order its backward reads it."""

from __future__ import annotations

import time

import torch

from ebbtide.base.actions import Action, Candidate, Site
from ebbtide.base.errors import note_place
from ebbtide.engine.admit import KEEP
from ebbtide.engine.engine import Engine
from ebbtide.engine.inputs import name_of
from ebbtide.engine.layout import Layout, has_layout
from ebbtide.engine.modules import Running
from ebbtide.engine.passes import Block
from ebbtide.engine.replay import Replay
from ebbtide.engine.sites import OUTSIDE
from ebbtide.engine.tickets import KeptTicket, LightTicket, Ticket
from ebbtide.engine.views import passed_on, shows
from ebbtide.engine.wrappers import Outer, WrapperTicket, pack_wrapper

_QUANTIZED = frozenset(getattr(torch, name, None) for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4"))


class StayingTicket(LightTicket):
    """The first ticket of a storage that is never moved: its bytes count as kept as long as it lives."""

    __slots__ = ("__weakref__", "nbytes", "site")

    nbytes: int
    site: Site


class BlockRun(Replay):
    """The forward of one block, open while it runs."""

    # Forward

    def pack(self, tensor: torch.Tensor, outer: Outer | None = None) -> Ticket | LightTicket | WrapperTicket:
        """Return the ticket of a saved tensor: the pack hook.

        Args:
            tensor: The saved tensor.
            outer: The saved tensor that it is inside of. See [Note: wrapper subclasses].
        """
        if outer is not None:
            return self._pack(tensor, outer)
        if not self.replays:
            began = time.perf_counter()
            ticket = self._pack(tensor, outer)
            self.pack_seconds += time.perf_counter() - began
            return ticket
        position = self._sites.position
        if type(tensor) is torch.nn.Parameter:
            return LightTicket(tensor, weight=True, checked=self.engine.weights.checked, place=position.place)
        number, position.next = position.next, position.next + 1
        self._memo = None
        if tensor.is_nested or tensor._has_symbolic_sizes_strides:
            return self._pack(tensor, outer)
        memo = position.memos[number].get(tensor.size()) if number < len(position.memos) else None
        if memo is not None and (storage := memo.matching(tensor)) is not None and not self.weights.hold(storage):
            engine, tally = self.engine, self.tally
            try:
                with engine.lock:
                    ticket = self._replay(tensor, storage, memo)
            except BaseException as error:
                self._note_place(error, tensor)
                raise
            if ticket is not None:
                tally.packs += 1
                tally.replayed += 1
                tally.saved += memo.layout.logical_bytes
                if self.notes and (builder := self.builder) is not None:
                    node = tensor.grad_fn
                    if node is None or tensor._base is not None:
                        self._note(tensor, ticket)
                    else:
                        builder.note_ticket(node, tensor.output_nr, ticket)
                return ticket
            self._memo = memo
        ticket = self._pack(tensor, outer)
        if self._memo is not memo:
            position.remember(tensor.size(), self._memo)
        return ticket

    def _note_place(self, error: BaseException, tensor: torch.Tensor) -> None:
        module, block = self._sites.position.place
        note_place(error, f"while saving a {list(tensor.shape)} tensor in {module} of block {block!r}")

    def _pack(self, tensor: torch.Tensor, outer: Outer | None) -> Ticket | LightTicket | WrapperTicket:
        """Return the ticket of a saved tensor of which nothing is known."""
        engine = self.engine
        layout = self._light(tensor, outer)
        if not isinstance(layout, Layout):
            if self.notes and isinstance(layout, LightTicket) and tensor.grad_fn is not None:
                self._note(tensor, layout)
            return layout
        storage = tensor.untyped_storage()
        try:
            with engine.lock:
                at = tensor._version if outer is None else (outer.version, tensor._version)
                kept = self._find_kept(storage) if at == 0 else None
                if kept is not None:
                    ticket = KeptTicket(tensor, self, kept)
                else:
                    entry = self._entry(tensor, layout, storage, at, outer)
                    ticket = self._ticket_of(tensor, entry, layout, storage, outer)
        except BaseException as error:
            self._note_place(error, tensor)
            raise
        tally = self.tally
        tally.packs += 1
        tally.saved += layout.logical_bytes
        if self.notes:
            self._note(tensor, ticket)
        return ticket

    def enter(self, name: str, module: torch.nn.Module) -> None:
        """Begin a module of the block.

        Args:
            name: Its path in the block.
            module: The module.
        """
        self.running.append(Running.here(name, module, self.device_type))
        self._sites.go_to(name)

    def leave(self) -> Running | None:
        """End the innermost module, and return it."""
        if not self.running:
            return None
        left = self.running.pop()
        self._sites.position = self._sites.positions[self.running[-1].name if self.running else OUTSIDE]
        return left

    def freed_site(self) -> Site | None:
        """Return where the block saved a storage, not to be kept, that has no memory any more; None: nowhere."""
        for entry in (entry for reference in self.entries if (entry := reference()) is not None):
            storage = None if entry.storage_ref is None else entry.storage_ref()
            if storage is not None and not storage.nbytes():
                return entry.site
        return None

    def end(self, *, checkpointed: bool = False) -> None:
        """End the block's forward, which may have raised."""
        self.engine.end_block(self, checkpointed=checkpointed)

    def close(self) -> None:
        """Forget what only the block's forward needed."""
        self.mark = None
        self._count()
        self.builder = None
        self._inputs.forget()
        self.running.clear()
        self._sites.forget()
        self._seen.clear()
        self.weights.forget()
        self.is_open = False  # last: until then it is closed again after an interrupt

    def _count(self) -> None:
        """Count what was replayed."""
        saved, self.saved = self.saved, []
        self.pass_.add_sites(saved)
        self.tally.add_storages(saved)

    def _light(self, tensor: torch.Tensor, outer: Outer | None) -> LightTicket | WrapperTicket | Layout:
        """Return the ticket of a tensor that stays, or of one whose inner tensors have their own; else its layout."""
        engine, place = self.engine, self._sites.position.place
        if self.weights.include(tensor):
            return LightTicket(tensor, weight=True, checked=engine.weights.checked, place=place)
        odd = tensor.is_nested or tensor._has_symbolic_sizes_strides
        if odd:
            self.jagged = True
        kind = type(tensor)
        if kind is not torch.Tensor and kind not in engine.tensor_types:
            copied = self.weights.copied(tensor, self._innermost)
            ticket = pack_wrapper(tensor, self.pack, engine.empty, place) if copied is None else None
            return ticket or LightTicket(tensor, place=place)
        base = tensor._base
        strided = not odd and tensor.layout is torch.strided and (base is None or has_layout(base))
        if not (strided and engine.tier.owns(tensor)):
            return LightTicket(tensor, place=place)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not tensor.numel() or nbytes < engine.options.min_bytes:
            self.tally.add_saved(tensor.numel() * tensor.itemsize)
            if tensor.numel() and self.pass_.note_staying(storage):
                self.tally.add_small(nbytes)
            return LightTicket(tensor, place=place)
        layout = Layout.of(tensor)
        viewed = outer.owner if outer is not None else tensor if base is None else base
        owner = layout if viewed is tensor else Layout.of(viewed)
        if (
            # A part of a storage that is no view of the whole, as unsafe_chunk makes: its siblings may change in place
            # without a new version. It stays where it lies, which is what plain autograd reads.
            owner.first != 0
            or owner.last != nbytes
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.dtype in _QUANTIZED  # also without a quantizer, which `new_empty` would add
            or tensor._is_zerotensor()
            or (base is not None and not layout.covers(nbytes) and passed_on(tensor))  # likewise
            # Attributes that somebody gave it: torch's own saving of what needs no gradient hands them on. Those of
            # dynamo, on what compiled code with dynamic shapes saves, are hints for a compilation: they may be lost.
            or (
                kind is torch.Tensor
                and outer is None
                and tensor.__dict__
                and not tensor.requires_grad
                and not all(name.startswith("_dynamo_") for name in tensor.__dict__)
            )
        ):
            return self._keep_light(tensor, storage)
        return layout

    def _keep_light(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> LightTicket:
        """Return the ticket of a storage that stays: only a part of it was saved, or its kind is never moved."""
        engine, place = self.engine, self._sites.position.place
        self.tally.add_saved(tensor.numel() * tensor.itemsize)
        if not self.pass_.note_staying(storage):
            return LightTicket(tensor, place=place)
        nbytes = storage.nbytes()
        module = self.running[-1].name if self.running else ""
        site = self._sites.next(module, name_of(tensor.grad_fn))
        self.tally.add(KEEP, nbytes, must_keep=True)
        self.pass_.add_site(site, nbytes, KEEP)
        ticket = StayingTicket(tensor, place=place)
        ticket.nbytes, ticket.site = nbytes, site
        with engine.lock:
            engine.kept.add(ticket)
        if engine.timer is not None and engine.timer.measuring:
            candidate = Candidate(
                site=site, block_name=self.block.name, block=self.block.index, nbytes=nbytes,
                block_input=id(storage) in self._inputs.storages, recompute_flops=None,
            )  # fmt: skip
            engine.timer.saw(self, KEEP, candidate, storage, movable=False, narrow_bytes=None, prepare=None)
        return ticket

    def _note(self, tensor: torch.Tensor, ticket: Ticket | LightTicket) -> None:
        builder, node = self.builder, tensor.grad_fn
        if builder is None:
            return
        if node is None and tensor.requires_grad and tensor._base is None and isinstance(ticket, (Ticket, KeptTicket)):
            node = torch.autograd.graph.get_gradient_edge(tensor).node  # an input that is a leaf
        if node is not None:
            builder.note_ticket(node, tensor.output_nr, ticket)
            base = tensor._base
            if base is not None and isinstance(ticket, (Ticket, KeptTicket)) and shows(tensor, base.grad_fn):
                builder.note_view(base, ticket)

    def add_checkpointed(self, unique: int) -> None:
        """Count what a checkpointed block does not hold.

        Args:
            unique: Bytes that such a block saves where its tensors are treated one by one.
        """
        self._count()
        dropped = self.tally.add_checkpointed(unique)
        self.pass_.add_site(Site(self.block.kind, "", "forward", 0), dropped, Action.CHECKPOINT)


def begin_block(
    engine: Engine,
    block: Block,
    inputs: list[torch.Tensor],
    *,
    checkpointed: bool = False,
    kind: type[BlockRun] = BlockRun,
) -> BlockRun:
    """Begin a block's forward; enter hooks with ``run.pack`` and ``engine.unpack`` around it."""
    run = kind(engine, block, engine.current_pass, inputs, checkpointed=checkpointed)
    if engine.timer is not None:
        engine.timer.block_begins(run)
    run.replays = engine.replays and not (engine.timer is not None and engine.timer.measuring)
    return run
