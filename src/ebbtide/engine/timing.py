"""A measured step: how long each block takes, what it saves, and what recomputing that costs.

[Note: a measured step]
Events divide a step into consecutive parts: a block's forward begins or ends, a block's backward begins, the backward
ends. A part belongs to the block that began it, and time between two blocks to the earlier one; the time from the last
forward to the first backward is counted apart, and so is the epilogue, from the end of the first block's backward to
the next pass. Where autograd goes on beyond the blocks, to an embedding, that backward ends when the gradient of the
block's input is there (``marks``): an embedding's gradient, as large as its weight, would look like time of the block.
Blocks of other graphs in between end a part and are not counted; those of a further backward of the pass are.
Recomputes are timed in forward and in backward (``ebbtide.engine.executed``).

[Note: plain blocks]
A block that runs *plain* runs without hooks, as in ordinary training: nothing is packed, autograd keeps what it saves
and checks it itself. In one of the measured steps one block of each kind does, so that its cost without hooks is
measured and not inferred. Its backward begins when the gradient of what it returned is there; so that both are cut
alike, the same is noted for blocks with hooks (``marks``). Blocks of which a plan keeps everything run plain, and while
a plan is judged a few others do (``unhooked``, ``yardsticks``).

[Note: still resident memory]
What a block saved and the step did not keep may still be on the device because others hold it: a block's input while
the block runs, its output while the head reads it. A plan that keeps it takes no more memory there, so these bytes are
counted, stretch by stretch, to be subtracted from the memory that is not saved tensors: those that are resident from
the beginning of the stretch to its end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ebbtide.base.actions import Action, Candidate, NoRecipe
from ebbtide.engine.executed import RecomputeTimer
from ebbtide.engine.passes import Pass, PlainRun, RunRecord
from ebbtide.engine.spans import Span, SpanTimer
from ebbtide.engine.stretches import Stopwatch, Stretches
from ebbtide.engine.timed import TimedBlock, TimedStep, TimedUnit
from ebbtide.store.meter import HostMeter, Meter, Timestamp

Prepare = Callable[[], Callable[[], object] | None]

GROWTH = 1.1
"""A pass that saves this many times the bytes of those that were measured is measured too."""

TRIES = 3
"""How often a larger size is measured if memory counts and the passes that follow it are smaller."""

BETWEEN_STEPS = "between steps"
"""Names the wait between two steps."""

OTHERS = 16
"""Backwards of other graphs after which a pass without its own is forgotten: its graph may be held for good."""


class _Pass(Stopwatch):
    """The pass that is measured; ``waited`` are the seconds that blocks had waited for copies before it."""

    def __init__(
        self, meter: Meter, pass_: Pass, device: torch.device | None, *, memory: bool, waited: Mapping[str, float]
    ) -> None:
        super().__init__(meter, pass_, device, memory=memory)
        self.waited, self.recomputes = dict(waited), RecomputeTimer(meter)
        self.epilogue: Stretches | None = None
        self.saved_bytes = 0
        self.others = 0  # backwards of others that ended before its own came
        self.left: list[tuple[weakref.ref[torch.UntypedStorage], Candidate]] = []  # what was not kept
        self._known = 0  # how much of that was known when the open stretch began

    def is_dropped(self, other: Pass) -> bool:
        """Whether its graph died before the pass ``other``, and no backward came, or is not expected to come."""
        return other is not self.pass_() and (not self.by_run or (not self.backward_began and self.others >= OTHERS))

    def cut(self, then: Stretches | None, device: torch.device | None, now: Timestamp | None = None) -> None:
        """End the stretch that is open, note its memory, and begin one of ``then``."""
        ended = self._open
        super().cut(then, device, now)
        if self._memory:
            where = device if ended is None else ended[2]
            peak_bytes = self._meter.take_peak_bytes(where)
            if ended is not None:
                ended[0].add_memory(peak_bytes, self._resident_bytes())
            if where != device:
                self._meter.take_peak_bytes(device)  # what was before does not count
        self._known = len(self.left)

    def _resident_bytes(self) -> int:
        """Return what was not kept but is resident; of what was saved since the stretch began, only inputs."""
        return sum(
            unit.nbytes
            for place, (storage, unit) in enumerate(self.left)
            if (place < self._known or unit.block_input) and storage() is not None
        )


class StepTimer:
    """Measures one pass after another while it is wanted. See [Note: a measured step].

    Args:
        meter: Measures time and memory.
        done: Called with each measured step, when the first block of the next pass begins. Returns whether to measure
            another step.
        waited: Returns the seconds that blocks waited for copies so far, as ``Stats.stalls`` names them, and as
            ``BETWEEN_STEPS`` those in which the loop was made to wait between two steps.
        memory: Whether memory is measured too.
        outdated: Returns whether the measurement is out of date.
        saw_span: Called with each span, and with None: see ``done`` of ``SpanTimer``.
        resumes: See ``SpanTimer``.
        unsure: See ``SpanTimer``.
    """

    def __init__(
        self,
        meter: Meter,
        done: Callable[[TimedStep], bool] = lambda step: False,
        *,
        waited: Callable[[], Mapping[str, float]] = dict[str, float],
        memory: bool = False,
        outdated: Callable[[], bool] = lambda: False,
        saw_span: Callable[[Span | None], bool] = lambda span: False,
        resumes: Callable[[SpanTimer], bool] = lambda timer: True,
        unsure: Callable[[], int] = lambda: 0,
    ) -> None:
        self._meter, self._done, self._waited, self._memory = meter, done, waited, memory
        self.wanted, self._largest_bytes = False, 0  # ``wanted``: passes are measured now
        self._pass: _Pass | None = None
        self._device: torch.device | None = None
        self.began: Timestamp | None = None  # the first block of the latest pass that is measured
        self.recomputes: RecomputeTimer | None = None  # of the pass that is measured, if there is one
        self.marks = False  # note when the gradient of a block's output is there
        self.plain: frozenset[str] = frozenset()  # blocks that run plain in the pass that is measured
        self.checkpointed: frozenset[str] = frozenset()  # blocks that are checkpointed in a timed pass, if they can be
        self.unhooked: frozenset[str] = frozenset()  # blocks that run plain where nothing is measured
        self.yardsticks: frozenset[str] = frozenset()  # blocks that do, too, in passes that are timed as a whole
        # Times whole passes where none is measured.
        self.spans = SpanTimer(meter, saw_span, memory=memory, resumes=resumes, unsure=unsure)
        self.outdated = outdated
        self._larger_bytes, self._tries = 0, 0  # a size that was worth a measurement, and how often
        self._enough_bytes = 0  # up to that size passes were measured often enough
        self.expected_bytes = 0  # of the pass that triggered the measurement, until a plan is made

    def want(self) -> None:
        """Measure from the next pass on, and time no whole passes until a plan is made of it."""
        self.wanted = True
        self.spans.want(wanted=False)
        self.spans.paused = 0

    @property
    def times_blocks(self) -> bool:
        """Whether the beginning of each block's backward is noted now."""
        return self.marks if self.wanted else self.spans.wanted

    def runs_plain(self, name: str) -> bool:
        """Return whether a block that is about to begin runs without hooks. See [Note: plain blocks]."""
        if self.wanted:
            return name in self.plain
        return name in self.unhooked or (self.spans.wanted and name in self.yardsticks)

    def tries(self, name: str) -> bool:
        """Return whether a block that is about to begin is checkpointed to measure what that takes."""
        return (self.wanted or self.spans.wanted) and name in self.checkpointed

    # Called by the engine

    def planned(self, saved_bytes: int) -> None:
        """A plan was made from a step whose blocks saved that much."""
        self._largest_bytes, self.expected_bytes = max(saved_bytes, self._enough_bytes), 0

    def pass_ends(self, saved_bytes: int) -> None:
        """A forward is over. One that saved clearly more than all that were measured is worth another measurement.

        Args:
            saved_bytes: What its blocks saved.
        """
        if self.wanted:
            self._largest_bytes = max(self._largest_bytes, saved_bytes)
            if self._pass is not None and not self._pass.saved_bytes:
                self._pass.saved_bytes = saved_bytes
        elif saved_bytes > GROWTH * self._largest_bytes:
            self.want()
            self.expected_bytes = saved_bytes
            self._tries = self._tries + 1 if saved_bytes <= GROWTH * self._larger_bytes else 1
            self._larger_bytes = max(self._larger_bytes, saved_bytes)
            # The time does not depend on whether the next passes are as large. The peak does, but all may be smaller.
            if not self._memory or self._tries == TRIES:
                self._largest_bytes = self._enough_bytes = self._larger_bytes
        elif self.outdated():
            self.want()
        self.spans.pass_ends(saved_bytes if saved_bytes <= GROWTH * self._largest_bytes else None)

    def block_begins(self, run: RunRecord | PlainRun) -> None:
        """A block's forward begins."""
        self._device = run.device or self._device
        if self._pass is not None:
            self.hand_over()
        if not self.wanted:
            self.spans.block_begins(run, self._device)
            return
        now = self._pass
        if now is None or now.is_dropped(run.pass_):
            waited = self._waited()
            now = self._pass = _Pass(self._meter, run.pass_, self._device, memory=self._memory, waited=waited)
            self.began, self.recomputes = now.began, now.recomputes
        if run.pass_ is now.pass_() and not now.backward_began:
            now.begin(run, self._device)
        else:
            now.alone = False
            now.cut(None, self._device)

    def block_ends(self, run: RunRecord | PlainRun) -> None:
        """A block's forward is over."""
        now = self._pass or self.spans.open
        block = None if now is None else now.by_run.get(run)
        if now is not None and block is not None:
            if not isinstance(run, PlainRun):
                block.checkpointable, block.input_bytes = run.checkpointable, run.tally.checkpoint_bytes
                block.pack_seconds = run.pack_seconds
            now.cut(now.blocks[-1].after, self._device)

    def backward_begins(self, run: RunRecord | PlainRun) -> None:
        """Begin a block's backward."""
        self._device = run.device or self._device
        now = self._pass or self.spans.open
        if now is not None and now.ended is None:
            block = now.by_run.get(run)
            now.backward_began = now.backward_began or block is not None
            now.cut(None if block is None else block.backward, self._device)
        elif now is not None and run in now.by_run:
            now.alone = False  # several backwards

    def is_first(self, run: RunRecord | PlainRun) -> bool:
        """Whether a block that has begun is the first of a pass that is timed."""
        now = self._pass or self.spans.open
        return now is not None and run in now.by_run and now.by_run[run] is now.blocks[0]

    def backward_leaves(self, run: RunRecord | PlainRun) -> None:
        """The gradient of the first block's input is there."""
        self._device = run.device or self._device
        now = self._pass or self.spans.open
        if now is not None and run in now.by_run:
            now.reached = self._meter.timestamp(self._device)

    def backward_ends(self, *, raised: bool = False) -> None:
        """A backward is over; what was measured of one that ``raised`` is dropped."""
        now = self._pass
        if now is None:
            self.spans.backward_ends(self._device, raised=raised)
        elif not now.backward_began:
            now.others += 1
        elif raised:
            self.forget()
        else:
            now.epilogue = Stretches() if now.epilogue is None else now.epilogue
            now.end(now.epilogue, self._device)

    def forget(self) -> None:
        """Drop what was measured of the pass: no backward of it is expected any more."""
        self._pass = self.recomputes = None

    def hand_over(self) -> None:
        """Hand over a step whose backward is over, or such spans: a plan may be made of it, or another one of them."""
        if self._pass is None:
            self.spans.finish()
        elif self._pass.epilogue is not None:
            self._pass.cut(None, self._device)
            self._finish(self._pass, self._pass.epilogue)

    @property
    def measuring(self) -> bool:
        """Whether what blocks save now is a part of a measured step."""
        return self._pass is not None

    def saw(
        self,
        run: RunRecord,
        action: Action,
        unit: Candidate,
        storage: torch.UntypedStorage,
        *,
        narrow_bytes: int | None,
        movable: bool,
        prepare: Prepare | None,
        no_recipe: NoRecipe | None = None,
        host_seconds: float = 0.0,
    ) -> None:
        """A block saved a storage.

        Args:
            run: The block's run.
            action: What was done with it; what was stored in a narrower type counts as offloaded.
            unit: Its description.
            storage: The storage.
            narrow_bytes: Its size in the narrower type in which it is offloaded, if there is one.
            movable: The user's filters let it be offloaded.
            prepare: Returns a function that recomputes it, or None if that is not allowed; None if no recipe is known.
            no_recipe: Why none is; None if one is, or that is not known.
            host_seconds: The host's time of carrying out the action.
        """
        block = None if self._pass is None else self._pass.by_run.get(run)
        if self._pass is None or block is None:
            return
        saved, device, recomputes = (unit.site, unit.nbytes), run.device or self._device, self._pass.recomputes
        if prepare is not None and not recomputes.knows(saved):
            began = self._meter.timestamp(device)
            recomputes.time(saved, prepare(), device)
            block.aside.append((began, self._meter.timestamp(device)))
        if action is not Action.KEEP:
            self._pass.left.append((weakref.ref(storage), unit))
        block.units.append(
            TimedUnit(
                site=unit.site, nbytes=unit.nbytes, narrow_bytes=narrow_bytes, block_input=unit.block_input,
                movable=movable, action=action, recompute_seconds=None,
                recompute_flops=None if prepare is None else unit.recompute_flops, no_recipe=no_recipe,
                host_seconds=host_seconds,
            )
        )  # fmt: skip

    # Internals

    def _finish(self, found: _Pass, epilogue: Stretches) -> None:
        meter, waited, head = self._meter, self._waited(), found.join()
        prices = found.recomputes.prices()
        executions = Counter(block.name for block in found.blocks)
        for block in found.blocks[:-1]:
            block.forward.add_memory(block.after.peak_bytes, block.after.resident_bytes)

        def own(stretches: Stretches, edge: str, name: str = "", aside: float = 0.0) -> float:
            key = f"{edge} {name}".strip()
            stall = (waited.get(key, 0.0) - found.waited.get(key, 0.0)) / max(executions[name], 1)
            return max(stretches.seconds(meter) - stall - aside, 0.0)

        def priced(unit: TimedUnit) -> TimedUnit:
            seconds = None if unit.recompute_flops is None else prices.get((unit.site, unit.nbytes))
            if seconds is None:
                differs = unit.no_recipe if unit.recompute_flops is None else NoRecipe.DIFFERS
                return replace(unit, recompute_seconds=None, recompute_flops=None, no_recipe=differs)
            return replace(unit, recompute_seconds=seconds)

        blocks = tuple(
            TimedBlock(
                name=block.name,
                kind=block.kind,
                units=tuple(map(priced, block.units)),
                forward_seconds=own(block.forward, "forward", block.name, block.aside.seconds(meter)),
                backward_seconds=own(block.backward, "backward", block.name),
                forward_peak_bytes=block.forward.peak_bytes,
                backward_peak_bytes=block.backward.peak_bytes,
                forward_resident_bytes=block.forward.resident_bytes,
                backward_resident_bytes=block.backward.resident_bytes,
                plain=block.plain,
                checkpointed=block.checkpointed,
                checkpointable=block.checkpointable,
                input_bytes=block.input_bytes,
                pack_seconds=block.pack_seconds if isinstance(meter, HostMeter) else 0.0,
            )
            for block in found.blocks
        )  # fmt: skip
        step = TimedStep(
            blocks=blocks,
            head_seconds=head.seconds(meter),
            epilogue_seconds=own(epilogue, BETWEEN_STEPS),
            head_peak_bytes=head.peak_bytes,
            head_resident_bytes=head.resident_bytes,
            saved_bytes=found.saved_bytes,
            in_use_bytes=found.in_use_bytes,
            alone=found.alone,
        )
        self.forget()
        self.wanted = self._done(step)
