"""Make a plan from a profile, and the next plan from a judged one.

[Note: which plan comes next]
A plan that missed its promise is replaced by one with the prices that were measured under it, which keeps more
(``ebbtide.profiling.promise``, [Note: the loop]). If that misses it, too, the measured time does not follow the prices,
and the next plan aims below the promise, by as much as the last one was above. All aim ``BELOW`` under it from the
start: a plan that is corrected has been too slow until then. A first plan that kept its promise usually had time to
spare, because prices err on the safe side (``ebbtide.profiling.baseline``). The upper end of its error bar is taken as
its cost, or by how much it seems to be faster than ordinary training, which is an error; if that is clearly below the
prediction, all prices fall in proportion, to no less than ``LEAST_PRICE`` of their value at once, and the resulting
plan, which keeps less, is executed and judged, at most ``LOOSENED`` times. A first plan that keeps everything shows no
price; then prices fall as far as allowed. If such a plan misses the promise, at once or in a later verdict, the one
before it is restored. A plan for a memory budget that takes longer than predicted stays if none that fits is faster at
the measured prices; its prediction is corrected by these, and it is judged again. Steps within a budget are compared
with the measured ones, which may have run while the machine was faster: prices that rose fall again if later steps take
clearly less than predicted. Once plans have exceeded the budget, all later ones are made for a smaller one.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from ebbtide.base.actions import keeps_all
from ebbtide.base.errors import BudgetError
from ebbtide.base.runs import KeptBecause
from ebbtide.base.units import format_size
from ebbtide.config import Auto
from ebbtide.engine.marks import marked
from ebbtide.planner.hooked import shrink_hooked
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Search, Solution
from ebbtide.profiling.baseline import has_backward, sample
from ebbtide.profiling.promise import CORRECTIONS, Judgement, loosened, recalibrated
from ebbtide.profiling.solutions import RESERVE, budget_within, fit_with_reserve, without_fragments
from ebbtide.store.meter import allocatable_bytes, room_bytes, store_bytes
from ebbtide.store.protocol import Tier

logger = logging.getLogger("ebbtide")

RESIDENT_RESERVE = 0.05
"""As ``RESERVE``, of resident memory, which includes what the heap keeps: see [Note: a budget of resident memory]."""

SPARE = 0.02
"""Share of a budget of resident memory that should remain free. See there."""

BELOW = 0.01
"""Slowdown that plans leave of the promised one, at most half of it, because predictions err by that and more."""

MARGIN = 0.01
"""Share of a budget by which the plan after an excess is smaller than the excess requires."""

LOOSENED = 3
"""Most plans tried that keep less than one that kept its promise."""

YARDSTICKS = 3
"""Blocks of a kind that run without hooks in passes that judge a plan."""

WORTH = 0.05
"""Share of the saved bytes by which a plan must lower the peak to be tried in place of one that keeps its promise."""

SLOWER = "takes longer than predicted, and no faster plan is known that fits"
KEEPS = "everything stays, so blocks run without hooks, as in ordinary training: "
REASONS = {
    KeptBecause.GAINS_NOTHING: "nothing is gained within max_slowdown",
    KeptBecause.LONE: "nothing is gained: backward needs all of the one block that ran at once",
    KeptBecause.SMALL: "all storages that blocks save are below min_bytes",
    KeptBecause.UNLIKE: "what a plan costs cannot be measured",
    KeptBecause.FITS: "it fits",
}


class ClosedLoop:
    """Chooses the plans of ``Auto``. See [Note: which plan comes next].

    Attributes:
        story: The verdicts on earlier plans for this profile, one line each.
    """

    def __init__(self, policy: Auto, tier: Tier) -> None:
        self._policy, self._tier = policy, tier
        device = allocatable_bytes(tier) is not None
        self._reserve = RESERVE if device else RESIDENT_RESERVE
        self._room_in_words = "the device's memory, less a sixth for fragments" if device else "the free memory"
        self._noise, self._corrections, self._loosened, self._known = 0.0, 0, 0, True
        self._aim = 1.0  # share of the promised slowdown that plans are made for
        self._before: Judgement | None = None  # the plan that kept its promise, while one that keeps less is tried
        self._warned = False
        self._raised = False  # the prices of the current plan, by what a plan took
        self._reduced_bytes: int | None = None  # the budget, less what plans exceeded it by
        self.story: list[str] = []

    @property
    def budget_bytes(self) -> int | None:
        """The user's memory budget, or what the device has if that is less; None: there is none."""
        return budget_within(self._policy.budget_bytes, allocatable_bytes(self._tier))

    @property
    def _device_bytes(self) -> int | None:
        found = allocatable_bytes(self._tier)
        return None if found is None else without_fragments(found)

    def _room_bytes(self) -> int | None:
        device = self._device_bytes
        return room_bytes(self._tier) if device is None else device

    def first(self, profile: Profile, noise: float, *, known: bool = True) -> Judgement:
        """Return the first plan of a profile; for ``noise`` and ``known`` see ``Baseline``."""
        # On a CPU a budget lets only the second of them keep its heap: they differ without noise.
        resident = self.budget_bytes is not None and self._device_bytes is None
        self._noise, self._corrections, self._loosened = 0.0 if resident else noise, 0, 0
        self._aim = max(1 - BELOW / self._policy.max_slowdown, 0.5) if self._policy.max_slowdown else 1.0
        self._before, self.story, self._known = None, [], known
        self._raised, self._reduced_bytes = False, None
        profile = replace(profile, store_bytes=store_bytes(self._tier))
        judgement = marked("plan", lambda: self._judgement_of(*self._first(profile)))
        if self.budget_bytes != self._policy.budget_bytes:
            self._record(f"memory_budget is {self._policy.memory_budget!r}, so {self._room_in_words}, is the budget")
        elif judgement.budget_bytes is not None and self.budget_bytes is None:
            self._record(f"the plan for max_slowdown does not fit {self._room_in_words}")
        return (self._try_looser(judgement) or judgement) if judgement.keeps and known else judgement

    def after(self, judgement: Judgement) -> Judgement | None:
        """Return the plan that follows a judged one; None: the judged one stays."""
        if not (judgement.too_slow or judgement.excess_bytes):
            shown = "keeps" if judgement.allowed_share >= 1 else "does not clearly miss"
            logger.info("the plan %s its promise: %s", shown, judgement.text())
            return None if judgement.looks else self._try_looser(judgement)
        before, self._before = self._before, None
        if before is not None:
            self._loosened = LOOSENED
        if before is not None and not before.keeps:  # else its prices were too high, and those measured now may do
            what = "a plan that kept less missed the promise, so the one before it is restored"
            self._record(f"{what}: {judgement.text()}")
            return before
        if self._corrections == CORRECTIONS:
            self._give_up(judgement)
            return None
        if self._corrections:
            self._aim *= min(judgement.allowed_share, 1.0)
        self._corrections += 1
        found = self._corrected(judgement)
        if found is None:
            self._give_up(judgement)
        else:
            crowded = judgement.excess_bytes and not judgement.over_budget_bytes
            what = "left too little of its budget free" if crowded else "missed its promise"
            what = f"the plan before {what}"
            if found.solution.assignment == judgement.solution.assignment:
                what = f"the plan stays, and its prediction is corrected, because it {SLOWER}"
            self._record(f"correction {self._corrections}: {what}: {judgement.text()}")
        return found

    def yardsticks(self, judgement: Judgement) -> frozenset[str] | None:
        """Return blocks that run without hooks while a plan is judged, besides those that keep everything.

        Returns:
            None if no others are needed; an empty set if there is no memory for them.
        """
        if judgement.budget_bytes is not None:
            return None
        solution, room = judgement.solution, self._room_bytes()
        kept = kept_blocks(solution)
        kinds = {block.name: block.kind for block in filter(has_backward, solution.profile.blocks)}
        enough = Counter(kind for name, kind in kinds.items() if name in kept)
        treated = Counter(kind for name, kind in kinds.items() if name not in kept)
        # A kept block is as in ordinary training only where no copies run: the first. One of a kind must run the plan.
        copies = solution.predicted.offloaded_bytes > 0
        few = [
            block
            for block in solution.profile.blocks
            if block.name not in kept and treated[block.kind] > 1 and (copies or enough[block.kind] < YARDSTICKS)
        ]
        spare = None if room is None else room - solution.predicted.peak_bytes
        return sample(few, spare, most=YARDSTICKS) if few else None

    def _give_up(self, judgement: Judgement) -> None:
        if judgement.budget_bytes is not None and not judgement.over_budget_bytes:
            if judgement.too_slow:
                self._record(f"it {SLOWER}: {judgement.text()}")
        else:
            self.story.append("the promise is not kept, and no plan is known that would keep it")
            logger.warning("%s: %s", self.story[-1], judgement.text())

    def _record(self, line: str) -> None:
        self.story.append(line)
        logger.info("%s", line)

    def _try_looser(self, judgement: Judgement) -> Judgement | None:
        """Try a plan with lower prices, and remember the one that kept its promise; None if the gain is too small."""
        if judgement.budget_bytes is not None:
            return self._with_lower_prices(judgement)
        if self._corrections or self._loosened == LOOSENED:
            return None
        cheaper = loosened(judgement)
        if cheaper is None:
            return None
        found, budget = self._solution(cheaper, None)
        gained = judgement.solution.predicted.peak_bytes - found.predicted.peak_bytes
        if budget is not None or gained <= 0 or gained < WORTH * cheaper.saved_bytes:
            return None
        self._loosened += 1
        self._before = judgement
        self._record(f"an earlier plan, replaced by one that saves {format_size(gained)} more: {judgement.text()}")
        return self._judgement_of(found, None)

    def _with_lower_prices(self, judgement: Judgement) -> Judgement | None:
        """Correct prices within a budget that rose while the machine was slow; None if they did not."""
        budget = judgement.budget_bytes
        if budget is None or not self._raised or self._corrections == CORRECTIONS:
            return None
        cheaper = loosened(judgement)
        if cheaper is None:
            return None
        found, _ = self._solution(cheaper, self._reduced_bytes or budget)
        following = self._within(budget, judgement, cheaper, found)
        if following is not None:
            self._corrections += 1
            what = "the plan before took less time than predicted, so prices fall"
            self._record(f"correction {self._corrections}: {what}: {judgement.text()}")
        return following

    def _corrected(self, judgement: Judgement) -> Judgement | None:
        before, budget = judgement.solution, judgement.budget_bytes
        trims = self._device_bytes is None and judgement.excess_bytes > 0  # its time is the heap's, too
        promised, profile = budget, before.profile
        if judgement.too_slow and not trims:
            profile = recalibrated(judgement) or profile
            self._raised |= profile is not before.profile
        if budget is not None and judgement.excess_bytes:
            predicted = int(before.predicted.peak_bytes * (1 + self._reserve))
            least = min(self._reduced_bytes or budget, predicted)
            self._reduced_bytes = max(int(least * (1 - MARGIN)) - judgement.excess_bytes, 1)
        found, budget = self._solution(profile, self._reduced_bytes or budget)
        if budget is not None:
            return self._within(promised or budget, judgement, profile, found)
        if self._corrections == CORRECTIONS or found.predicted.kept_bytes <= before.predicted.kept_bytes:
            found = Search(profile).everything
        return self._judgement_of(found, None) if self._has_room(found) else None

    def _within(self, budget: int, judgement: Judgement, profile: Profile, found: Solution) -> Judgement | None:
        """Return what follows a plan for a budget: one that other prices make, if it is faster, or itself at these."""
        before = judgement.solution
        same = Search(profile).simulated(before.assignment)
        better = judgement.excess_bytes or found.predicted.step_seconds < same.predicted.step_seconds
        if found.assignment != before.assignment and better:
            return self._judgement_of(found, budget)
        corrects = same.predicted.step_seconds != before.predicted.step_seconds
        return self._judgement_of(same, budget) if corrects and not judgement.excess_bytes else None

    def _has_room(self, solution: Solution) -> bool:
        predicted, room = solution.predicted, self._room_bytes()
        taken = predicted.kept_bytes if self._device_bytes is None else predicted.peak_bytes
        return room is None or taken <= room

    def _solution(self, profile: Profile, budget_bytes: int | None) -> tuple[Solution, int | None]:
        """Return a plan and its memory limit; if none fits, the plan with the least memory."""
        if budget_bytes is None:
            found = Search(profile).everything
            if self._known:
                found = shrink_hooked(profile, self._aim * self._policy.max_slowdown)
            budget_bytes = self._device_bytes
            if budget_bytes is None or found.predicted.peak_bytes * (1 + RESERVE) <= budget_bytes:
                return found, None
        try:
            return fit_with_reserve(profile, budget_bytes, self._reserve), budget_bytes
        except BudgetError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "no plan fits, so the plan with the least memory is executed: %s is %s; expected %s\nhint: %s",
                    self._room_in_words if self.budget_bytes is None else "memory_budget", format_size(budget_bytes),
                    error.expected, error.hint,
                )  # fmt: skip
            return Search(replace(profile, store_bytes=None)).smallest, budget_bytes

    def _first(self, profile: Profile) -> tuple[Solution, int | None]:
        found, budget_bytes = self._solution(profile, self.budget_bytes)
        if budget_bytes is None and not self._has_room(found):
            return self._solution(profile, self._room_bytes())
        return found, budget_bytes

    def _judgement_of(self, solution: Solution, budget_bytes: int | None) -> Judgement:
        promised = solution.profile.step_seconds * (1 + self._policy.max_slowdown)
        allowed = promised if budget_bytes is None else solution.predicted.step_seconds
        spare = 0 if budget_bytes is None or self._device_bytes is not None else int(SPARE * budget_bytes)
        return Judgement(
            solution, allowed_seconds=allowed, noise=self._noise, budget_bytes=budget_bytes, spare_bytes=spare,
            known=self._known,
        )  # fmt: skip


def outside_plans(peak_bytes: int | None, budget_bytes: int | None) -> list[str]:
    """Return a warning, and log it, if the peak between two steps is above the budget."""
    if peak_bytes is None or budget_bytes is None or peak_bytes <= budget_bytes:
        return []
    line = (
        f"between a backward and the next forward, as in the optimizer's step, the peak is {format_size(peak_bytes)} "
        f"and the budget is {format_size(budget_bytes)}: no plan lowers that"
    )
    logger.warning("%s", line)
    return [line]


def kept_blocks(solution: Solution) -> frozenset[str]:
    """Return the names of the blocks whose saved tensors a plan keeps in all their executions."""
    names = [block.name for block in solution.profile.blocks]
    treated = {name for name, actions in zip(names, solution.assignment, strict=True) if not keeps_all(actions)}
    return frozenset(names) - treated
