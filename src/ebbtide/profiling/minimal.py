"""``Minimal``: the memory of checkpointing in the fastest of four methods, measured per kind of block.

[Note: four methods]
``Minimal`` promises the memory of activation checkpointing and no more than its time. There are four methods.
*Recipes* recompute single tensors and usually cost less than a second forward; but each has overhead, and a block of
many small tensors may spend more on them than on its forward. *Checkpointing* repeats the forward of the block.
*Offloading* all that a block saves costs no compute but copies, and its speed depends on the store. A *mix* is a plan
of the planner for single tensors: the one that is predicted to be fastest within the memory of checkpointing. They are
compared in the model's own steps (``ebbtide.profiling.trials``). The first of each warms up. From then on a kind has
the method with the lowest median. One that ran in other steps than checkpointing must certainly be faster than the
methods that did not: by more than both uncertainties, and by ``FASTER``. Steps of other sizes are compared by their
time per byte, if they differ by ``GROWTH`` at most.

Without an accelerator steps alternate: in one every other block of a kind is checkpointed and the rest use recipes; in
the next all blocks are offloaded, because copies of a few would have the store to themselves. Recipes and checkpointing
need the memory of the inputs of all blocks and of what one block saves. Offloading needs what two blocks save, as their
copies are in flight. So it is tried where that is no more, and if the disk has room.

On an accelerator host memory for everything is much, and a link hides a part of the copies only. There steps alternate
between blocks that are all checkpointed, as far as they can be, and a mix, of which recipes alone are one. It is made
of the second measured step, the first that is like later ones, for the peak of the first step with checkpoints. The
mean of the blocks of a kind counts, of both, because a mix treats them differently and some are larger than others. It
is out if a step with it took more memory than those with checkpoints, as if all were as long, or if not all kinds are
faster with it: other combinations were not tried. Only steps count that begin with as much memory in use as the
measured one, which is measured again if a later one begins with more: gradients accumulate, and an optimizer has a
state. Where blocks keep more than their inputs whatever the plan, a measured step would need the memory of ordinary
training: no mix is tried.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from ebbtide.base.actions import Action, Candidate
from ebbtide.base.events import Bus
from ebbtide.base.weak import weakly
from ebbtide.config import Minimal
from ebbtide.engine import Engine
from ebbtide.engine.marks import marked
from ebbtide.engine.spans import Span
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import GROWTH, StepTimer
from ebbtide.planner import TablePlan, plan_for
from ebbtide.planner.policies import PolicyPlan
from ebbtide.profiling.baseline import has_backward
from ebbtide.profiling.trials import Method, Range, Trial, fastest, mixed, trials
from ebbtide.store.meter import allocatable_bytes, meter_for
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

ROUNDS = 3
"""Steps of each method; the first one warms up."""

MOST_SKIPPED = 20
"""Steps that were not timed, because graphs overlap or sizes vary, after which nothing is compared any more."""

SAME = 0.01
"""Share by which the memory at the beginning of two steps may differ if their peaks are compared, and up to which they
are equally long: gradients that accumulate and an optimizer's state are more."""

STATES = 3
"""Times that a step is measured again because a later one began with more memory."""

COMPARED = "the memory of checkpointing, by the fastest method for each kind of block"
"""How ``explain`` begins once methods were compared."""

NO_MIX = "no plan for single tensors fits into its memory and promises to be faster"
UNTIMED = "too few steps were alike in what they save and what is in memory to compare it with a mix"
"""Why a mix is not tried."""

MIX_LARGER = "; a mix took more memory"
STEPS_UNLIKE = "; steps differ in size, so no times of different steps are compared"
MIX_APART = "; a mix is not faster for all kinds of blocks"
"""Why a method is not chosen."""

WATCHED = 1e6
"""No block saves so many times the bytes of its inputs: above it the question is whether to watch the block at all."""


class MinimalPlan(PolicyPlan):
    """The plan of ``Minimal``. See [Note: four methods].

    Args:
        policy: The user's policy.
        tier: The store of offloaded bytes.
        window_bytes: The user's limit in flight; None: follows the model.
        bus: Receives the plan when it is made.

    Attributes:
        current: Another object whenever the answers change: see ``StandingPlan``.
        voted: Decides whether blocks that need other ranks are checkpointed: not what one rank measures, or tries.
        judged: All that could be compared was; the plan stays.
    """

    current: PolicyPlan | TablePlan

    def __init__(self, policy: Minimal, tier: Tier, window_bytes: int | None, bus: Bus) -> None:
        rule = self.current = self.voted = plan_for(policy)
        super().__init__(policy, rule.name, rule.text)
        self._tier, self._window_bytes, self._bus, self.judged = tier, window_bytes, bus, False
        self._mixes = allocatable_bytes(tier) is not None
        self._warm = not self._mixes  # a mix is made of the second measured step
        self._measured: TimedStep | None = None  # of which the mix is made
        self._mix: TablePlan | None = None
        self._peaks: dict[bool, list[int]] = {True: [], False: []}  # of steps with the mix, and of others
        self._timer = StepTimer(meter_for(tier))  # idle until an engine is watched
        self._engine: Callable[[], Engine | None] = lambda: None
        self._kinds: dict[str, str] = {}  # path of a block → its kind
        self._with_backward = frozenset[str]()  # blocks that are compared
        self._methods: dict[str, Method] = {}  # kind → the method that was chosen, or is tried now
        self._why: dict[str, str] = {}  # kind → the times of each method
        self._trials: list[Trial] = []  # of each round
        self._states, self._outdated = STATES, False
        self._tried = self._skipped = 0  # steps with a trial, and those that were not timed
        self._seconds: defaultdict[tuple[str, Method], list[float]] = defaultdict(list)  # for each byte of the step
        self._saved_bytes: list[int] = []  # of each step that counts

    def watch(self, engine: Engine) -> None:
        """Let an engine measure its steps for this plan."""
        self._engine, trust = weakref.ref(engine), engine.trust
        self._timer = engine.timer = StepTimer(
            meter_for(self._tier), weakly(self.saw_step), memory=self._mixes, outdated=weakly(self._take_outdated),
            saw_span=weakly(self.saw_span), unsure=lambda: trust.unsure,
        )  # fmt: skip
        self._timer.marks = True  # so all methods are measured in the same parts
        self._timer.want()

    @property
    def reads_kept_bytes(self) -> bool:
        """Whether ``choose`` reads how much is kept: a mix does."""
        return Method.MIXED in self._methods.values()

    def choose(self, candidate: Candidate) -> Action:
        """Return the action of a storage, by the method of its kind of block."""
        kind = candidate.site.block_kind
        if (table := self._table(kind)) is not None:
            return table.choose(candidate)
        return Action.OFFLOAD if self._methods.get(kind) is Method.OFFLOAD else super().choose(candidate)

    def needs_recipe(self, candidate: Candidate) -> bool:
        """Whether RECOMPUTE may be chosen."""
        table, kind = self._table(candidate.site.block_kind), candidate.site.block_kind
        return self._methods.get(kind) is not Method.OFFLOAD if table is None else table.needs_recipe(candidate)

    def recomputes_in(self, block_name: str) -> bool:
        """Whether anything in a block may be recomputed."""
        kind = self._kinds.get(block_name, "")
        table = self._table(kind)
        return self._methods.get(kind) is not Method.OFFLOAD if table is None else table.recomputes_in(block_name)

    def _table(self, kind: str) -> TablePlan | None:
        """Return the plan for the tensors of a kind of block that is mixed."""
        return self._mix if self._methods.get(kind) is Method.MIXED else None

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return CHECKPOINT or KEEP as was measured, and as the heuristic does where nothing was."""
        method = self._methods.get(kind)
        if method is not None:
            return Action.CHECKPOINT if method is Method.CHECKPOINT else Action.KEEP
        measures = self._mixes and self._warm and not self.judged and self._timer.wanted
        if measures and must_keep_bytes <= WATCHED * input_bytes:
            return Action.KEEP  # a mix is made of what blocks save one by one
        return super().block_action(kind, index, input_bytes=input_bytes, must_keep_bytes=must_keep_bytes)

    def explain(self) -> str:
        """Describe the plan, and what was measured for each kind of block."""
        why = [f"{kind} blocks are {why}" for kind, why in self._why.items()]
        mix = [self._mix.explain()] if self._mix is not None and self.reads_kept_bytes else []
        others = sorted({*self._kinds.values()} - self._why.keys())
        rule = [f"{', '.join(others)} blocks: {super().explain()}"] if why and others else []
        return "\n".join([COMPARED if why else super().explain(), *why, *rule, *mix])

    def save(self, path: str | Path) -> None:
        """Write the mix that was chosen into a file. See ``TablePlan.save``.

        Raises:
            ConfigError: None was: the plan is determined by its policy.
            DataError: It cannot be written.
        """
        mix = self._mix if self.judged and self.reads_kept_bytes else None
        super().save(path) if mix is None else mix.save(path)

    def saw_step(self, step: TimedStep) -> bool:
        """Process a measured step, and begin to compare the methods; return whether another is wanted."""
        if self.judged:
            return False
        if not self._warm:
            self._warm, self._mixes = True, self._mixes and _can_move(step)
            return True
        if self._trials and (self.reads_kept_bytes or any(block.checkpointed for block in step.blocks)):
            self._end({})  # it grew while a method was tried
            return True
        self._kinds = {block.name: block.kind for block in step.blocks}
        self._with_backward = frozenset(block.name for block in filter(has_backward, step.blocks))
        self._trials = trials(step, self._tier, mixes=self._mixes)
        self.judged = not self._trials
        if self._trials:
            self._tried = self._skipped = 0
            self._measured, self._mix, self._peaks = step, None, {True: [], False: []}
            self._seconds.clear()
            self._saved_bytes.clear()
            self._timer.planned(step.saved_bytes)
            self._try()
        return False

    def saw_span(self, span: Span | None) -> bool:
        """Process a step with a trial; return whether another follows."""
        if not self._trials:
            return False
        if span is None or span.verifies or not span.saved_bytes or not self._check_memory(span):
            self._skipped += 1
            if self._outdated or self._skipped < MOST_SKIPPED:
                return not self._outdated
            self._give_up(UNTIMED)
            return False
        trial = self._trials[self._tried % len(self._trials)]
        self._peaks[self.reads_kept_bytes].append(self._peak_bytes(span))
        if self._tried >= len(self._trials):
            self._note(trial, span)
        self._tried += 1
        if self._tried < ROUNDS * len(self._trials):
            return self._try()
        self._decide()
        return False

    def _check_memory(self, span: Span) -> bool:
        """Return whether a step's peak may be compared with a mix's; end the trials if more memory is in use now."""
        step = self._measured
        if not self._mixes or step is None or span.in_use_bytes is None or step.in_use_bytes is None:
            return True
        if span.in_use_bytes > (1 + SAME) * step.in_use_bytes and self._states:
            self._states, self._outdated = self._states - 1, True
            self._end({})
        less = span.in_use_bytes < (1 - SAME) * step.in_use_bytes or span.saved_bytes * GROWTH < step.saved_bytes
        return not less and not self._outdated

    def _peak_bytes(self, span: Span) -> int:
        """Return the peak of a step as if it were as long as the measured one; in doubt more of a mix, else less."""
        peak_bytes, in_use_bytes, step = span.peak_bytes or 0, span.in_use_bytes, self._measured
        if step is None or in_use_bytes is None or not step.saved_bytes:
            return peak_bytes
        longer = span.saved_bytes / step.saved_bytes
        if abs(longer - 1) <= SAME or (longer > 1) is self.reads_kept_bytes:  # gradients do not grow with the step
            return peak_bytes
        return in_use_bytes + int((peak_bytes - in_use_bytes) / longer)

    def _take_outdated(self) -> bool:
        """Return whether a step is to be measured again, once for each reason."""
        outdated, self._outdated = self._outdated, False
        return outdated

    def _give_up(self, why: str) -> None:
        """End the trials; where a mix was to be compared, checkpoint what can be."""
        able = {b.kind for b in self._measured.blocks if b.checkpointable} if self._mixes and self._measured else set()
        self._why = dict.fromkeys(able, f"{Method.CHECKPOINT.value}: {why}")
        self._conclude(dict.fromkeys(able, Method.CHECKPOINT))

    def _note(self, trial: Trial, span: Span) -> None:
        """Note the times of a step with a trial."""
        self._saved_bytes.append(span.saved_bytes)
        mixes = any(Method.MIXED in one.methods.values() for one in self._trials)
        blocks = [block for block in span.blocks if block.name in self._with_backward]
        kinds = [self._kinds.get(block.name, "") for block in blocks]
        repeated = {kind for kind, block in zip(kinds, blocks, strict=True) if block.checkpointed}
        found: defaultdict[tuple[str, Method], list[float]] = defaultdict(list)
        for kind, block in zip(kinds, blocks, strict=True):
            checkpointed = kind in repeated if mixes else block.checkpointed
            method = trial.methods.get(kind, Method.CHECKPOINT if checkpointed else Method.RECIPES)
            found[kind, method].append(block.seconds / span.saved_bytes)
        for key, seconds in found.items():
            self._seconds[key] += [fmean(seconds)] if mixes else seconds

    def _try(self) -> bool:
        """Begin the next trial; False: it is a mix, and none promises anything, so the trials are over."""
        trial = self._trials[self._tried % len(self._trials)]
        if Method.MIXED in trial.methods.values() and self._mix is None and self._measured is not None:
            limit_bytes = self._peaks[False][0]
            work = functools.partial(mixed, self._measured, self._tier, self._window_bytes, limit_bytes)
            self._mix = marked("plan", work)
            if self._mix is None:
                self._give_up(NO_MIX)
                return False
        self._timer.checkpointed = trial.checkpointed
        self._timer.spans.want()  # the host is ahead: passes that it has begun are not of this trial
        self._answer(dict(trial.methods))
        return True

    def _end(self, methods: dict[str, Method]) -> None:
        """End the trials, and restore blocks in these methods from now on."""
        self._trials.clear()
        self._measured = None
        self._timer.checkpointed = frozenset()
        self._answer(methods)

    def _conclude(self, methods: dict[str, Method]) -> None:
        """End the trials with the choice."""
        self._end(methods)
        self.judged = True
        self._bus.emit("plan", name=self.name, text=self.explain())

    def _answer(self, methods: dict[str, Method]) -> None:
        """Give other answers from now on."""
        if methods != self._methods:
            self._methods = methods
            mix = self._mix if self.reads_kept_bytes else None
            self.current = plan_for(self.policy) if mix is None else replace(mix)
            if (engine := self._engine()) is not None:
                engine.plan_changed()

    def _decide(self) -> None:
        """Choose a method for each kind, once all were tried."""
        alike = max(self._saved_bytes) <= GROWTH * min(self._saved_bytes)
        # Checkpointing and recipes were tried in the same steps.
        out = set[Method]() if alike else {Method.OFFLOAD, Method.MIXED}
        # The first step with checkpoints compares all bytes, which takes memory, too.
        larger = max(self._peaks[True][1:], default=0) > max(self._peaks[False][1:], default=0)
        if larger:
            out.add(Method.MIXED)
        took = self._times(out)
        methods = {kind: fastest(times) for kind, times in took.items()}
        apart = Method.MIXED in methods.values() and len(set(methods.values())) > 1
        if apart:  # the memory of such a combination is not known
            took = self._times(out | {Method.MIXED})
            methods = {kind: fastest(times) for kind, times in took.items()}
        reasons = (MIX_LARGER, larger), (STEPS_UNLIKE, not alike), (MIX_APART, apart)
        why = "".join(text for text, holds in reasons if holds)
        for kind, times in took.items():
            each = (f"{r.middle:.4g} s ({r.low:.4g} to {r.high:.4g}) {w.value}" for w, r in times.items())
            self._why[kind] = f"{methods[kind].value}: a block took " + ", ".join(each) + why
            logger.info("%s blocks are %s", kind, self._why[kind])
        self._conclude(methods)

    def _times(self, out: set[Method]) -> dict[str, dict[Method, Range]]:
        """Return the times of each kind of block of which several methods were tried, but those that are out."""
        found: dict[str, dict[Method, Range]] = {}
        for kind in dict.fromkeys(self._kinds.values()):
            tried = {method: self._seconds[kind, method] for method in Method if self._seconds[kind, method]}
            if len(tried) > 1:
                step_bytes = self._saved_bytes[0]
                found[kind] = {
                    method: Range.of([each * step_bytes for each in seconds])
                    for method, seconds in tried.items()
                    if method not in out
                }
        return found


def _can_move(step: TimedStep) -> bool:
    """Whether blocks keep no more than their inputs where all is offloaded or recomputed that can be."""
    return all(
        sum(unit.nbytes for unit in block.units if unit.action is Action.KEEP) <= block.input_bytes
        for block in step.blocks
        if not block.checkpointed
    )
