"""Find the fastest step that fits a budget, or the least memory within a slowdown.

[Note: the search]
Two numbers define a candidate: the bytes to keep, ``K``, and the bytes across the link, ``M``. For these, the linear
program of the bound determines which storages to recompute; the others are kept or offloaded. Some of the last blocks
keep their bytes (backward reads them first), and the rest is spread evenly over the blocks, so that copies are evenly
paced. A *family* fixes three things: how much of the bound's ``M`` is offloaded (real copies come in blocks and in
order), whether offloading has a price, and how many of the last blocks keep. Within a family, time falls and memory
rises with ``K``; interpolation finds the last candidate within the limit. The best of these is the plan. A plan has one
action for a site of a block, so executions of one block share their actions.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.base.actions import Action, Candidate, Plan, Site
from ebbtide.base.errors import BudgetError
from ebbtide.base.units import format_size
from ebbtide.planner.bound import Bound, lower_bound
from ebbtide.planner.checkpointing import checkpointed
from ebbtide.planner.profile import Profile, Unit, by_site
from ebbtide.planner.simulate import Assignment, Simulated, simulate

SHARES = (1.0, 0.97, 0.93, 0.85, 0.7, 0.4, 0.0)
"""The tried shares of the bytes that the bound moves across the link."""

LAST_BLOCKS = (2, 0, 1, 4, 8)
"""The tried numbers of last blocks that keep everything not recomputed, if there is room; likeliest first."""

DISTURBANCE = 0.05
"""Assumed cost of a hidden copy, as a share of its time: others share its memory, link and store. Tensors that are
recomputed faster than that are not offloaded."""

GRAIN = 0.01
"""Peaks that differ by less than this share of the saved bytes are equal in the search for the least memory."""

CLOSE = 1 / 512
"""Precision of a border, as a share of the saved bytes or of the slack."""

STEPS = 8
"""Most candidates that the search for one border simulates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A chosen plan and its predicted cost.

    Attributes:
        profile: The step it was chosen for.
        assignment: For each executed block, the action of each of its units.
        predicted: The simulated step.
    """

    profile: Profile
    assignment: Assignment
    predicted: Simulated

    @property
    def bound_seconds(self) -> float:
        """The least overhead of any schedule that has as few bytes on the device when the head begins."""
        return lower_bound(self.profile).least(self.predicted.levels_bytes[len(self.profile.blocks)])[0]


def follow(profile: Profile, plan: Plan) -> Solution:
    """Apply a plan that uses no profile, such as ``Minimal``'s, to a profile. No block is checkpointed."""

    def action(place: int, unit: Unit) -> Action:
        candidate = Candidate(
            site=unit.site, block_name=profile.blocks[place].name, block=place, nbytes=unit.nbytes,
            block_input=unit.block_input, recompute_flops=unit.recompute_flops,
        )  # fmt: skip
        return _possible(plan.choose(candidate), unit)

    assignment = tuple(tuple(action(place, unit) for unit in block.units) for place, block in enumerate(profile.blocks))
    return _solution(replace(profile, store_bytes=None), assignment)  # it may offload more than the store has


def _solution(profile: Profile, assignment: Assignment) -> Solution:
    return Solution(profile=profile, assignment=assignment, predicted=simulate(profile, assignment))


def _possible(action: Action, unit: Unit) -> Action:
    """Return what becomes of a unit where a plan chooses an action."""
    if action is Action.RECOMPUTE and unit.recompute_seconds is None:
        action = Action.OFFLOAD
    return Action.KEEP if action is Action.OFFLOAD and not unit.movable else action


def _within_store(profile: Profile, assignment: Assignment) -> Assignment:
    """Return the actions with those of the last units that the store cannot hold kept; alike in all executions."""
    if profile.store_bytes is None:
        return assignment
    moved: dict[tuple[str, Site], int] = defaultdict(int)
    for place, number, unit in profile.units():
        if assignment[place][number] is Action.OFFLOAD:
            moved[profile.blocks[place].name, unit.site] += unit.moved_bytes
    excess, kept = sum(moved.values()) - profile.store_bytes, set[tuple[str, Site]]()
    while excess > 0:
        key, nbytes = moved.popitem()
        kept.add(key)
        excess -= nbytes
    return tuple(
        tuple(Action.KEEP if (block.name, u.site) in kept else a for u, a in zip(block.units, actions, strict=True))
        for block, actions in zip(profile.blocks, assignment, strict=True)
    )


def keep_everything(profile: Profile) -> Solution:
    """Return the plan that keeps everything."""
    return _solution(profile, tuple((Action.KEEP,) * len(block.units) for block in profile.blocks))


def _peak(found: Solution) -> int:
    return found.predicted.peak_bytes


@dataclass(frozen=True, slots=True)
class _Family:
    """Candidates that differ in the bytes that stay. See [Note: the search]."""

    share: float
    last_blocks: int
    priced: bool = True


class Search:
    """Candidates of one profile. Several searches of one profile share their simulations."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self._bound = profile, Bound(profile)
        self._price = DISTURBANCE * (1 / profile.rates.out_bytes_per_second + 1 / profile.rates.in_bytes_per_second)
        self._sites = by_site(profile)
        self._repeats = len({block.name for block in profile.blocks}) < len(profile.blocks)
        self._known: dict[tuple[_Family, int], Solution] = {}

    @functools.cached_property
    def everything(self) -> Solution:
        """The plan that keeps everything."""
        return keep_everything(self.profile)

    @functools.cached_property
    def smallest(self) -> Solution:
        """The plan of the smallest peak: nothing is kept that can be offloaded or recomputed."""
        kept = self.profile.must_keep_bytes
        tried = [self._try(_Family(share, last_blocks), kept) for share in SHARES for last_blocks in (0, 2)]
        tried += self.checkpointed(lambda found: False)
        return min(tried, key=lambda s: (s.predicted.peak_bytes, s.predicted.overhead_seconds))

    def fit(self, budget_bytes: int) -> Solution:
        """Return the fastest plan whose simulated peak is within a budget.

        Raises:
            BudgetError: No plan fits.
        """
        if self.everything.predicted.peak_bytes <= budget_bytes:
            return self.everything
        least = self.smallest.predicted.peak_bytes
        if least > budget_bytes:
            raise BudgetError(
                f"memory_budget is {format_size(budget_bytes)}",
                expected=f"at least {format_size(least)}, the smallest peak of this model and batch",
                hint=_holder(self.smallest),
            )

        def beyond(found: Solution) -> float:
            return found.predicted.peak_bytes - budget_bytes

        close = CLOSE * self.profile.saved_bytes
        found = self._best(lambda family: self._border(family, beyond, close, rising=True), self._cost)
        checkpointed = [s for s in self.checkpointed(lambda s: beyond(s) <= 0) if beyond(s) <= 0]
        return min((s for s in (found, self.smallest, *checkpointed) if s is not None), key=self._cost)

    def least_memory(self, slack_seconds: float) -> Solution:
        """Return the plan of the smallest peak found that takes at most ``slack_seconds`` longer than plain."""
        grain = GRAIN * self.profile.saved_bytes or 1.0

        def beyond(found: Solution) -> float:
            return found.predicted.overhead_seconds - slack_seconds

        def cost(found: Solution) -> tuple[int, float]:
            return round(found.predicted.peak_bytes / grain), self._cost(found)

        close = CLOSE * max(slack_seconds, GRAIN * self.profile.step_seconds)
        found = self._best(lambda family: self._border(family, beyond, close, rising=False), cost)
        best = min((s for s in (found, self.everything) if s is not None), key=cost)
        checkpointed = [s for s in self.checkpointed(lambda s: beyond(s) > 0, fewest=False) if beyond(s) <= 0]
        # Checkpoint only for a real gain over recipes.
        least = min(checkpointed, key=_peak, default=best)
        return least if _peak(least) < _peak(best) - grain else best

    def checkpointed(self, holds: Callable[[Solution], bool], *, fewest: bool = True) -> list[Solution]:
        """Return plans that checkpoint the fewest first blocks for which a test holds, or the most where it fails."""
        able = sum(block.checkpointable for block in self.profile.blocks)
        found: list[Solution] = []
        for inputs in (Action.KEEP, Action.OFFLOAD) if able else ():

            def plan(count: int, inputs: Action = inputs) -> Solution:
                return self.simulated(checkpointed(self.profile, count, inputs))

            first = bisect_left(range(able + 1), True, key=lambda count: holds(plan(count)))
            found.append(plan(min(first, able) if fewest else max(first - 1, 0)))
        return found

    def _cost(self, found: Solution) -> float:
        return found.predicted.overhead_seconds + self._price * found.predicted.moved_bytes

    def _best(self, border: Callable[[_Family], Solution | None], cost: Callable[[Solution], Any]) -> Solution | None:
        """Return the best candidate within the limit: vary the offloaded share, then how many last blocks keep."""
        counts = [count for count in LAST_BLOCKS if count <= len(self.profile.blocks)]
        families = [_Family(share, counts[0]) for share in SHARES] + [_Family(1.0, counts[0], priced=False)]
        by_family = {family: found for family in families if (found := border(family)) is not None}
        if not by_family:
            return None
        first = min(by_family, key=lambda family: cost(by_family[family]))
        others = [border(replace(first, last_blocks=count)) for count in counts[1:]]
        return min((s for s in (by_family[first], *others) if s is not None), key=cost)

    def _border(
        self, family: _Family, beyond: Callable[[Solution], float], close: float, *, rising: bool
    ) -> Solution | None:
        """Return the last candidate of a family within a limit on what rises, or falls, with the kept bytes."""
        ends = (self.profile.must_keep_bytes, self.profile.saved_bytes)
        good, bad = ends if rising else (ends[1], ends[0])
        best, worst = self._try(family, good), self._try(family, bad)
        if beyond(worst) <= 0:
            return worst
        if beyond(best) > 0:
            return None
        for step in range(STEPS):
            under, over = -beyond(best), beyond(worst)
            if under <= close or abs(bad - good) <= CLOSE * self.profile.saved_bytes:
                break
            part = 0.5 if step % 3 == 2 else min(max(under / (under + over), 0.02), 0.98)
            middle = good + int(part * (bad - good))
            found = self._try(family, middle)
            if beyond(found) <= 0:
                good, best = middle, found
            else:
                bad, worst = middle, found
        return best

    def _try(self, family: _Family, kept_bytes: int) -> Solution:
        if kept_bytes >= self.profile.saved_bytes:
            return self.everything
        key = family, kept_bytes
        if key not in self._known:
            self._known[key] = self.simulated(self._assign(family, kept_bytes))
        return self._known[key]

    def simulated(self, assignment: Assignment) -> Solution:
        """Return the simulated cost of an assignment.

        Executions of one block share the actions of the first; what the store cannot hold is kept.
        """
        if self._repeats:
            first: dict[tuple[str, Site], Action] = {}
            for place, number, unit in self.profile.units():
                first.setdefault((self.profile.blocks[place].name, unit.site), assignment[place][number])
            assignment = [
                tuple(_possible(first[block.name, unit.site], unit) for unit in block.units)
                for block in self.profile.blocks
            ]
        return _solution(self.profile, _within_store(self.profile, assignment))

    def _assign(self, family: _Family, kept_bytes: int) -> Assignment:
        """Return the actions of a candidate."""
        blocks = self.profile.blocks
        moved_bytes = family.share * self._bound.least(kept_bytes)[1]
        actions = [[Action.OFFLOAD] * len(block.units) for block in blocks]
        crosses, room = 0, float(kept_bytes)
        for place, number, unit in self.profile.units():
            if unit.movable:
                crosses += unit.moved_bytes
            else:
                actions[place][number] = Action.KEEP
                room -= unit.nbytes
        for place, number, certain in self._recomputed_first(family, kept_bytes, moved_bytes):
            if not certain and room >= 0 and crosses - room <= moved_bytes:
                break
            unit = blocks[place].units[number]
            actions[place][number] = Action.RECOMPUTE
            if unit.movable:
                crosses -= unit.moved_bytes
            else:
                room += unit.nbytes
        others = len(blocks) - min(family.last_blocks, len(blocks))
        room = self._keep_last(actions, range(others, len(blocks)), room)
        self._keep_evenly(actions, range(others), room)
        return tuple(map(tuple, actions))

    def _recomputed_first(
        self, family: _Family, kept_bytes: int, moved_bytes: float
    ) -> Iterator[tuple[int, int, bool]]:
        """Yield the units with a recipe, in the program's order, and whether each is always cheaper than a copy."""
        prices = self._bound.prices(kept_bytes, moved_bytes, self._price if family.priced else 0.0)
        ranked = sorted((prices.rank(site.unit), i) for i, site in enumerate(self._sites))
        for rank, i in ranked:
            for place, number in self._sites[i].places:
                yield place, number, rank < 1 - 1e-9

    def _keep_last(self, actions: list[list[Action]], places: range, room: float) -> float:
        """Keep offloaded units of blocks, the last first and those in a narrower type last; return the room left."""
        for place in reversed(places):
            units = self.profile.blocks[place].units
            narrow_last = sorted(range(len(units)), key=lambda n: (units[n].narrow_bytes is not None, -n))
            for number in narrow_last:
                if actions[place][number] is Action.OFFLOAD and units[number].nbytes <= room:
                    actions[place][number] = Action.KEEP
                    room -= units[number].nbytes
        return room

    def _keep_evenly(self, actions: list[list[Action]], places: range, room: float) -> None:
        """Divide the room equally over these blocks; unused room goes to others."""
        share, left = room / max(len(places), 1), 0.0
        for place in places:
            left = self._keep_last(actions, range(place, place + 1), left + share)
        self._keep_last(actions, places, left)


def _holder(least: Solution) -> str:
    phase, block = least.predicted.peak_at
    what = {"head": "the head and the loss"}.get(phase, f"the {phase} of block {block!r}")
    base = format_size(least.predicted.peak_bytes - max(least.predicted.levels_bytes, default=0))
    return (
        f"that peak is in {what}, and {base} of it are no saved tensors of blocks but weights, gradients, optimizer "
        "state and working memory; shorter sequences, a smaller batch or sharding over more devices make it smaller"
    )
