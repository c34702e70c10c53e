"""The engine: finds entries, reads them back, and counts."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebbtide.base.actions import Action, Plan
from ebbtide.base.errors import ConfigError, note_place
from ebbtide.base.events import Bus
from ebbtide.config import Options
from ebbtide.engine.build import Rule
from ebbtide.engine.guard import WeightGuard
from ebbtide.engine.index import StorageIndex
from ebbtide.engine.layout import checksum
from ebbtide.engine.model import ModelWeights
from ebbtide.engine.mover import SlotMover
from ebbtide.engine.numerics import Numerics, current_numerics
from ebbtide.engine.passes import Block, Pass, RunRecord
from ebbtide.engine.recompute import evaluate_now, repeatable
from ebbtide.engine.restore import Restorer
from ebbtide.engine.rules import rule_table
from ebbtide.engine.sites import Known
from ebbtide.engine.stats import Coverage, StallBook, Stats, Tally
from ebbtide.engine.tickets import UNCHECKED, Entry, Expr, KeptStorage, KeptTicket, LightTicket, Ticket
from ebbtide.engine.timing import StepTimer
from ebbtide.engine.trust import Trust
from ebbtide.engine.untraced import leave_untraced
from ebbtide.engine.wrappers import WrapperTicket
from ebbtide.schedule import CopyOut, LiveBytes, LiveCount, Window
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide.engine")

_NUMBERS = itertools.count(1)
"""Number this process's engines in events: a step may have passes of several models."""

operators_begun: Callable[[], int] = torch._C._autograd._get_sequence_nr  # pyright: ignore
"""The operators that autograd has seen in this thread, with the one that saves something now."""

TensorFilter = Callable[[torch.Tensor], bool]


class Engine:
    """Carries out a plan on what autograd saves.

    Args:
        plan: Chooses the action of every storage.
        tier: The store of offloaded bytes.
        options: Sizes and settings.
        bus: Receives events of blocks, stalls and passes.
        tensor_filter: False for a tensor that is never moved (it may be recomputed).
        keep_filter: False for a tensor that is neither moved nor recomputed.
        model_weights: Returns all parameters and buffers of the model; called at the start of a pass if not passed.
        weights_move: Parameters have bytes only around their block's forward and backward (FSDP).
        rules: Node name → rule that recomputes its output; default: the built-in rules.
        tensor_types: Types of tensors that have a storage of their own; any other is a wrapper, or stays.
        trust: Compares recomputes; default: one that compares bytes.
        lasts: Whether a model holds it from step to step, so that optimizer steps await its comparisons.
    """

    def __init__(
        self,
        plan: Plan,
        tier: Tier,
        options: Options,
        bus: Bus,
        *,
        tensor_filter: TensorFilter | None = None,
        keep_filter: TensorFilter | None = None,
        model_weights: Callable[[], Iterable[torch.Tensor]] = tuple,
        weights_move: bool = False,
        rules: dict[str, Rule] | None = None,
        tensor_types: tuple[type[torch.Tensor], ...] = (torch.Tensor,),
        trust: Trust | None = None,
        lasts: bool = False,
    ) -> None:
        leave_untraced()
        self.plan, self.tier, self.options, self.bus = plan, tier, options, bus
        self.number, self.lasts = next(_NUMBERS), lasts
        self.lock = threading.RLock()
        self.trust = trust or Trust(bus, always_full=options.verify)
        guard = self.guard = WeightGuard(self.lock, self.trust.await_comparisons)
        self.weights = ModelWeights(model_weights, move=weights_move, steps=lambda: guard.steps)
        self.rules = rules if rules is not None else rule_table()
        self.live_tickets, self.live_entries = LiveCount(), LiveCount()  # open hooks count as an entry
        self.orders: dict[tuple[str, int], tuple[int, ...]] = {}
        self.timer: StepTimer | None = None  # measures steps, where a plan is to be made of them
        self.last_tally = Tally()
        self.current_pass, self.last_pass = Pass(), Pass()
        self.current_pass.ended = True  # none has begun
        self.coverage: Coverage | None = None
        self.kept = LiveBytes()  # what live graphs keep on the device by the plan
        self.kept_storages: dict[int, weakref.ref[KeptStorage]] = {}  # those of them without an entry, by id
        self.known_sites: dict[str, Known] = {}
        self.tensor_filter, self.keep_filter = tensor_filter, keep_filter
        self.replays = not options.verify and keep_filter is None  # see [Note: memo]
        self._window = Window(options.window_bytes)
        mover = SlotMover(tier)
        self._copy_out: CopyOut[Entry] = CopyOut(mover, self._window)
        self.index, self.tensor_types = StorageIndex(), tensor_types
        self._empties: dict[tuple[type[torch.Tensor], torch.device], torch.Tensor] = {}
        self._stalls, self._waits = StallBook(tier, bus), tier.stalls
        self._operator: int | None = None  # autograd's number of the operator that saved what is postponed
        self.restorer = Restorer(self, mover, self._copy_out, self._stalls, bus)
        self._closed = False

    def close(self) -> None:
        """Close the store: at once, or once neither a live graph nor an open block needs it. May be called again.

        Backwards that raised and a pass that nobody ended end now, or with the block that is open: a closed engine
        holds no part of the model.
        """
        self._closed, self.lasts = True, False
        try:
            with self.lock:
                latest = self.current_pass.latest
                if latest is None or not latest.is_open:
                    self._end_unfinished()
        finally:
            self.close_if_idle()

    def close_if_idle(self) -> None:
        """Close the store, if ``close`` was called, at once or when nobody needs it any more."""
        if not self._closed:
            return
        if self.live_entries:
            self.tier.close_unused(self.live_entries.__len__)
        else:
            self.tier.close()

    def plan_changed(self) -> None:
        """Follow another plan from the next block on."""
        self._window.forget_blocks()

    def let_go_after(self, task: int, reference: weakref.ref[Any]) -> None:
        """When a backward ends, set ``restored`` of an object to None."""
        self.restorer.watch(task).restored.append(reference)

    # Passes and blocks

    def begin_pass(
        self, lasting: Callable[[], Iterable[torch.Tensor]] = tuple, weights: Iterable[torch.Tensor] | None = None
    ) -> None:
        """Begin a forward of the model: a new graph.

        Args:
            lasting: See ``ModelWeights.begin_pass``.
            weights: See ``ModelWeights.begin_pass``.
        """
        with self.lock:
            self._end_unfinished()
            self.current_pass = Pass()
            self.kept_storages = {key: kept for key, kept in self.kept_storages.items() if kept() is not None}
            self._stalls.begin_pass(measured=self.timer is not None and self.timer.wanted)
            self.weights.begin_pass(lasting, weights)

    def _end_unfinished(self) -> None:
        """End backwards that raised, and a pass of blocks that were called without the model's own forward."""
        if torch._C._current_graph_task_id() == -1:
            self.restorer.end_raised()
        if not self.current_pass.ended:
            self.end_pass()

    def end_pass(self) -> None:
        """End the forward: count it, if a block ran, and emit its event. ``close`` may have done so already."""
        done, latest = self.current_pass, self.current_pass.latest
        if latest is not None and latest.is_open:
            latest.close()  # an interrupt struck between its beginning and its hooks: nobody else has it
        done.latest = None
        self.weights.end_pass()
        if done.ended:
            return
        done.ended = True
        with self.lock:  # another thread may run a backward
            self._copy_out.end_forward(done)
            done.in_flight_bytes = min(self._copy_out.in_flight_bytes, done.tally.offloaded)
        if latest is not None or done.called or done.tally.packs:
            self.last_tally, self.last_pass = done.tally, done
            if self.timer is not None:
                self.timer.pass_ends(done.tally.unique)
        counts = {"packs": done.tally.packs, "checkpointed": done.checkpointed}
        self.bus.emit("pass_end", engine=self.number, **counts, **done.tally.fields())

    def end_block(self, run: RunRecord, *, checkpointed: bool = False) -> None:
        """End a block's forward, which may have raised."""
        run.close()
        run.pass_.tally.add_all(run.tally)
        run.pass_.checkpointed += checkpointed
        with self.lock:
            self._window.saw_block(run.tally.offloaded, alone=run.previous is None and run.block.count == 1)
            self._waits.reader = run.forward_reader
            try:
                self._resume()
                self._copy_out.begin()
                self._copy_out.retire()
            except BaseException as error:
                note_place(error, f"at the end of the forward of block {run.block.name!r}")
                raise
            self._stalls.flush()
            if self.timer is not None:
                self.timer.block_ends(run)
        block = run.block
        logger.debug("Offloading activation group %d/%d", block.index + 1, block.count)
        if self.bus.active:
            self.emit_block(block, run.tally, "checkpoint" if checkpointed else "mixed")
        if self._closed:
            self.close()

    def emit_block(self, block: Block, tally: Tally, action: str) -> None:
        """Emit the event of a block's forward.

        Args:
            block: The block.
            tally: What it saved.
            action: ``"checkpoint"``, ``"keep"``, or ``"mixed"``: each storage has its own.
        """
        self.bus.emit(
            "block", index=block.index, name=block.name, kind=block.kind, edge="forward_end", action=action,
            engine=self.number, **tally.fields(),
        )  # fmt: skip

    # Called by a block while it packs

    def may_move(self, tensor: torch.Tensor) -> bool:
        """Whether the user's filters let a tensor be offloaded."""
        return _lets("tensor_filter", self.tensor_filter, tensor) and self.may_recompute(tensor)

    def may_recompute(self, tensor: torch.Tensor) -> bool:
        """Whether the user's filters let a tensor be recomputed."""
        return _lets("keep_filter", self.keep_filter, tensor)

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of no bytes, of the same kind and on the same device."""
        kind = type(tensor), tensor.device
        found = self._empties.get(kind)
        if found is None:
            found = self._empties[kind] = tensor.new_empty(0, dtype=torch.float32)
        return found

    def offload(self, run: RunRecord, entry: Entry, tensor: torch.Tensor, *, written: bool = False) -> None:
        """Begin to offload the bytes of an entry of a block; they stay, with a warning, if the store cannot take them.

        An operator may save a tensor and write it afterwards without a new version, as ``rrelu`` does with its noise.
        Such a tensor takes no gradient, so the copy of one begins when another operator saves something, or the block
        ends.

        Args:
            run: The block.
            entry: The entry.
            tensor: The tensor.
            written: Its bytes are certainly written.
        """
        storage = tensor.untyped_storage()
        entry.source = tensor.new_empty(0, dtype=torch.uint8).set_(storage, entry.first, (entry.nbytes,), (1,))
        stream, run.pass_.offers_last = self.tier.stream_of(tensor.device), True
        self._waits.reader = run.forward_reader
        if self._operator is not None and operators_begun() != self._operator:
            self._resume()
        if written or tensor.requires_grad or not tensor.is_floating_point():
            self._copy_out.add(entry, run.pass_, stream)
        else:
            self._operator = operators_begun()
            self._copy_out.postpone(entry, run.pass_, stream)

    def _resume(self) -> None:
        """Resume postponed copies: the operator that saved their tensors has run."""
        self._operator = None
        if self.options.verify:
            for entry in self._copy_out.postponed:
                if entry.checksum is not None and entry.source is not None:
                    entry.checksum = checksum(entry.source)
        self._copy_out.resume()

    def keep(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """Keep an entry's storage on the device, and count its bytes while it lives."""
        entry.kept, entry.first, entry.action = storage, 0, Action.KEEP
        entry.last = entry.nbytes = storage.nbytes()  # all of it, even for a part, which keeps all of it in memory
        self.kept.add(entry)

    def trusts(self, block: str, entry: Entry, recipe: Expr, base: torch.Tensor, numerics: Numerics) -> bool:
        """Whether a recipe gives the tensor that a block saves now, bitwise, under these numerics."""
        return self.trust.holds(
            (block, numerics), entry, recipe, base, lambda: evaluate_now(recipe, base, self.restorer.content)
        )

    def recomputer(self, block: str, entry: Entry, recipe: Expr, base: torch.Tensor) -> Callable[[], object] | None:
        """Return a function that recomputes a tensor now, to be timed; None if it may not be recomputed."""
        if not self.trusts(block, entry, recipe, base, current_numerics()):
            return None
        self._waits.reader = None  # stalls count only in the total
        return repeatable(recipe, base, functools.partial(self.restorer.content, target=entry))

    # Backward

    def unpack(self, ticket: Ticket | LightTicket | WrapperTicket) -> torch.Tensor:
        """Return the saved tensor of a ticket: the unpack hook."""
        if isinstance(ticket, KeptTicket):
            task, run = torch._C._current_graph_task_id(), ticket.run
            if ticket.tensor._version != ticket.version or (task != -1 and run.task != task):
                self._begin_with(ticket, task)
            leaf = ticket.leaf and ticket.leaf()
            return ticket.tensor if leaf is None else leaf
        if isinstance(ticket, LightTicket):
            unchanged = ticket.version == UNCHECKED or ticket.tensor._version == ticket.version
            return ticket.tensor if unchanged else ticket.read()
        if isinstance(ticket, WrapperTicket):
            return ticket.read(self.unpack)
        try:
            if ticket.probe._version != ticket.version:
                ticket.check()
            task, run = torch._C._current_graph_task_id(), ticket.run
            tensor = ticket.leaf and ticket.leaf()
            if tensor is None and ticket.alias:
                tensor = ticket.probe
            if tensor is not None and (task == -1 or run.task == task):
                return tensor
            if torch.is_inference_mode_enabled():  # what is made in it has no version
                with torch.inference_mode(False):
                    return self.unpack(ticket)
            with self.lock:
                if task != -1 and run.task != task:
                    self.restorer.begin_block(run, task)
                if tensor is None:
                    content, probe = self.restorer.read(ticket, task), ticket.probe
                    tensor = ticket.layout.over(content, ticket.entry.first)
                    if type(probe) is torch.Tensor:  # else the versions are those of the wrapper that it is inside of
                        # It shares the saved tensor's version counter: if a backward changes it in place, later
                        # readers of the same value detect that, as without hooks.
                        tensor, tensor.data = probe.detach(), tensor
                    if ticket.leaf and task != -1:
                        ticket.restored = tensor
                        self.let_go_after(task, weakref.ref(ticket))
                return tensor
        except BaseException as error:
            where = f"{ticket.entry.site} of block {ticket.run.block.name!r} ({ticket.entry.action.value})"
            note_place(error, f"while restoring {where}")
            raise

    def _begin_with(self, ticket: KeptTicket, task: int) -> None:
        """Begin a block's backward at the read of a kept tensor; raise if that tensor was changed."""
        try:
            ticket.read()
            with self.lock:
                if ticket.run.task != task:
                    self.restorer.begin_block(ticket.run, task)
        except BaseException as error:
            note_place(error, f"while restoring {ticket.kept.site} of block {ticket.run.block.name!r} (keep)")
            raise

    # Counting

    def stats(self) -> Stats:
        """Return what was saved, moved and recomputed. See ``Stats``."""
        tally, counters = self.last_tally, self.tier.counters
        saved = tally.unique - tally.kept
        with self.lock:
            self._stalls.flush()
        return Stats(
            packs=tally.packs,
            replayed=tally.replayed,
            in_flight_bytes=self.last_pass.in_flight_bytes,
            memory_saved_bytes=saved,
            memory_saved_percent=100.0 * saved / tally.unique if tally.unique else None,
            small_storages=tally.small,
            small_bytes=tally.small_bytes,
            coverage_percent=None if self.coverage is None else self.coverage.percent,
            checkpointed_blocks=self.last_pass.checkpointed,
            total_stall_seconds=max(0.0, counters.stalls.total_seconds - counters.probed_seconds),
            stalls=dict(self._stalls.by_block),
            total_copy_out_bytes=counters.out_bytes - counters.probed_bytes,
            total_copy_in_bytes=counters.in_bytes - counters.probed_bytes,
            copy_out_bytes_per_second=counters.out_bytes_per_second,
            copy_in_bytes_per_second=counters.in_bytes_per_second,
            total_recomputes=self.restorer.recomputes,
            total_recompute_seconds=self.restorer.recompute_seconds,
            demoted_sites=tuple(sorted(map(str, list(self.trust.demoted)))),
            live_tickets=len(self.live_tickets),
            store_bytes=self.tier.used_bytes,
            store=self.tier.gauges(),
            total_refused_bytes=self._copy_out.refused_bytes,
            **tally.fields(),
        )


def _lets(name: str, filter_: TensorFilter | None, tensor: torch.Tensor) -> bool:
    """Whether a filter returns true for a tensor."""
    answer: Any = filter_ is None or filter_(tensor)
    if answer is None:
        raise ConfigError(
            f"{name} returned None", expected="true or false", hint="end it with return True or return False"
        )
    return bool(answer)
