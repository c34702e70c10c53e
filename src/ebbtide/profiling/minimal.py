"""``Minimal``: the memory of checkpointing in the fastest of three methods, measured per kind of block.

[Note: three methods]
``Minimal`` promises the memory of activation checkpointing and no more than its time. There are three methods.
*Recipes* recompute single tensors and usually cost less than a second forward; but each has overhead, and a block of
many small tensors may spend more on them than on its forward. *Checkpointing* repeats the forward of the block.
*Offloading* all that a block saves costs no compute but copies, and its speed depends on the store. So they are
compared in the model's own steps. After the first step, whose storages are noted, steps alternate: in one every other
block of a kind is checkpointed and the rest use recipes; in the next all blocks are offloaded, because copies of a few
would have the store to themselves. The first of each warms up. From then on a kind is checkpointed, unless another
method was certainly faster: its median lower by more than both uncertainties, and by ``FASTER``. Among those the lowest
median wins. Steps of other sizes are compared by their time per byte, if they differ by ``GROWTH`` at most.

Recipes and checkpointing need the memory of the inputs of all blocks and of what one block saves. Offloading needs what
two blocks save, as their copies are in flight. So it is tried where that is no more, on a CPU, if the disk has room: on
an accelerator it has not been measured, and host memory for everything is much.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from ebbtide.base.actions import Action, Candidate, Plan
from ebbtide.base.events import BUS, Bus
from ebbtide.base.weak import weakly
from ebbtide.config import Auto, Minimal, Policy
from ebbtide.engine import Engine
from ebbtide.engine.spans import Span, SpanTimer
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import GROWTH, StepTimer
from ebbtide.planner import plan_for
from ebbtide.planner.rules import PolicyPlan
from ebbtide.profiling.baseline import quartile
from ebbtide.profiling.measured import MeasuredPlan
from ebbtide.schedule.window import LEAST_WINDOW
from ebbtide.store.disk import DiskTier
from ebbtide.store.meter import meter_for
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

ROUNDS = 3
"""Steps of each method; the first one warms up."""

MOST_SKIPPED = 6
"""Steps that were not timed, because graphs overlap or sizes vary, after which nothing is compared any more."""

FASTER = 0.03
"""Share by which a method must certainly be faster than a second forward."""

NOTCH = 1.57
"""Times the interquartile range, over the root of the count: the 95 % uncertainty of a median."""


class Method(enum.Enum):
    """How the saved tensors of a block are restored; the first method is chosen where no other is certainly faster."""

    CHECKPOINT = "checkpointed"
    RECIPES = "recomputed by recipes"
    OFFLOAD = "offloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried in a step; all other blocks use recipes.

    Attributes:
        checkpointed: Blocks that are checkpointed.
        offloaded: Kinds of blocks that are offloaded.
    """

    checkpointed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()


class MinimalPlan(PolicyPlan):
    """The plan of ``Minimal``. See [Note: three methods].

    Args:
        policy: The user's policy.
        tier: The store of offloaded bytes.
        bus: Receives the plan when it is made.

    Attributes:
        current: Another object whenever the answers change: see ``StandingPlan``.
        judged: All that could be compared was; the plan stays.
    """

    def __init__(self, policy: Minimal, tier: Tier, bus: Bus) -> None:
        rule = self.current = plan_for(policy)
        super().__init__(policy, rule.name, rule.text)
        self._tier, self._bus, self.judged = tier, bus, False
        self._timer: StepTimer | None = None
        self._engine: Callable[[], Engine | None] = lambda: None
        self._kinds: dict[str, str] = {}  # path of a block → its kind
        self._methods: dict[str, Method] = {}  # kind → the method that was chosen, or is tried now
        self._why: dict[str, str] = {}  # kind → the times of each method
        self._trials: list[Trial] = []  # of each round
        self._tried = self._skipped = 0  # steps with a trial, and those that were not timed
        self._seconds: defaultdict[tuple[str, Method], list[float]] = defaultdict(list)  # for each byte of the step
        self._saved_bytes: list[int] = []  # of each step that counts

    def watch(self, engine: Engine) -> None:
        """Let an engine measure its steps for this plan."""
        meter, watched = meter_for(self._tier), weakref.ref(engine)
        timer = StepTimer(meter, weakly(self.saw_step), waited=dict[str, float], memory=False)
        timer.spans = SpanTimer(
            meter, weakly(self.saw_span), memory=False,
            unsure=lambda: 0 if (engine := watched()) is None else engine.trust.unsure,
        )  # fmt: skip
        self._timer = engine.timer = timer
        self._engine = watched
        timer.marks = True  # so all methods are measured in the same parts
        timer.want()

    def choose(self, candidate: Candidate) -> Action:
        """Return OFFLOAD in kinds that are offloaded entirely, and as the policy says in others."""
        offloads = self._methods.get(candidate.site.block_kind) is Method.OFFLOAD
        return Action.OFFLOAD if offloads else super().choose(candidate)

    def needs_recipe(self, candidate: Candidate) -> bool:
        """Whether RECOMPUTE may be chosen."""
        return self._methods.get(candidate.site.block_kind) is not Method.OFFLOAD

    def recomputes_in(self, block_name: str) -> bool:
        """Whether anything in a block may be recomputed."""
        return self._methods.get(self._kinds.get(block_name, "")) is not Method.OFFLOAD

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return CHECKPOINT or KEEP as was measured, and as the heuristic does where nothing was."""
        match self._methods.get(kind):
            case Method.CHECKPOINT:
                return Action.CHECKPOINT
            case Method.OFFLOAD:
                return Action.KEEP
            case _:
                return super().block_action(kind, index, input_bytes=input_bytes, must_keep_bytes=must_keep_bytes)

    def explain(self) -> str:
        """Describe the plan, and what was measured for each kind of block."""
        return "\n".join([super().explain(), *(f"{kind} blocks are {why}" for kind, why in self._why.items())])

    def saw_step(self, step: TimedStep) -> bool:
        """Process a measured step, and begin to compare the methods; return whether another is wanted."""
        if self.judged or self._timer is None:
            return False
        if self._trials and any(block.checkpointed for block in step.blocks):  # it grew while a method was tried
            self._end({})
            return True
        self._kinds = {block.name: block.kind for block in step.blocks}
        self._trials = trials(step, self._tier)
        self.judged = not self._trials
        if self._trials:
            self._tried = self._skipped = 0
            self._seconds.clear()
            self._saved_bytes.clear()
            self._timer.planned(step.saved_bytes)
            self._timer.spans.want()
            self._try()
        return False

    def saw_span(self, span: Span | None) -> bool:
        """Process a step with a trial; return whether another follows."""
        if not self._trials:
            return False
        if span is None or span.verifies or not span.saved_bytes:
            self._skipped += 1
            if self._skipped < MOST_SKIPPED:
                return True
            self._end({})
            self.judged = True
            return False
        trial = self._trials[self._tried % len(self._trials)]
        if self._tried >= len(self._trials):
            self._saved_bytes.append(span.saved_bytes)
            for block in span.blocks:
                kind = self._kinds.get(block.name, "")
                method = (
                    Method.OFFLOAD
                    if kind in trial.offloaded
                    else Method.CHECKPOINT
                    if block.checkpointed
                    else Method.RECIPES
                )
                self._seconds[kind, method].append(block.seconds / span.saved_bytes)
        self._tried += 1
        if self._tried < ROUNDS * len(self._trials):
            self._try()
            return True
        self._decide()
        return False

    def _try(self) -> None:
        """Begin the next trial."""
        trial = self._trials[self._tried % len(self._trials)]
        if self._timer is not None:
            self._timer.checkpointed = trial.checkpointed
        self._answer(dict.fromkeys(trial.offloaded, Method.OFFLOAD))

    def _end(self, methods: dict[str, Method]) -> None:
        """End the trials, and restore blocks in these methods from now on."""
        self._trials.clear()
        if self._timer is not None:
            self._timer.checkpointed = frozenset()
        self._answer(methods)

    def _answer(self, methods: dict[str, Method]) -> None:
        """Give other answers from now on."""
        if methods != self._methods:
            self._methods, self.current = methods, plan_for(self.policy)
            if (engine := self._engine()) is not None:
                engine.plan_changed()

    def _decide(self) -> None:
        """Choose a method for each kind, once all were tried."""
        methods: dict[str, Method] = {}
        alike = max(self._saved_bytes) <= GROWTH * min(self._saved_bytes)
        for kind in dict.fromkeys(self._kinds.values()):
            tried = [
                method for method in Method if self._seconds[kind, method] and (alike or method is not Method.OFFLOAD)
            ]
            if len(tried) > 1:
                step_bytes = self._saved_bytes[0]
                took = {
                    method: Range.of([each * step_bytes for each in self._seconds[kind, method]]) for method in tried
                }
                method = methods[kind] = fastest(took)
                times = (f"{r.middle:.4g} s ({r.low:.4g} to {r.high:.4g}) {w.value}" for w, r in took.items())
                self._why[kind] = f"{method.value}: a block took " + ", ".join(times)
                logger.info("%s blocks are %s", kind, self._why[kind])
        self._end(methods)
        self.judged = True
        self._bus.emit("plan", name=self.name, text=self.explain())


@dataclass(frozen=True, slots=True)
class Range:
    """A median and its uncertainty: the notches of a box plot (McGill, Tukey and Larsen, 1978)."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of a sample."""
        middle = median(values)
        notch = NOTCH * (quartile(values, upper=True) - quartile(values)) / sqrt(len(values))
        return cls(middle - notch, middle, middle + notch)


def fastest(took: Mapping[Method, Range]) -> Method:
    """Return the method that is certainly the fastest; if none is, the first one.

    Args:
        took: The times of each method that was tried.
    """
    first = min(took, key=[*Method].index)
    certain = [method for method, one in took.items() if one.high < took[first].low * (1 - FASTER)]
    return min(certain, key=lambda method: took[method].middle, default=first)


def trials(step: TimedStep, tier: Tier) -> list[Trial]:
    """Return what is tried in each round. See [Note: three methods].

    Args:
        step: A measured step, in which all blocks used recipes.
        tier: The store.
    """
    checkpointed, offloaded = every_other(step), may_offload(step, tier)
    found = [Trial(checkpointed=checkpointed)] if checkpointed or offloaded else []
    return [*found, Trial(offloaded=offloaded)] if offloaded else found


def every_other(step: TimedStep) -> frozenset[str]:
    """Return every other block of those that can be checkpointed, of each kind that has several.

    Args:
        step: A measured step.
    """
    able = [block for block in step.blocks if block.checkpointable]
    kinds = {kind: [b.name for b in able if b.kind == kind] for kind in {b.kind for b in able}}
    return frozenset(name for names in kinds.values() for name in names[1::2])


def may_offload(step: TimedStep, tier: Tier) -> frozenset[str]:
    """Return the kinds of blocks that may be offloaded entirely.

    Args:
        step: A measured step.
        tier: The store.
    """
    largest = max((block.saved_bytes for block in step.blocks), default=0)  # some may be checkpointed by the heuristic
    if not isinstance(tier, DiskTier) or tier.free_bytes < 2 * largest * len(step.blocks):
        return frozenset()
    inputs = sum(block.input_bytes for block in step.blocks)
    fits = max(2 * largest, LEAST_WINDOW) <= inputs + largest + LEAST_WINDOW
    return frozenset(block.kind for block in step.blocks if fits and block.saved_bytes)


def measured_plan(policy: Policy | Plan, tier: Tier, window_bytes: int | None) -> MeasuredPlan | MinimalPlan | None:
    """Return the plan of a policy that measures steps; None for other policies.

    Args:
        policy: The user's policy.
        tier: The store of offloaded bytes.
        window_bytes: The user's limit in flight; None: follows the model.
    """
    match policy:
        case Auto():
            return MeasuredPlan(policy, tier, window_bytes, BUS)
        case Minimal():
            return MinimalPlan(policy, tier, BUS)
        case _:
            return None
