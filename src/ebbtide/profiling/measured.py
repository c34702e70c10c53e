"""``Auto``: measure a few steps, then let the planner choose.

[Note: Auto's steps]
The first pass warms up and goes by rule (``ebbtide.planner.rules``): cheap tensors are recomputed, the rest offloaded.
That is near the least memory there is, so that a model that ran out of memory gets this far. The next passes are
measured, still by rule; in the second of them some blocks run without hooks: see [Note: the baseline]. From then on
the plan is a table made for that step, and judged by the steps that carry it out: see [Note: the loop]. A block of
which the table keeps everything needs no hooks: it runs plain. A pass that saves clearly more than the measured one is
measured too, and the plan made anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import torch

from ebbtide.base.actions import Action, Candidate
from ebbtide.base.errors import BudgetError, ConfigError
from ebbtide.base.events import Bus
from ebbtide.base.units import parse_size
from ebbtide.config import Auto, Keep, Policy
from ebbtide.engine import Engine
from ebbtide.engine.marks import marked
from ebbtide.engine.spans import Span, SpanTimer
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import StepTimer
from ebbtide.planner import TablePlan, plan_for
from ebbtide.planner.hooked import shrink_hooked
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.solve import Solution, fit, follow, shrink, smallest
from ebbtide.planner.table import table_plan
from ebbtide.profiling.baseline import against_plain, alike, fastest, kept_sample, noise, plain_blocks, sample
from ebbtide.profiling.promise import CORRECTIONS, Check, recalibrated
from ebbtide.profiling.step_profile import profile_of
from ebbtide.store.allocator import return_freed_memory
from ebbtide.store.meter import meter_for, reserved_bytes, room_bytes
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

MEASURED_STEPS = 2
"""Of these the shorter time of each stretch counts: what disturbs a machine makes it slower, never faster."""

RESERVE = 0.03
"""Part by which a measured peak may be above the predicted one: so much of a memory budget is left free."""

COMPARED = 2
"""Blocks of a kind that run without hooks while a plan is judged."""

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
        self._kept_under_hooks = frozenset[str]()  # blocks that show what hooks cost by themselves, in a measured step
        self._steps: list[TimedStep] = []
        self._timer: StepTimer | None = None
        self._check: Check | None = None
        self._corrections, self._noise = 0, 0.0
        self._warned = self._keeps = False
        self._story: list[str] = []  # what became of earlier plans for this step
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
        memory = budget is not None
        if memory and self._tier.name == "disk":
            return_freed_memory()  # the budget is of the process's memory: what is freed has to leave it
        timer = StepTimer(meter, self.saw_step, waited=lambda: engine.stats().stalls, memory=memory)
        timer.spans, timer.marks = SpanTimer(meter, self.saw_span, memory=memory), True
        self._timer = engine.timer = timer
        timer.want()

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
        if candidate.block_name in self._kept_under_hooks:
            return Action.KEEP
        return (self.table or self._by_rule).choose(candidate)

    def block_action(self, kind: str, index: int, *, input_bytes: int, stubborn_bytes: int) -> Action:
        """Return KEEP: what a block saves is treated one by one."""
        return Action.KEEP

    def checkpoints(self, block_name: str) -> bool:
        """Whether the plan runs a block whole a second time. While steps are measured, none is."""
        measures = self._timer is not None and self._timer.wanted
        return self.table is not None and not measures and self.table.checkpoints(block_name)

    def may_checkpoint(self, block_name: str) -> bool:
        """Whether it is to be seen if a block can run again: in the first step, and where it does."""
        return not self._warm or self.checkpoints(block_name)

    def explain(self) -> str:
        """Say what is done now, and why."""
        if self.table is not None and self._check is not None:
            head, *lines = self.table.explain().splitlines()
            return "\n".join([head, self._check.text(), *self._story, *lines])
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

    @property
    def judged(self) -> bool:
        """Whether the plan is made and judged: unless inputs grow, it stays as it is."""
        return self.table is not None and self._timer is not None and not self._timer.times_blocks

    def _aim(self) -> str:
        budget = self._policy.memory_budget
        if budget is not None:
            return f"memory_budget={budget!r}: the fastest step that fits"
        return f"max_slowdown={self._policy.max_slowdown:g}: the least memory within that"

    # Planning

    def saw_step(self, step: TimedStep) -> bool:
        """Take a measured step in; returns whether another is wanted."""
        if not self._warm:
            self._warm = True
            return True
        if self._steps and not alike(self._steps[-1], step):
            self._steps.clear()
        self._run_plain(frozenset())
        self._kept_under_hooks = frozenset()
        if any(block.plain for block in step.blocks) and not self._steps:
            return True  # what the plain ones save is not known
        self._steps.append(step)
        if len(self._steps) < MEASURED_STEPS:
            room = self._room_bytes(step)
            plain = sample(step.blocks, room)
            self._run_plain(plain)
            self._kept_under_hooks = kept_sample(step.blocks, plain, room)
            return True
        first, last = self._steps[0], self._steps[-1]
        profile = profile_of(fastest(self._steps), self._rates(), self._window_bytes)
        profile = against_plain(profile, plain_blocks(first, last))
        self._noise, self._corrections, self._story = noise(first, last), 0, []
        self._steps.clear()
        self._carry_out(marked("plan", lambda: self._solution(profile, self._budget_bytes)))
        return False

    def saw_span(self, span: Span) -> bool:
        """Take a pass in that carried the plan out; returns whether another is wanted. See [Note: the loop]."""
        check = self._check
        if check is None or check.add(span) is None:
            return check is not None
        self._run_unhooked(check.solution)
        check.reserved_bytes = reserved_bytes(self._tier)
        if not (check.too_slow or check.over_budget_bytes):
            logger.info("the plan keeps its promise: %s", check.text())
            return False
        if self._corrections == CORRECTIONS:
            return False
        self._corrections += 1
        found = self._corrected(check)
        if found is None and self._budget_bytes is not None and not check.over_budget_bytes:
            self._story.append("it takes longer than predicted, and no faster plan is known that fits")
            logger.info("%s: %s", self._story[-1], check.text())
            return False
        if found is None:
            self._story.append("the promise is not kept, and no plan is known that would keep it")
            logger.warning("%s: %s", self._story[-1], check.text())
            return False
        self._story.append(f"correction {self._corrections}: {check.text()}")
        logger.info("the plan missed its promise and is corrected: %s", check.text())
        self._carry_out(found)
        return not self._keeps

    def _corrected(self, check: Check) -> Solution | None:
        """Return another plan for a step whose plan missed its promise; None where there is none."""
        before = check.solution
        profile = (recalibrated(check) if check.too_slow else None) or before.profile
        if self._budget_bytes is not None:
            found = self._solution(profile, max(self._budget_bytes - check.over_budget_bytes, 1))
            return None if found.assignment == before.assignment else found
        found = self._solution(profile, None)
        if self._corrections == CORRECTIONS or found.predicted.kept_bytes <= before.predicted.kept_bytes:
            found = follow(profile, plan_for(Keep()))
        room = room_bytes(self._tier)
        return None if room is None or found.predicted.kept_bytes > room else found

    def _solution(self, profile: Profile, budget_bytes: int | None) -> Solution:
        """Return what the policy chooses for a step; where no plan fits the budget, the one that takes least."""
        if budget_bytes is None:
            return shrink_hooked(profile, self._policy.max_slowdown)
        try:
            return fit_with_reserve(profile, budget_bytes)
        except BudgetError as error:
            if not self._warned:
                self._warned = True
                logger.warning("no plan fits, the one that takes least memory is carried out: %s", error)
            return smallest(profile)

    def _carry_out(self, solution: Solution) -> None:
        """Make a solution the plan from now on."""
        self.profile, budget = solution.profile, self._budget_bytes
        self.table = table_plan(solution, self.name)
        plain, slowdown = solution.profile.step_seconds, self._policy.max_slowdown
        allowed = plain * (1 + slowdown) if budget is None else solution.predicted.step_seconds
        self._check = Check(solution, allowed_seconds=allowed, noise=self._noise, budget_bytes=budget)
        keeps = self._keeps = not any(
            action is not Action.KEEP for actions in solution.assignment for action in actions
        )
        if keeps:
            self._story.append(
                "everything stays, so blocks run without hooks, as in plain training: "
                + ("it fits" if budget is not None else "nothing is gained within max_slowdown")
            )
        judged = frozenset[str]() if keeps or budget is not None else self._compared(solution)
        self._run_unhooked(solution, judged)
        if self._timer is not None and self._timer.spans is not None:
            self._timer.spans.want(wanted=not keeps)
        logger.info("plan made (%s): %s", self._aim(), self.table.explain().splitlines()[0])
        for line in self.table.reasons:
            logger.debug("%s", line)
        self._bus.emit("plan", name=self.name, text=self.explain(), predicted=self.table.predicted.as_dict())

    def _compared(self, solution: Solution) -> frozenset[str]:
        """Return blocks that run without hooks until the plan is judged, beside those of which it keeps everything."""
        kept, blocks = kept_blocks(solution), solution.profile.blocks
        enough = Counter(block.kind for block in blocks if block.name in kept)
        few = [block for block in blocks if enough[block.kind] < COMPARED]
        return sample(few, room_bytes(self._tier), most=COMPARED) - kept

    def _run_unhooked(self, solution: Solution, others: frozenset[str] = frozenset()) -> None:
        if self._timer is not None:
            self._timer.unhooked = kept_blocks(solution) | others

    def _run_plain(self, names: frozenset[str]) -> None:
        if self._timer is not None:
            self._timer.plain = names

    def _room_bytes(self, step: TimedStep) -> int | None:
        """Return the memory that a step may take beyond a measured one."""
        room, budget = room_bytes(self._tier), self._budget_bytes
        if room is None or budget is None:
            return room
        peaks = [peak for b in step.blocks for peak in (b.forward_peak_bytes, b.backward_peak_bytes)]
        return min(room, budget - max(filter(None, [*peaks, step.turn_peak_bytes]), default=budget))

    @property
    def _budget_bytes(self) -> int | None:
        budget = self._policy.memory_budget
        return None if budget is None else parse_size(budget, name="memory_budget")

    def _rates(self) -> Rates:
        counters = self._tier.counters
        if not (counters.out_bytes_per_second and counters.in_bytes_per_second):
            self._probe()
        return Rates(
            out_bytes_per_second=max(counters.timed_out_bytes, 1) / max(counters.out_seconds, 1e-9),
            in_bytes_per_second=max(counters.timed_in_bytes, 1) / max(counters.in_seconds, 1e-9),
        )

    def _probe(self) -> None:
        self._tier.stalls.timed = True  # until the next pass begins
        kind = torch.accelerator.current_accelerator() if self._tier.name == "host" else torch.device("cpu")
        source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=kind)
        slot = self._tier.park(source)
        slot.wait_parked()
        slot.take()
        slot.free()


def kept_blocks(solution: Solution) -> frozenset[str]:
    """Return the names of the blocks of which a plan keeps everything, in each of their executions."""
    names = [block.name for block in solution.profile.blocks]
    treated = {
        name
        for name, actions in zip(names, solution.assignment, strict=True)
        if any(action is not Action.KEEP for action in actions)
    }
    return frozenset(names) - treated


def solution_for(policy: Policy, profile: Profile) -> Solution:
    """Return what a policy chooses for a step.

    Raises:
        BudgetError: No plan fits the memory budget.
    """
    if not isinstance(policy, Auto):
        return follow(profile, plan_for(policy))
    if policy.memory_budget is not None:
        return fit_with_reserve(profile, parse_size(policy.memory_budget, name="memory_budget"))
    return shrink(profile, policy.max_slowdown)


def fit_with_reserve(profile: Profile, budget_bytes: int) -> Solution:
    """Return the fastest plan whose peak is within a budget and leaves ``RESERVE`` of it; if none, the smallest.

    Args:
        profile: The step.
        budget_bytes: What the user allows.

    Raises:
        BudgetError: No plan fits the memory budget.
    """
    try:
        return fit(profile, int(budget_bytes / (1 + RESERVE)))
    except BudgetError:
        found = smallest(profile)
        return found if found.predicted.peak_bytes <= budget_bytes else fit(profile, budget_bytes)
