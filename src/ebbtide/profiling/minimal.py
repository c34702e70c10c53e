"""``Minimal``: recipes where they are cheaper than checkpointing the block, measured per kind of block.

[Note: recipes or a second run]
``Minimal`` promises the memory of activation checkpointing and no more than its time. Recipes usually cost less than a
second forward, but each has overhead, and a block of many small tensors may spend more on them than on its forward. So
the two are compared in the same steps: after the first step, every other block of a kind is checkpointed for two steps,
of which the second counts. From then on the kind is checkpointed unless its recipes were certainly faster: their median
lower by more than both uncertainties, and by ``FASTER``. Both methods keep the inputs of the blocks for backward and
need the memory of one block.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from statistics import median

from ebbtide.base.actions import Action, Plan
from ebbtide.base.events import BUS, Bus
from ebbtide.base.weak import weakly
from ebbtide.config import Auto, Minimal, Policy
from ebbtide.engine import Engine
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import StepTimer
from ebbtide.planner import plan_for
from ebbtide.planner.rules import PolicyPlan
from ebbtide.profiling.baseline import quartile
from ebbtide.profiling.measured import MeasuredPlan
from ebbtide.store.meter import meter_for
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

COUNTED = 3
"""The counted step: the first warms up the recipes, the second the checkpoints."""

FASTER = 0.03
"""Share by which recipes must certainly be faster than a second forward."""

NOTCH = 1.57
"""Times the interquartile range, over the root of the count: the 95 % uncertainty of a median."""


class MinimalPlan(PolicyPlan):
    """The plan of ``Minimal``. See [Note: recipes or a second run].

    Args:
        policy: The user's policy.
        tier: The store of offloaded bytes.
        bus: Receives the plan when kinds of blocks are checkpointed.
    """

    def __init__(self, policy: Minimal, tier: Tier, bus: Bus) -> None:
        rule = plan_for(policy)
        super().__init__(policy, rule.name, rule.text)
        self._tier, self._bus, self._steps = tier, bus, 0
        self._timer: StepTimer | None = None
        self._engine: Callable[[], Engine | None] = lambda: None
        self._second_run: dict[str, str] = {}  # kind of block → why it is checkpointed

    def watch(self, engine: Engine) -> None:
        """Let an engine measure its steps for this plan."""
        meter = meter_for(self._tier)
        timer = StepTimer(meter, weakly(self.saw_step), waited=dict[str, float], memory=False)
        self._timer = engine.timer = timer
        self._engine = weakref.ref(engine)
        timer.marks = True  # so both are measured in the same parts
        timer.want()

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return CHECKPOINT for kinds whose recipes cost more than a second forward, and as the heuristic does."""
        if kind in self._second_run:
            return Action.CHECKPOINT
        return super().block_action(kind, index, input_bytes=input_bytes, must_keep_bytes=must_keep_bytes)

    def explain(self) -> str:
        """Describe the plan, and which kinds of blocks are checkpointed by measurement."""
        lines = (f"{kind} blocks are checkpointed: {why}" for kind, why in self._second_run.items())
        return "\n".join([super().explain(), *lines])

    def saw_step(self, step: TimedStep) -> bool:
        """Process a measured step; return whether another is wanted."""
        if self._steps == COUNTED or self._timer is None:
            return False
        self._steps += 1
        if self._steps == 1:
            self._timer.checkpointed = every_other(step)
        if self._steps < COUNTED:
            return bool(self._timer.checkpointed)
        self._timer.checkpointed = frozenset()
        self._decide(step)
        return False

    def _decide(self, step: TimedStep) -> None:
        for kind in dict.fromkeys(block.kind for block in step.blocks):
            recipes, second = (_block_seconds(step, kind, checkpointed=run_twice) for run_twice in (False, True))
            if recipes is None or second is None or recipes.high < second.low * (1 - FASTER):
                continue
            self._second_run[kind] = (
                f"a block took {second.middle:.4g} s ({second.low:.4g} to {second.high:.4g}) checkpointed and "
                f"{recipes.middle:.4g} s ({recipes.low:.4g} to {recipes.high:.4g}) with recipes"
            )
            logger.info("%s blocks are checkpointed: %s", kind, self._second_run[kind])
        if self._second_run:
            if (engine := self._engine()) is not None:
                engine.plan_changed()
            self._bus.emit("plan", name=self.name, text=self.explain())


@dataclass(frozen=True, slots=True)
class _Range:
    """A median and its uncertainty: the notches of a box plot (McGill, Tukey and Larsen, 1978)."""

    low: float
    middle: float
    high: float


def every_other(step: TimedStep) -> frozenset[str]:
    """Return every other block of those that can be checkpointed, of each kind that has several.

    Args:
        step: A measured step.
    """
    able = [block for block in step.blocks if block.checkpointable]
    kinds = {kind: [b.name for b in able if b.kind == kind] for kind in {b.kind for b in able}}
    return frozenset(name for names in kinds.values() for name in names[1::2])


def _block_seconds(step: TimedStep, kind: str, *, checkpointed: bool) -> _Range | None:
    """Return the time of the checkpointed or other blocks of a kind; None if there were none."""
    found = [
        b.forward_seconds + b.backward_seconds for b in step.blocks if b.kind == kind and b.checkpointed is checkpointed
    ]
    if not found:
        return None
    middle, notch = median(found), NOTCH * (quartile(found, upper=True) - quartile(found)) / sqrt(len(found))
    return _Range(middle - notch, middle, middle + notch)


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
