"""``Auto``: measure a few steps, then let the planner choose.

[Note: Auto's steps]
The first pass warms up and follows the heuristic (``ebbtide.planner.policies``): cheap tensors are recomputed, the rest
offloaded. That needs close to the least memory, so even a model that ran out of memory gets this far. The next passes
are measured, still under the heuristic; in the second of them some blocks run without hooks: see [Note: the baseline].
Then the plan is a table made for that step, and is judged by the steps that execute it: see [Note: the loop]. A block
whose saved tensors are all kept runs without hooks. Passes that save clearly more than the measured one are measured,
too, again under the heuristic, and get a new plan, for which at most ``SHORTER`` shorter ones are passed over; so does
the pass after the first optimizer step, where memory counts and the measured passes came before it. Steps that run
other blocks each time are joined: see [Note: unlike steps].

[Note: a budget of resident memory]
On a CPU a budget is of the process's resident memory, and the heap keeps what was freed. Returning it after a backward
shows what a step takes, and makes the next one fault all its pages in again, which is a tenth of its time. So it is
returned before the first measured step, whose peak counts, but not before the second, whose blocks without hooks are
ordinary training; under a plan only where less than ``SPARE`` of the budget is left: a heap that serves equal steps
hardly grows. A plan that leaves less is replaced by a smaller one, which costs less than fresh pages in each step.
After ``IN_PIECES`` that exceeded the budget memory is returned after every step, and if there is no other plan,
whenever it is freed: a heap in pieces may hold what no plan lowers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbtide.base.actions import Action, Candidate, Explained, Plan
from ebbtide.base.errors import ConfigError
from ebbtide.base.events import Bus
from ebbtide.base.runs import KeptBecause
from ebbtide.base.weak import weakly
from ebbtide.config import Auto
from ebbtide.engine import Engine
from ebbtide.engine.spans import Span, SpanTimer
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import BETWEEN_STEPS, GROWTH, StepTimer
from ebbtide.planner import TablePlan, plan_for
from ebbtide.planner.profile import Profile
from ebbtide.planner.table import table_plan
from ebbtide.profiling.baseline import Baseline, against_plain, alike, baseline_of, has_backward, kept_sample, sample
from ebbtide.profiling.closed_loop import KEEPS, REASONS, SPARE, ClosedLoop, kept_blocks, outside_plans
from ebbtide.profiling.promise import UNJUDGED, UNLIKE_BLOCKS, Judgement
from ebbtide.profiling.step_profile import measured_rates, profile_of
from ebbtide.profiling.unlike import UnlikeSteps
from ebbtide.store.disk import DiskTier
from ebbtide.store.meter import allocatable_bytes, meter_for, reserved_bytes, resident_bytes, room_bytes
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

MEASURED_STEPS = 2
"""Measured steps; of each part the shortest time counts, because disturbances only make a machine slower."""

IN_PIECES = 3
"""Plans that exceeded the budget until freed memory is returned after each step."""

STATES = 3
"""Times that steps are measured again because another optimizer has made its state."""

LONGER = 3
"""Measured steps that are longer than the first until a plan is made without a baseline."""

SHORTER = 4
"""Shorter steps that may pass until one as long as the step that triggered a measurement."""


class AutoPlan(Explained):
    """The plan of ``Auto``. See [Note: Auto's steps].

    Args:
        policy: The user's policy.
        tier: The store of offloaded bytes; its counters have the rates.
        window_bytes: The user's limit in flight; None: follows the model.
        bus: Receives the plan when it is made.
    """

    recomputes = True

    def __init__(self, policy: Auto, tier: Tier, window_bytes: int | None, bus: Bus) -> None:
        self._policy, self._tier, self._window_bytes, self._bus = policy, tier, window_bytes, bus
        self._heuristic = plan_for(policy)
        self._warm = False
        self._kept_under_hooks = frozenset[str]()  # blocks that show the cost of hooks alone, in a measured step
        self._steps: list[TimedStep] = []
        self._timer = StepTimer(meter_for(tier))  # idle until an engine is watched
        self._judgement: Judgement | None = None
        self._loop = ClosedLoop(policy, tier)
        self._exceeded = 0  # plans that took more than the budget
        self._unlike = UnlikeSteps()
        self._longer = 0  # measured steps that were longer than the one before, so that no block ran without hooks
        self._shorter = 0  # steps that were shorter than the one that made us measure
        self._outside: list[str] = []  # a warning of what no plan lowers
        self._memory = False  # whether it counts
        self._warned = False  # that nothing is gained
        self._optimizers = 0  # that had stepped before the measured passes; the state of others is not in their memory
        self._states = STATES
        self._engine: Callable[[], Engine | None] = lambda: None
        self.table: TablePlan | None = None
        self.profile: Profile | None = None

    def watch(self, engine: Engine) -> None:
        """Let an engine measure its steps for this plan.

        Raises:
            ConfigError: There is a budget, and the machine does not report used memory.
        """
        meter, budget = meter_for(self._tier), self._policy.memory_budget
        if budget is not None and meter.take_peak_bytes() is None:
            raise ConfigError(
                f"memory_budget is {budget!r}, and this machine does not report the peak of used memory",
                expected="an accelerator, or a Linux that lets a process reset its own peak (/proc/self/clear_refs)",
                hint="set max_slowdown instead",
            )
        memory = self._memory = budget is not None or allocatable_bytes(self._tier) is not None
        if memory and isinstance(self._tier, DiskTier):
            self._tier.return_freed_memory(self._returns_freed_memory)
        watched, trust, bus = weakref.ref(engine), engine.trust, self._bus  # the engine holds the timer; so do we
        self._engine = watched

        def waited() -> dict[str, float]:
            stalls = {} if (engine := watched()) is None else engine.stats().stalls
            return {**stalls, BETWEEN_STEPS: sum(run["seconds"] for run in bus.ask("paused"))}

        self._timer = engine.timer = StepTimer(
            meter, weakly(self.saw_step), waited=waited, memory=memory, outdated=weakly(self._note_new_state),
            saw_span=weakly(self.saw_span), resumes=weakly(self._looks_again), unsure=lambda: trust.unsure,
        )  # fmt: skip
        self._timer.marks = True
        self._timer.want()

    # The plan, as the engine uses it

    @property
    def _answering(self) -> TablePlan | None:
        """The table; None in measured steps: the heuristic moves and recomputes what is to be priced."""
        return None if self._timer.wanted else self.table

    @property
    def name(self) -> str:
        """Short name for logs and reports."""
        return self._heuristic.name

    @property
    def current(self) -> Plan | None:
        """The plan that answers now; None while steps are measured. See ``StandingPlan``."""
        if self._timer.wanted or self._kept_under_hooks:
            return None
        return self._heuristic if self.table is None else self.table

    def choose(self, candidate: Candidate) -> Action:
        """Return the action of a storage."""
        if candidate.block_name in self._kept_under_hooks:
            return Action.KEEP
        return (self._answering or self._heuristic).choose(candidate)

    def needs_recipe(self, candidate: Candidate) -> bool:
        """Whether RECOMPUTE may be chosen. In measured steps every recipe is built, to be timed."""
        if candidate.block_name in self._kept_under_hooks:
            return False
        table = self._answering
        return table is None or table.needs_recipe(candidate)

    def recomputes_in(self, block_name: str) -> bool:
        """Whether anything in a block may be recomputed."""
        if block_name in self._kept_under_hooks:
            return False
        table = self._answering
        return table is None or table.recomputes_in(block_name)

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return KEEP: saved tensors are decided one by one."""
        return Action.KEEP

    def checkpoints(self, block_name: str) -> bool:
        """Whether a block is checkpointed. While steps are measured, none is."""
        table = self._answering
        return table is not None and table.checkpoints(block_name)

    def may_checkpoint(self, block_name: str) -> bool:
        """Whether to observe if a block can be checkpointed: in the first step, and for checkpointed blocks."""
        return not self._warm or self.checkpoints(block_name)

    @property
    def kept_because(self) -> KeptBecause | None:
        """Why the current plan keeps everything without hooks; None if it does not, or is not made yet."""
        return None if self._judgement is None else self._judgement.kept_because

    def explain(self) -> str:
        """Describe the current plan, and why."""
        if self.table is not None and self._judgement is not None:
            head, *lines = self.table.explain().splitlines()
            kept = [] if (why := self.kept_because) is None else [KEEPS + REASONS[why]]
            return "\n".join([head, self._judgement.text(), *self._outside, *kept, *self._loop.story, *lines])
        return (
            f"{self._heuristic.explain()}; the plan is made from the measurements of {1 + MEASURED_STEPS} steps "
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
        """Whether the plan is made and judged: it then stays, unless inputs grow or later passes break the promise."""
        timer, judgement = self._timer, self._judgement
        return judgement is not None and not (timer.wanted or (judgement.unjudged and timer.times_blocks))

    def _aim(self) -> str:
        budget = self._policy.memory_budget
        if budget is not None:
            return f"memory_budget={budget!r}: the fastest step that fits"
        return f"max_slowdown={self._policy.max_slowdown:g}: the least memory within that"

    # Planning

    def saw_step(self, step: TimedStep) -> bool:
        """Process a measured step; return whether another is wanted."""
        if not self._warm:
            self._warm, self._optimizers = True, self._stepped_optimizers()
            return True
        if self._steps and not alike(self._steps[-1], step):
            self._steps.clear()
            self._unlike.differed += 1
        timer, unlike = self._timer, self._unlike
        wanted_plain, timer.plain, self._kept_under_hooks = timer.plain, frozenset(), frozenset()
        ran_plain = any(block.plain for block in step.blocks)
        unlike.add(step)
        if unlike.suffice():
            return self._plan(unlike.baseline())
        if ran_plain and not self._steps:  # the bytes of blocks without hooks are not known
            if unlike.lack_plain():
                self._let_run_plain(unlike.joined(), step)
            return True
        if not self._steps and step.saved_bytes * GROWTH < timer.expected_bytes and self._shorter < SHORTER:
            self._shorter += 1
            return True
        longer = bool(self._steps) and step.saved_bytes > self._steps[-1].saved_bytes
        if longer and wanted_plain and not ran_plain and self._longer < LONGER:
            self._longer += 1
            self._steps.clear()
        self._steps.append(step)
        if len(self._steps) < MEASURED_STEPS:
            self._let_run_plain(unlike.joined() if unlike.differed else step, step)
            return True
        return self._plan(baseline_of(self._steps))

    def _let_run_plain(self, known: TimedStep, latest: TimedStep) -> None:
        """Let some of the known blocks run plain in the next step."""
        room, blocks = self._room_bytes(latest), list(filter(has_backward, known.blocks))
        # Without one, ordinary training would be steps with hooks: in one step a block may exceed a budget.
        plain = sample(blocks, room) or sample(blocks, room_bytes(self._tier), most=1)
        self._timer.plain, self._kept_under_hooks = plain, kept_sample(blocks, plain, room)

    def _plan(self, found: Baseline) -> bool:
        """Make a plan and carry it out; return that no further step is to be measured."""
        profile = profile_of(found.step, measured_rates(self._tier), self._window_bytes)
        self._steps.clear()
        self._unlike, self._longer, self._shorter = UnlikeSteps(), 0, 0
        self._timer.planned(found.step.saved_bytes)
        self._carry_out(self._loop.first(against_plain(profile, found.plain), found.noise, known=found.known))
        return False

    def _stepped_optimizers(self) -> int:
        engine = self._engine()
        return 0 if engine is None else engine.guard.optimizers

    def _note_new_state(self) -> bool:
        """Return whether an optimizer has made its state since memory was measured; only so many times."""
        before, self._optimizers = self._optimizers, self._stepped_optimizers()
        lacks = self._memory and self._optimizers != before and self._states > 0
        self._states -= lacks
        return lacks

    def saw_span(self, span: Span | None) -> bool:
        """Process a pass that executed the plan; return whether another is wanted. See [Note: the loop]."""
        judgement = self._judgement
        if judgement is None:
            return False
        verdict, counted = judgement.add(span), judgement.budget_bytes is not None
        if verdict is not None or (span is None and counted):
            # Without a verdict graphs may overlap, and only under hooks both together keep no more.
            self._timer.unhooked = frozenset() if verdict is None else kept_blocks(judgement.solution)
        if verdict is None and not judgement.hopeless:
            return True
        if verdict is None:
            if judgement.unjudged:
                logger.info("the plan is %s", UNJUDGED)
                self._bus.emit("verdict", **self._plan_fields())
            self._timer.spans.paused = judgement.prepare_next()
            return False
        if not self._outside:
            self._outside = outside_plans(self._timer.spans.between_peak_bytes, judgement.budget_bytes)
        judgement.reserved_bytes = reserved_bytes(self._tier)
        following = self._loop.after(judgement)
        if judgement.over_budget_bytes and isinstance(self._tier, DiskTier):
            self._exceeded += 1
            self._tier.return_freed_memory(self._returns_freed_memory, at_once=following is None)
        if following is None:
            self._bus.emit("verdict", **self._plan_fields())
            self._timer.spans.paused = judgement.prepare_next()
            return False
        self._carry_out(following)
        return following.unjudged

    def _plan_fields(self) -> dict[str, Any]:
        """Return the fields that the events ``plan`` and ``verdict`` share."""
        return {
            "name": self.name, "text": self.explain(), "kept_because": self.kept_because,
            "own_checkpoints": self._own_checkpoints,
        }  # fmt: skip

    @property
    def _own_checkpoints(self) -> int | None:
        """How many blocks the model checkpoints itself; None if that is not known."""
        coverage = None if (engine := self._engine()) is None else engine.coverage
        return None if coverage is None else coverage.checkpointed

    def _carry_out(self, judgement: Judgement) -> None:
        """Switch to a plan, and judge it unless it is already judged."""
        solution, self._judgement = judgement.solution, judgement
        self.profile = solution.profile
        self.table = table_plan(solution, self.name, keeps_others=judgement.budget_bytes is None)
        if (engine := self._engine()) is not None:
            engine.plan_changed()
        self._timer.unhooked = kept_blocks(solution)
        self._timer.yardsticks = self._loop.yardsticks(judgement) or frozenset()
        self._timer.spans.want(wanted=judgement.unjudged)
        self._timer.spans.paused = judgement.prepare_next()
        logger.info("plan made (%s): %s", self._aim(), self.table.explain().splitlines()[0])
        for line in self.table.reasons:
            logger.debug("%s", line)
        self._bus.emit("plan", **self._plan_fields(), predicted=asdict(self.table.predicted))
        lone = judgement.kept_because is KeptBecause.LONE
        if (lone or judgement.kept_because is KeptBecause.GAINS_NOTHING) and not self._warned:
            self._warned, limit = True, self._policy.max_slowdown
            hint = "use policy 'minimal', which has the memory of checkpointing"
            if self._own_checkpoints:
                hint = "switch the model's own checkpointing off"
            elif lone:
                hint = "backward needs all of the one block that ran at once; name smaller ones: blocks=[...]"
            if limit < 1 and not lone:
                hint += f", or use a larger limit: policy=ebbtide.Auto(max_slowdown={min(2 * limit or 0.05, 1):g})"
            logger.warning("Auto keeps everything: no plan saves memory within max_slowdown=%g; hint: %s", limit, hint)
        if not judgement.known and not self._warned:
            self._warned = True
            logger.warning("%s%s", UNLIKE_BLOCKS, "" if judgement.budget_bytes else ", and Auto keeps everything")

    def _looks_again(self, spans: SpanTimer) -> bool:
        """Whether there is memory now for the blocks without hooks that another verdict needs; else it comes later."""
        judgement, timer = self._judgement, self._timer
        if judgement is None:
            return False
        found = self._loop.yardsticks(judgement)
        timer.yardsticks, lacks = found or frozenset(), found is not None and not found
        if lacks:
            spans.paused = judgement.prepare_next()
        return not lacks

    def _room_bytes(self, step: TimedStep) -> int | None:
        """Return the memory that a step may take beyond a measured one."""
        room, budget = room_bytes(self._tier), self._loop.budget_bytes
        if room is None or budget is None:
            return room
        peaks = [peak for b in step.blocks for peak in (b.forward_peak_bytes, b.backward_peak_bytes)]
        return min(room, budget - max(filter(None, [*peaks, step.head_peak_bytes]), default=budget))

    def _returns_freed_memory(self) -> bool:
        budget, resident = self._loop.budget_bytes, resident_bytes()
        if self._warm and not self._steps and self._timer.measuring:
            return False  # the first measured step ends: the next one shows ordinary training, which keeps its heap
        full = budget is None or resident is None or resident > (1 - SPARE) * budget
        return full or self._timer.wanted or self._exceeded >= IN_PIECES
