"""A simulated machine of uneven speed under ``Auto``: seeded, without a clock, so each run ends with the same plan.

Speed drifts from step to step, has slow periods that begin anywhere in a step, short bursts and single spikes. Under
that noise ``Auto`` measures steps, plans, judges and corrects; what its plan truly costs is known here, not to it.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from ebbtide.base.actions import Action, Site
from ebbtide.base.events import Bus
from ebbtide.config import Auto
from ebbtide.engine.spans import BlockSpan, Span, SpanTimer
from ebbtide.engine.timed import TimedBlock, TimedStep, TimedUnit
from ebbtide.engine.timing import StepTimer
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Search, Solution
from ebbtide.profiling.auto import AutoPlan
from ebbtide.store.counters import TierCounters

MB = 10**6
BLOCKS, FORWARD, BACKWARD, HEAD, TAIL, HOOKS = 24, 1.0, 2.0, 3.0, 1.0, 0.006
UNITS = (("a", 0.01), ("b", 0.015), ("c", 0.04), ("d", 0.07), ("e", None), ("f", None))
"""Storages of a block, and what recomputing them truly takes; those without are offloaded."""
HANDLING = 0.15
"""What offloading one of them truly takes beyond its copies, in backward."""
PLAIN = BLOCKS * (FORWARD + BACKWARD) + HEAD + TAIL


@dataclass(kw_only=True)
class Machine:
    """A machine whose speed changes.

    Attributes:
        seed: Of all its noise.
        drift: Standard deviation of the speed, from step to step.
        bursts: Share of the parts of a step at which a burst begins, which slows the next few.
        slow: Share of the parts at which a slow period of some steps begins.
        spikes: Share of the parts that take up to three times as long.
        jitter: Standard deviation of each part.
        cold: Share by which the first forward of a step takes longer.
    """

    seed: int
    drift: float = 0.1
    bursts: float = 0.01
    slow: float = 0.001
    spikes: float = 0.005
    jitter: float = 0.02
    cold: float = 0.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now, self._next = 0.0, 0.0
        self._step_seconds = 0.0  # of quiet work, since the step began
        self._burst, self._burst_left, self._slow, self._slow_left = 1.0, 0, 1.0, 0

    def begin(self) -> None:
        """A step begins."""
        self._now, self._step_seconds = self._next, 0.0
        self._next = 0.7 * self._now + self._random.gauss(0.0, self.drift * (1 - 0.7**2) ** 0.5)

    def takes(self, seconds: float) -> float:
        """Return how long a part of a step takes that takes ``seconds`` on a quiet machine."""
        draw = self._random
        if not self._burst_left and draw.random() < self.bursts:
            self._burst, self._burst_left = draw.uniform(1.2, 1.6), draw.randint(2, 12)
        if not self._slow_left and draw.random() < self.slow:
            self._slow, self._slow_left = draw.uniform(1.1, 1.4), draw.randint(20, 300)
        share = self._step_seconds / PLAIN
        factor = 1 + max(self._now + (self._next - self._now) * share, -0.3)
        if self._burst_left:
            factor, self._burst_left = factor * self._burst, self._burst_left - 1
        if self._slow_left:
            factor, self._slow_left = factor * self._slow, self._slow_left - 1
        if draw.random() < self.spikes:
            factor *= draw.uniform(1.5, 3.0)
        self._step_seconds += seconds
        return seconds * factor * draw.lognormvariate(0.0, self.jitter)


def first_blocks(profile: Profile, max_slowdown: float) -> Solution:
    """Return the plan that treats all storages of as many blocks as the prices allow, in place of the solver's."""
    search, slack = Search(profile), max_slowdown * profile.step_seconds * (1 + 1e-9)

    def treats(count: int) -> Solution:
        treated = tuple(Action.OFFLOAD if unit.recompute_seconds is None else Action.RECOMPUTE for unit in block.units)
        kept = (Action.KEEP,) * len(block.units)
        return search.simulated((treated,) * count + (kept,) * (BLOCKS - count))

    block = profile.blocks[0]
    fitting = bisect.bisect_right(range(1, BLOCKS + 1), slack, key=lambda n: treats(n).predicted.overhead_seconds)
    return treats(fitting)


class Training:
    """Steps of a model under ``Auto`` on such a machine.

    Args:
        machine: The machine.
        policy: With the promise.
    """

    def __init__(self, machine: Machine, policy: Auto) -> None:
        counters = TierCounters(timed_out_bytes=1000 * MB, out_seconds=1.0, timed_in_bytes=1000 * MB, in_seconds=1.0)
        tier: Any = SimpleNamespace(name="disk", counters=counters)
        self.machine, self.timed = machine, 0
        self.plan = plan = AutoPlan(policy, tier, None, Bus())
        self._timer = plan._timer = StepTimer(cast("Any", None), plan.saw_step, waited=dict, memory=False)
        self._timer.spans = SpanTimer(cast("Any", None), plan.saw_span, memory=False)
        self._timer.want()

    def step(self) -> None:
        """Train one step."""
        timer = self._timer
        timer.hand_over()  # as before the first block
        plain = frozenset(f"layers.{i}" for i in range(BLOCKS) if timer.runs_plain(f"layers.{i}"))
        measured, spans = timer.wanted, timer.spans.wanted
        self.machine.begin()
        blocks, others = self._blocks(plain, measured=measured)
        saved = BLOCKS * len(UNITS) * 100 * MB
        timer.pass_ends(saved)
        if measured:
            timer.wanted = self.plan.saw_step(
                TimedStep(
                    blocks=blocks, head_seconds=others, epilogue_seconds=self.machine.takes(TAIL), head_peak_bytes=None,
                    saved_bytes=saved,
                )
            )  # fmt: skip
        elif spans:
            self.timed += 1
            found = tuple(
                BlockSpan(name=b.name, plain=b.plain, forward_seconds=b.forward_seconds,
                          backward_seconds=b.backward_seconds) for b in blocks
            )  # fmt: skip
            seconds = sum(block.seconds for block in found) + others
            if not self.plan.saw_span(Span(seconds=seconds, peak_bytes=None, saved_bytes=saved, blocks=found)):
                timer.spans.want(wanted=False)

    def _blocks(self, plain: frozenset[str], *, measured: bool) -> tuple[tuple[TimedBlock, ...], float]:
        takes, draw = self.machine.takes, self.machine._random
        costs = [self._costs(place, plain, measured=measured) for place in range(BLOCKS)]
        forwards = [takes(FORWARD + cost * 0.2) for cost in costs]
        forwards[0] *= 1 + self.machine.cold
        head = takes(HEAD)
        backwards = [takes(BACKWARD + cost * 0.8) for cost in reversed(costs)][::-1]
        blocks: list[TimedBlock] = []
        for place in range(BLOCKS):
            name = f"layers.{place}"
            kept = name in self.plan._kept_under_hooks
            units = tuple(
                TimedUnit(
                    site=Site("Layer", unit, "Node", 0), nbytes=100 * MB, block_input=False, movable=True,
                    action=Action.KEEP if kept else Action.OFFLOAD if seconds is None else Action.RECOMPUTE,
                    recompute_seconds=seconds and seconds * draw.lognormvariate(0.0, 2 * self.machine.jitter),
                    host_seconds=HANDLING / 8,
                )
                for unit, seconds in UNITS
            )  # fmt: skip
            blocks.append(
                TimedBlock(
                    name=name, kind="Layer", units=() if name in plain else units, plain=name in plain,
                    forward_seconds=forwards[place], backward_seconds=backwards[place],
                    forward_peak_bytes=None, backward_peak_bytes=None,
                )
            )  # fmt: skip
        return tuple(blocks), head

    def actions(self, place: int) -> tuple[Action, ...]:
        """Return what the plan does with the storages of a block."""
        assert self.plan._judgement is not None
        return self.plan._judgement.solution.assignment[place]

    def _costs(self, place: int, plain: frozenset[str], *, measured: bool) -> float:
        name = f"layers.{place}"
        if name in plain:
            return 0.0
        if not measured:
            return HOOKS + self._truly(place)
        return HOOKS if name in self.plan._kept_under_hooks else HOOKS + sum(s or HANDLING for _, s in UNITS)

    def _truly(self, place: int) -> float:
        truly = 0.0
        for action, (_, seconds) in zip(self.actions(place), UNITS, strict=True):
            truly += HANDLING if action is Action.OFFLOAD else (seconds or 0.0) if action is Action.RECOMPUTE else 0.0
        return truly

    @property
    def slowdown(self) -> float:
        """What the plan truly costs: 0.05 is 5 % of an ordinary step."""
        hooked = [place for place in range(BLOCKS) if any(a is not Action.KEEP for a in self.actions(place))]
        return sum(HOOKS + self._truly(place) for place in hooked) / PLAIN

    @property
    def saved(self) -> float:
        """Share of the saved bytes that the plan does not keep."""
        assert self.plan.table is not None
        return 1 - self.plan.table.predicted.kept_bytes / (BLOCKS * len(UNITS) * 100 * MB)
