"""``Minimal``: recipes where they are cheaper than a second run of the block, measured per kind of block.

[Note: recipes or a second run]
``Minimal`` promises the memory of activation checkpointing and no more than its time. Recipes usually cost less than a
second run, but each has a price of its own, and a block of many small tensors may pay more for them than for its
forward. So two steps are measured as for ``Auto``, in the second of which one block of each kind runs without hooks
([Note: the baseline]): what its equals took longer is what recipes and copies cost, and what its forward took is what a
second run costs. A kind whose recipes cost more, by more than the steps differed, is checkpointed from then on.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ebbtide.base.actions import Action, Candidate, Plan
from ebbtide.base.events import BUS, Bus
from ebbtide.config import Auto, Minimal, Policy
from ebbtide.engine import Engine
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import StepTimer
from ebbtide.planner import plan_for
from ebbtide.planner.rules import unsaved
from ebbtide.profiling.baseline import alike, noise, plain_blocks, sample
from ebbtide.profiling.measured import MeasuredPlan
from ebbtide.profiling.promise import LEAST_NOISE
from ebbtide.store.meter import meter_for, room_bytes
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")


class MinimalPlan:
    """The plan of ``Minimal``. See [Note: recipes or a second run].

    Args:
        policy: What the user asked for.
        tier: Where offloaded bytes wait.
        bus: Told of the plan when kinds of blocks are checkpointed.
    """

    def __init__(self, policy: Minimal, tier: Tier, bus: Bus) -> None:
        self._by_rule, self._tier, self._bus = plan_for(policy), tier, bus
        self._warm = self._decided = False
        self._before: TimedStep | None = None
        self._timer: StepTimer | None = None
        self._second_run: dict[str, str] = {}  # kind of block → why it is checkpointed

    def watch(self, engine: Engine) -> None:
        """Let an engine measure its steps for this plan."""
        meter = meter_for(self._tier)
        timer = StepTimer(meter, self.saw_step, waited=dict[str, float], memory=False)
        self._timer = engine.timer = timer
        timer.marks = True
        timer.want()

    @property
    def name(self) -> str:
        """Short name for logs and reports."""
        return self._by_rule.name

    @property
    def recomputes(self) -> bool:
        """Whether recipes are needed."""
        return True

    def choose(self, candidate: Candidate) -> Action:
        """Return the action of a storage."""
        return self._by_rule.choose(candidate)

    def block_action(self, kind: str, index: int, *, input_bytes: int, stubborn_bytes: int) -> Action:
        """Return CHECKPOINT for kinds whose recipes cost more than a second run, and where the rule says so."""
        if kind in self._second_run:
            return Action.CHECKPOINT
        return self._by_rule.block_action(kind, index, input_bytes=input_bytes, stubborn_bytes=stubborn_bytes)

    def explain(self) -> str:
        """Say what is done, and which kinds of blocks are checkpointed by measurement."""
        lines = (f"{kind} blocks are checkpointed: {why}" for kind, why in self._second_run.items())
        return "\n".join([self._by_rule.explain(), *lines])

    def save(self, path: str | Path) -> None:
        """Refuse: the plan follows from its policy.

        Raises:
            ConfigError: Always.
        """
        raise unsaved(self.name)

    def saw_step(self, step: TimedStep) -> bool:
        """Take a measured step in; returns whether another is wanted."""
        if self._decided:
            return False
        if not self._warm:
            self._warm = True
            return True
        timer, before, self._before = self._timer, self._before, None
        if timer is not None:
            timer.plain = frozenset()
        if before is None or not alike(before, step):
            if any(block.plain for block in step.blocks):
                return True
            self._before = step
            if timer is not None:
                timer.plain = sample(step, room_bytes(self._tier))
            return True
        self._decided = True
        self._decide(before, step)
        return False

    def _decide(self, before: TimedStep, step: TimedStep) -> None:
        margin = 1 + max(noise(before, step), LEAST_NOISE)
        for kind, plain in plain_blocks(before, step).items():
            recipes = plain.hooked_forward_seconds + plain.hooked_backward_seconds
            recipes -= plain.forward_seconds + plain.backward_seconds
            if recipes > plain.forward_seconds * margin:
                self._second_run[kind] = (
                    f"recipes and copies took {recipes:.4g} s a block where a second run takes "
                    f"{plain.forward_seconds:.4g} s"
                )
                logger.info("%s blocks are checkpointed: %s", kind, self._second_run[kind])
        if self._second_run:
            self._bus.emit("plan", name=self.name, text=self.explain())


def measured_plan(policy: Policy | Plan, tier: Tier, window_bytes: int | None) -> MeasuredPlan | MinimalPlan | None:
    """Return the plan of a policy that measures steps; None where it measures none.

    Args:
        policy: What the user asked for.
        tier: Where offloaded bytes wait.
        window_bytes: What the user allowed in flight; None: follows the model.
    """
    match policy:
        case Auto():
            return MeasuredPlan(policy, tier, window_bytes, BUS)
        case Minimal():
            return MinimalPlan(policy, tier, BUS)
        case _:
            return None
