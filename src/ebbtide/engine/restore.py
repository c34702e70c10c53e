"""Serve a backward: find a saved tensor's bytes and restore them.

[Note: where the bytes are]
``Residence`` lists the places of an entry's bytes in the order in which they are tried. Bytes that were changed in
place since they were saved are skipped, or raise an error.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from ebbtide.base.actions import Plan
from ebbtide.base.errors import RestoreError, note_place
from ebbtide.base.events import Bus
from ebbtide.engine.executed import RecomputeTimer
from ebbtide.engine.layout import byte_view, checksum, content_bytes
from ebbtide.engine.marks import marked, recording
from ebbtide.engine.mover import SlotMover
from ebbtide.engine.passes import RunRecord
from ebbtide.engine.recompute import recompute
from ebbtide.engine.stats import StallBook
from ebbtide.engine.tickets import Entry, Residence, Ticket, operand_error
from ebbtide.engine.timing import StepTimer
from ebbtide.engine.trust import Trust
from ebbtide.schedule import CopyIn, CopyOut
from ebbtide.store.protocol import Slot, Tier

logger = logging.getLogger("ebbtide.engine")


class Backward:
    """What is remembered during one backward, and dropped at its end."""

    def __init__(self) -> None:
        self.flows: dict[int, CopyIn[Entry]] = {}  # by pass
        self.restored: list[weakref.ref[Any]] = []  # of entries, and what a function may read again
        self.read: list[weakref.ref[Ticket]] = []  # by the block that runs
        self.run: RunRecord | None = None


def _runs_elsewhere() -> bool:
    """Whether another thread is inside a backward."""
    called = torch.autograd.graph._engine_run_backward.__code__
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that held itself would keep its callers' tensors
    for frame in frames.values():
        inside: FrameType | None = frame
        while inside is not None and inside.f_code is not called:
            inside = inside.f_back
        if inside is not None:
            return True
    return False


def _warn_of_recorded(run: RunRecord) -> bool:
    """Warn that what a recorded backward saves stays, unless hooks are open around it; return whether."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # pyright: ignore
        return False
    logger.warning(
        "a backward through block %r was recorded (create_graph=True: forces, derivatives in a loss, gradient "
        "penalties): what it saves itself stays on the device and is in none of the figures; "
        "hint: open `with ebbtide.offload_saved_tensors():` around the forward and that backward, too",
        run.block.name,
    )
    return True


class _Engine(Protocol):
    """The part of ``Engine`` that a restorer uses; a protocol, because that module imports this one."""

    plan: Plan
    tier: Tier
    lock: threading.RLock
    trust: Trust
    timer: StepTimer | None
    lasts: bool

    def close_if_idle(self) -> None: ...


class Restorer:
    """Restores what backwards read. See [Note: where the bytes are].

    Args:
        engine: Whose entries are read.
        mover: Carries out copy-ins.
        copy_out: The copy-outs, which a backward cancels, and their window.
        stalls: Attributes the waits of reads.
        bus: Receives an event when a block's backward begins.

    Attributes:
        backwards: Those that run, by autograd's number for them.
        recomputes: Tensors that were recomputed.
        recompute_seconds: The host's time for that.
    """

    def __init__(
        self, engine: _Engine, mover: SlotMover, copy_out: CopyOut[Entry], stalls: StallBook, bus: Bus
    ) -> None:
        self._mover, self._copy_out, self._stalls, self._bus = mover, copy_out, stalls, bus
        self._engine = weakref.ref(
            engine
        )  # weak: in a cycle, a dropped engine and its store would wait for the garbage collector
        self._lock, self._tier, self._trust = engine.lock, engine.tier, engine.trust
        self._window, self._waits = copy_out.window, engine.tier.stalls
        self.backwards: dict[int, Backward] = {}
        self.recomputes, self.recompute_seconds = 0, 0.0
        self._timer: RecomputeTimer | None = None  # while a step is measured
        self._warned = False  # of a backward that is recorded

    def read(self, ticket: Ticket, task: int) -> torch.Tensor:
        """Return the bytes of a ticket's entry; recompute them if they are nowhere else.

        Args:
            ticket: The ticket.
            task: Autograd's number for the backward; -1: none runs.
        """
        entry, run, backward = ticket.entry, ticket.run, self.backwards.get(task)
        slot = entry.slot
        if backward is not None:
            backward.read.append(weakref.ref(ticket))
        if slot is not None and entry.source is None and entry.residence is Residence.STORED:
            if run.unordered and backward is not None:
                run.reads.append(weakref.ref(entry))
            content = self._copied_in(entry, slot, backward, run, None)
        else:
            content = self.content(entry, backward, run)
        if content is None:
            began, timer = time.perf_counter(), self._timer
            read = functools.partial(self.content, backward=backward, run=run, target=entry)
            keep = functools.partial(self._keep, backward, run.block.name)
            work = functools.partial(recompute, self._trust, entry, run.block.name, read, keep)
            flow = None if backward is None else backward.flows.get(id(run.pass_))
            if timer is not None:
                timer.begin(run.device)
            content = self._with_room(flow, functools.partial(marked, "recompute", work))
            if timer is not None:
                timer.end(run.device)
            self.recompute_seconds += time.perf_counter() - began
        moved = content is not entry.source  # else an operator may still write it, as rrelu its noise
        if moved and entry.checksum is not None and checksum(content_bytes(content, entry.nbytes)) != entry.checksum:
            raise RestoreError(
                f"the bytes of {entry.site} came back different ({entry.action.value})",
                expected="what was saved",
                hint="please report this with `ebbtide doctor --versions`; keep_filter can leave the tensor out",
            )
        return content

    def content(
        self,
        entry: Entry,
        backward: Backward | None = None,
        run: RunRecord | None = None,
        *,
        target: Entry | None = None,
    ) -> torch.Tensor | None:
        """Return an entry's bytes if they need no recompute, else None.

        Args:
            entry: The entry.
            backward: Which needs them, if one runs.
            run: The block that needs them.
            target: What is recomputed from them, if they are an operand.
        """
        if run is not None and run.unordered and backward is not None:
            run.reads.append(weakref.ref(entry))  # from wherever it is served: in the next run it may be elsewhere
        match entry.residence:
            case Residence.RESIDENT:
                if entry.source is None and entry.kept is not None:
                    entry.source = byte_view(entry.kept, 0, entry.last, entry.empty)
                elif backward is not None and run is not None and (flow := backward.flows.get(id(run.pass_))):
                    flow.has_read(entry)
                return entry.source
            case Residence.RESTORED:
                content, stream = entry.restored, entry.restored_on
                if content is not None and stream is not None and stream != self._tier.stream_of(content.device):
                    self._tier.follow(content, stream)
                return content
            case Residence.ELSEWHERE:
                reference = entry.storage_ref
                storage = None if reference is None else reference()
                if storage is None:  # it died meanwhile
                    return self.content(entry, backward, run, target=target)
                return byte_view(storage, entry.first, entry.last, entry.empty)
            case Residence.STORED if entry.slot is not None:
                return self._copied_in(entry, entry.slot, backward, run, target)
            case Residence.RECOMPUTABLE:
                return None
            case _:
                raise operand_error(str(entry.site))

    def _copied_in(
        self, entry: Entry, slot: Slot, backward: Backward | None, run: RunRecord | None, target: Entry | None
    ) -> torch.Tensor:
        """Return the bytes of an entry from the store; the backward that needs them keeps them.

        Args:
            entry: The entry.
            slot: Where its bytes are.
            backward: See ``content``.
            run: See ``content``.
            target: See ``content``.
        """
        flow = None if backward is None or run is None else backward.flows.get(id(run.pass_))
        if run is not None:
            self._waits.reader = "backward", run.block.name, entry.nbytes
        try:
            take, timer = slot.take, self._timer
            if timer is not None and run is not None and target is not None and entry is not target:
                take = functools.partial(timer.operand, slot.take, run.device)
            take = functools.partial(marked, "copy_in", take) if recording() else take
            try:  # as ``_with_room``, without the call: one that finds no room has made nothing
                content = take()
            except torch.OutOfMemoryError:
                self._make_room(flow)
                content = take()
        except BaseException as error:
            if target is not None and entry is not target:
                note_place(error, f"while reading {entry.site} ({entry.action.value}), an operand of a recompute")
            raise
        if backward is not None:
            entry.restored, entry.restored_on = content, self._tier.stream_of(content.device)
            backward.restored.append(weakref.ref(entry))
        if flow is not None:
            flow.has_read(entry)
        return content

    def _with_room(self, flow: CopyIn[Entry] | None, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``work`` returns; if it finds no room, make some and try once more."""
        try:
            return work()
        except torch.OutOfMemoryError:
            self._make_room(flow)
        return work()  # not in the handler: until it ends, the error's frames hold what the first attempt made

    def _make_room(self, flow: CopyIn[Entry] | None) -> None:
        """Discard what was prefetched; raise the error that is being handled if nothing was."""
        if flow is None or not flow.ahead_bytes:
            raise
        self._window.shrink(flow.ahead_bytes)
        flow.discard()

    def begin_block(self, run: RunRecord, task: int) -> None:
        """Begin a block's backward: cancel copy-outs that are not needed, and prefetch what comes next.

        One that begins with a block that an earlier backward began prefetches nothing until it reaches another block: a
        zero-bubble schedule has one for each weight, which reads a tensor or two of one block, and all of them would
        prefetch the same. A further backward through a whole graph does without the prefetch of its first block.
        """
        if run.is_open:
            run.backward_begins()
        backward = self.watch(task)
        again = run.task != -1 and backward.run is None
        run.task, run.unordered = task, run.order_key not in run.orders
        if backward.run is not None and backward.run.reads:
            backward.run.record_order()
        backward.run = run
        for reference in backward.read:
            if (ticket := reference()) is not None:  # its graph is retained, and its next backward restores this again
                ticket.entry.restored = None
        backward.read.clear()
        flow = backward.flows.get(id(run.pass_))
        if flow is None and not again:
            latest = run.pass_.latest
            if latest is None or not latest.is_open:  # else a gradient inside a forward, which goes on
                self._copy_out.cancel(run.pass_)
            self._window.recover()
            flow = backward.flows[id(run.pass_)] = CopyIn(run.upcoming(), self._window, self._mover)
        self._stalls.flush()
        self._waits.reader = "backward", run.block.name, None
        logger.debug("Reloading activation group %d/%d", run.block.index + 1, run.block.count)
        self._bus.emit("block_backward", index=run.block.index, name=run.block.name)
        engine = self._engine()
        if torch.is_grad_enabled() and not self._warned and engine is not None and engine.plan.name != "keep":
            self._warned = _warn_of_recorded(run)
        if engine is not None and engine.timer is not None:
            engine.timer.backward_begins(run)
            self._timer = engine.timer.recomputes
        if flow is not None:
            flow.reach(run.number)
            flow.advance()

    def watch(self, task: int) -> Backward:
        """Return the state of the backward that runs now; from now on its end is noticed."""
        backward = self.backwards.get(task)
        if backward is None:
            backward = self.backwards[task] = Backward()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(task, all_read=True))
        return backward

    def end_raised(self) -> None:
        """End the backwards that raised, unless another thread runs one: it is unknown which raised."""
        if self.backwards and not _runs_elsewhere():
            for task in list(self.backwards):
                self.end(task)

    def end(self, task: int, *, all_read: bool = False) -> None:
        """End a backward, and release what it restored.

        Args:
            task: Autograd's number for it.
            all_read: It did not raise: its last block has read all that it wanted.
        """
        with self._lock:
            backward = self.backwards.pop(task, None)
            if backward is None:
                return
            if all_read and backward.run is not None and backward.run.reads:
                backward.run.record_order()
            for reference in backward.restored:
                entry = reference()
                if entry is not None:
                    entry.restored = None
            for flow in backward.flows.values():
                flow.discard()
            self._tier.trim()
            self._stalls.flush()
            engine = self._engine()
            if engine is not None and engine.timer is not None:
                engine.timer.backward_ends(raised=not all_read)
                self._timer = None
            try:  # of an engine that may end now, no optimizer step awaits comparisons
                self._trust.end_backward(wait=all_read and (engine is None or not engine.lasts))
            finally:
                if engine is not None:
                    engine.close_if_idle()

    def _keep(self, backward: Backward | None, block: str, entry: Entry, content: torch.Tensor) -> None:
        """Compare what was recomputed with what was saved, and keep it until the backward ends."""
        if entry.fingerprint is not None and (same := entry.fingerprint.same(content)) is not True:
            self._trust.require(same, functools.partial(self._trust.differs, entry.site, block))
        self.recomputes += 1
        if self._timer is not None:
            self._timer.made((entry.site, entry.nbytes))
        if backward is not None:
            entry.restored, entry.restored_on = content, self._tier.stream_of(content.device)
            backward.restored.append(weakref.ref(entry))
