"""``Auto``: measure a few steps, then let the planner choose.

[Note: Auto's steps]
The first pass warms up and goes by rule (``ebbtide.planner.rules``): cheap tensors are recomputed, the rest offloaded.
That is near the least memory there is, so that a model that ran out of memory gets this far. The next passes are
measured, still by rule. From then on the plan is a table made for that step. A pass that saves clearly more than the
measured one is measured too, and the plan made anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ebbtide.base.actions import Action, Candidate
from ebbtide.base.errors import ConfigError
from ebbtide.base.events import Bus
from ebbtide.base.units import parse_size
from ebbtide.config import Auto, Policy
from ebbtide.engine import Engine
from ebbtide.engine.timing import StepTimer, TimedBlock, TimedStep
from ebbtide.planner import TablePlan, plan_for
from ebbtide.planner.profile import BlockProfile, Profile, Rates, Unit
from ebbtide.planner.simulate import simulate
from ebbtide.planner.solve import Solution, fit, follow, shrink
from ebbtide.planner.table import table_plan
from ebbtide.store.meter import meter_for
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

MEASURED_STEPS = 2
"""Of these the shorter time of each stretch counts: what disturbs a machine makes it slower, never faster."""

PROBE_BYTES = 16 * 1024**2
"""Moved out and back where the measured steps moved nothing, to know the rates."""


class MeasuredPlan:
    """The plan of ``Auto``. See [Note: Auto's steps].

    Args:
        policy: What the user asked for.
        tier: Where offloaded bytes wait; its counters tell the rates.
        window_bytes: What the user allowed in flight; None: follows the model.
        bus: Told of the plan when it is made.
    """

    def __init__(self, policy: Auto, tier: Tier, window_bytes: int | None, bus: Bus) -> None:
        self._policy, self._tier, self._window_bytes, self._bus = policy, tier, window_bytes, bus
        self._by_rule = plan_for(policy)
        self._warm = False
        self._steps: list[TimedStep] = []
        self.table: TablePlan | None = None
        self.profile: Profile | None = None

    def watch(self, engine: Engine) -> None:
        """Let an engine measure its steps for this plan.

        Raises:
            ConfigError: There is a budget, and the machine does not tell how much memory is used.
        """
        meter, budget = meter_for(self._tier), self._policy.memory_budget
        if budget is not None and meter.take_peak_bytes() is None:
            raise ConfigError(
                f"memory_budget is {budget!r}, and this machine does not tell how much memory was used",
                expected="an accelerator, or a Linux that lets a process reset its own peak (/proc/self/clear_refs)",
                hint="give Auto(max_slowdown=...) instead",
            )
        engine.timer = StepTimer(meter, self.saw_step, waited=lambda: engine.stats().stalls, memory=budget is not None)
        engine.timer.want()

    # What the engine asks

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
        return (self.table or self._by_rule).choose(candidate)

    def block_action(self, kind: str, index: int, *, input_bytes: int, stubborn_bytes: int) -> Action:
        """Return KEEP: what a block saves is treated one by one."""
        return Action.KEEP

    def explain(self) -> str:
        """Say what is done now, and why."""
        if self.table is not None:
            return self.table.explain()
        return (
            f"{self._by_rule.explain()}; the plan is made after {1 + MEASURED_STEPS} steps, from what they took "
            f"({self._aim()})"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan into a file. See ``TablePlan.save``.

        Raises:
            ConfigError: It is not made yet.
            DataError: It cannot be written.
        """
        self.made().save(path)

    def made(self) -> TablePlan:
        """Return the plan.

        Raises:
            ConfigError: It is not made yet.
        """
        if self.table is None:
            raise ConfigError(
                "the plan is not made yet",
                expected=f"a handle that has seen {1 + MEASURED_STEPS} steps and the start of the next",
                hint="train a few steps first",
            )
        return self.table

    def _aim(self) -> str:
        budget = self._policy.memory_budget
        if budget is not None:
            return f"memory_budget={budget!r}: the fastest step that fits"
        return f"max_slowdown={self._policy.max_slowdown:g}: the least memory within that"

    # Planning

    def saw_step(self, step: TimedStep) -> bool:
        """Take a measured step in; returns whether another is wanted.

        Raises:
            BudgetError: No plan fits the memory budget.
        """
        if not self._warm:
            self._warm = True
            return True
        if self._steps and not _alike(self._steps[-1], step):
            self._steps.clear()
        self._steps.append(step)
        if len(self._steps) < MEASURED_STEPS:
            return True
        self.profile = profile_of(_fastest(self._steps), self._rates(), self._window_bytes)
        self._steps.clear()
        self.table = table_plan(solution_for(self._policy, self.profile), self.name)
        logger.info("plan made (%s): %s", self._aim(), self.table.explain().splitlines()[0])
        for line in self.table.reasons:
            logger.debug("%s", line)
        self._bus.emit("plan", name=self.name, text=self.table.explain())
        return False

    def _rates(self) -> Rates:
        counters = self._tier.counters
        if not (counters.out_bytes and counters.in_bytes and counters.out_seconds and counters.in_seconds):
            self._probe()
        return Rates(
            out_bytes_per_second=max(counters.out_bytes, 1) / max(counters.out_seconds, 1e-9),
            in_bytes_per_second=max(counters.in_bytes, 1) / max(counters.in_seconds, 1e-9),
        )

    def _probe(self) -> None:
        kind = torch.accelerator.current_accelerator() if self._tier.name == "host" else torch.device("cpu")
        source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=kind)
        slot = self._tier.park(source)
        slot.wait_parked()
        slot.take()
        slot.free()


def solution_for(policy: Policy, profile: Profile) -> Solution:
    """Return what a policy chooses for a step.

    Raises:
        BudgetError: No plan fits the memory budget.
    """
    if not isinstance(policy, Auto):
        return follow(profile, plan_for(policy))
    if policy.memory_budget is not None:
        return fit(profile, parse_size(policy.memory_budget, name="memory_budget"))
    return shrink(profile, policy.max_slowdown)


def profile_of(
    step: TimedStep, rates: Rates, window_bytes: int | None, *, ran: tuple[Rates, int | None] | None = None
) -> Profile:
    """Return what the planner needs to know of a measured step.

    Its recomputes are taken out of the blocks' backward times, for the plan adds its own. Memory beside what the
    blocks saved is what was measured, less what the simulated schedule of the same actions holds there, or less what is
    there anyway if that is more: the two may be the same bytes.

    Args:
        step: What was measured.
        rates: What moving costs.
        window_bytes: Bytes allowed in flight; None: follows the model.
        ran: Rates and window under which the step was measured, if they were others.
    """
    profile = Profile(
        blocks=tuple(map(_block, step.blocks)),
        rates=rates,
        turn_seconds=step.turn_seconds,
        tail_seconds=step.tail_seconds,
        window_bytes=window_bytes,
    )
    if step.turn_peak_bytes is None:
        return profile
    as_it_ran = profile if ran is None else replace(profile, rates=ran[0], window_bytes=ran[1])
    levels = simulate(as_it_ran, [[unit.action for unit in block.units] for block in step.blocks]).levels_bytes
    count = len(step.blocks)
    blocks = tuple(
        replace(
            profile.blocks[place],
            forward_beside_bytes=_beside(block.forward_peak_bytes, max(levels[place], block.forward_anyway_bytes)),
            backward_beside_bytes=_beside(
                block.backward_peak_bytes, max(levels[-1 - place], block.backward_anyway_bytes)
            ),
        )
        for place, block in enumerate(step.blocks)
    )
    return replace(
        profile,
        blocks=blocks,
        turn_beside_bytes=_beside(step.turn_peak_bytes, max(levels[count], step.turn_anyway_bytes)),
    )


def _block(block: TimedBlock) -> BlockProfile:
    recomputed = sum(unit.recompute_seconds or 0.0 for unit in block.units if unit.action is Action.RECOMPUTE)
    return BlockProfile(
        name=block.name,
        kind=block.kind,
        forward_seconds=block.forward_seconds,
        backward_seconds=max(block.backward_seconds - recomputed, 0.0),
        units=tuple(
            Unit(
                site=unit.site,
                nbytes=unit.nbytes,
                narrow_bytes=unit.narrow_bytes,
                block_input=unit.block_input,
                movable=unit.movable,
                recompute_seconds=unit.recompute_seconds,
                recompute_flops=unit.recompute_flops,
            )
            for unit in block.units
        ),
    )


def _beside(peak_bytes: int | None, level_bytes: int) -> int:
    return max((peak_bytes or 0) - level_bytes, 0)


def _alike(one: TimedStep, other: TimedStep) -> bool:
    """Whether two steps ran the same blocks, and these saved the same."""

    def shape(step: TimedStep) -> list[tuple[str, list[tuple[object, int]]]]:
        return [(block.name, [(unit.site, unit.nbytes) for unit in block.units]) for block in step.blocks]

    return shape(one) == shape(other)


def _fastest(steps: list[TimedStep]) -> TimedStep:
    """Return a step of which every stretch is the shortest of several that are alike, and every peak the highest."""
    latest = steps[-1]
    blocks = tuple(
        replace(
            block,
            units=tuple(
                replace(
                    unit, recompute_seconds=_least(step.blocks[place].units[number].recompute_seconds for step in steps)
                )
                for number, unit in enumerate(block.units)
            ),
            forward_seconds=min(step.blocks[place].forward_seconds for step in steps),
            backward_seconds=min(step.blocks[place].backward_seconds for step in steps),
        )
        for place, block in enumerate(latest.blocks)
    )
    return replace(
        latest,
        blocks=blocks,
        turn_seconds=min(step.turn_seconds for step in steps),
        tail_seconds=min(step.tail_seconds for step in steps),
    )


def _least(seconds: Iterable[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return min(known) if known else None
