"""Choosing: the fastest step that fits a budget, or the least memory within a slowdown.

[Note: the search]
Two numbers name a candidate: the bytes that stay, ``K``, and the bytes that are offloaded, ``O``; the rest are
recomputed, cheapest per byte first. The bound says which ``O`` is best for each ``K`` if copies hid perfectly; a few
smaller ones are simulated too, because real copies come in blocks and in order. Within a candidate some of the last
blocks keep their bytes (backward wants them first; how many is tried too), and all else is spread evenly over the
blocks, so that copies come at an even pace. ``K`` is found by halving.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.base.actions import Action, Candidate, Plan, Site
from ebbtide.base.errors import BudgetError
from ebbtide.base.units import format_size
from ebbtide.planner.bound import Bound
from ebbtide.planner.checkpointing import checkpointed
from ebbtide.planner.profile import Profile, Unit
from ebbtide.planner.simulate import Assignment, Simulated, simulate

SHARES = (1.0, 0.95, 0.9, 0.8, 0.65, 0.4, 0.0)
"""Of the bytes that the bound would offload, how many are tried."""

TAILS = (0, 1, 2, 4, 8)
"""Of how many last blocks all that is not recomputed stays, if there is room: the numbers tried."""

DISTURBANCE = 0.05
"""Part of a copy's time that it is taken to cost others even where it hides: it shares memory, link and store with
them. What is recomputed faster than that is not moved."""

GRAIN = 0.01
"""Peaks that differ by less than this part of what is saved are alike when the least memory is looked for."""

HALVINGS = 9
"""Steps of the search for the bytes that stay: to 1/512 of what is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What was chosen, and what it should cost.

    Attributes:
        profile: The step that it was chosen for.
        assignment: For each executed block, the action of each of its units.
        predicted: The simulated step.
        everything_kept: The simulated step that keeps everything.
        bound: The linear program over the step.
    """

    profile: Profile
    assignment: Assignment
    predicted: Simulated
    everything_kept: Simulated
    bound: Bound

    @property
    def bound_seconds(self) -> float:
        """The least overhead of any schedule that has as many bytes on the device at the turn-around."""
        least = self.bound.least(self.predicted.kept_bytes + self.predicted.served_bytes)[0]
        whole = any(Action.CHECKPOINT in actions for actions in self.assignment)  # may cost less than its recipes
        return min(least, self.predicted.overhead_seconds) if whole else least


def fit(profile: Profile, budget_bytes: int) -> Solution:
    """Return the fastest plan whose simulated peak is within a budget.

    Args:
        profile: The step.
        budget_bytes: Most device memory.

    Raises:
        BudgetError: No plan fits; says what the smallest peak is and what holds it.
    """

    def fits(found: Solution) -> bool:
        return found.predicted.peak_bytes <= budget_bytes

    search = _Search(profile)
    everything, least = search.candidate(profile.saved_bytes), search.smallest()
    if fits(everything):
        return everything
    if not fits(least):
        raise BudgetError(
            f"memory_budget is {format_size(budget_bytes)}",
            expected=f"at least {format_size(least.predicted.peak_bytes)}, the smallest peak of this model and batch",
            hint=_holder(least),
        )
    whole = [found for found in search.checkpointed(fits) if fits(found)]
    return min([search.border(least, everything, fits)[0], *whole], key=_overhead)


def smallest(profile: Profile) -> Solution:
    """Return the plan with the smallest simulated peak, whatever it costs."""
    return _Search(profile).smallest()


def shrink(profile: Profile, max_slowdown: float) -> Solution:
    """Return the plan with the smallest peak whose simulated step is at most ``max_slowdown`` slower.

    Args:
        profile: The step.
        max_slowdown: 0.05 allows a step that is 5 % slower than one that keeps everything.
    """
    slack = max_slowdown * profile.step_seconds * (1 + 1e-9)

    def too_slow(found: Solution) -> bool:
        return found.predicted.overhead_seconds > slack

    search = _Search(profile, slack)
    least, everything = search.candidate(profile.stubborn_bytes), search.candidate(profile.saved_bytes)
    found = search.border(least, everything, too_slow)[1] if too_slow(least) else least
    whole = [other for other in search.checkpointed(too_slow, fewest=False) if not too_slow(other)]
    # As good as the others is not enough: a block that runs whole again is one that no recipe is known to serve.
    grain = GRAIN * profile.saved_bytes
    best = min(whole, key=_peak, default=found)
    return best if _peak(best) < _peak(found) - grain else found


def _overhead(found: Solution) -> float:
    return found.predicted.overhead_seconds


def _peak(found: Solution) -> int:
    return found.predicted.peak_bytes


def follow(profile: Profile, plan: Plan) -> Solution:
    """Return what a plan that looks at no profile, such as ``Minimal``'s, does with this one. Blocks are not re-run.

    Args:
        profile: The step.
        plan: Asked for every unit.
    """

    def action(place: int, unit: Unit) -> Action:
        candidate = Candidate(
            site=unit.site, block_name=profile.blocks[place].name, block=place, bytes_=unit.nbytes,
            block_input=unit.block_input, recompute_flops=unit.recompute_flops,
        )  # fmt: skip
        chosen = plan.choose(candidate)
        if chosen is Action.RECOMPUTE and unit.recompute_seconds is None:
            chosen = Action.OFFLOAD
        return Action.KEEP if chosen is Action.OFFLOAD and not unit.movable else chosen

    assignment = tuple(tuple(action(place, unit) for unit in block.units) for place, block in enumerate(profile.blocks))
    return Solution(
        profile=profile,
        assignment=assignment,
        predicted=simulate(profile, assignment),
        everything_kept=keep_everything(profile),
        bound=Bound(profile),
    )


def keep_everything(profile: Profile) -> Simulated:
    """Return the step that keeps everything."""
    return simulate(profile, tuple((Action.KEEP,) * len(block.units) for block in profile.blocks))


class _Search:
    """Candidates of one profile.

    Args:
        profile: The step.
        slack_seconds: Of candidates that keep the same, those with no more overhead than this come first, and of these
            the one with the lowest peak; infinite: the fastest.
    """

    def __init__(self, profile: Profile, slack_seconds: float = math.inf) -> None:
        self.profile, self._bound, self._slack_seconds = profile, Bound(profile), slack_seconds
        self._by_cost = _cheapest_first(profile)
        self._everything = keep_everything(profile)
        self._known: dict[int, Solution] = {}

    def candidate(self, kept_bytes: int) -> Solution:
        """Return the fastest plan found that keeps at most ``kept_bytes``, as far as that can be."""
        kept_bytes = max(kept_bytes, self.profile.stubborn_bytes)
        if kept_bytes not in self._known:
            _, offloaded = self._bound.least(kept_bytes)
            self._known[kept_bytes] = self._best(kept_bytes, offloaded)
        return self._known[kept_bytes]

    def _best(self, kept_bytes: int, offloaded_bytes: float) -> Solution:
        """Return the best of a few: first how much is offloaded, then how many of the last blocks stay."""

        rates = self.profile.rates
        price = DISTURBANCE * (1 / rates.out_bytes_per_second + 1 / rates.in_bytes_per_second)

        grain = GRAIN * self.profile.saved_bytes or 1.0
        shrinks = math.isfinite(self._slack_seconds)

        def cost(found: Solution) -> tuple[bool, bool, int, float]:
            p = found.predicted
            peak = round(p.peak_bytes / grain) if shrinks else 0
            disturbed = p.overhead_seconds + price * p.moved_bytes
            return p.kept_bytes > kept_bytes, p.overhead_seconds > self._slack_seconds, peak, disturbed

        tails = [tail for tail in TAILS if tail <= len(self.profile.blocks)]
        middle = tails[len(tails) // 2]
        by_share = {share: self._try(kept_bytes, share * offloaded_bytes, middle) for share in SHARES}
        share = min(by_share, key=lambda share: cost(by_share[share]))
        others = [self._try(kept_bytes, share * offloaded_bytes, t) for t in tails if t != middle]
        return min([by_share[share], *others], key=cost)

    def smallest(self) -> Solution:
        """Return the plan of the smallest peak: nothing stays that can leave."""
        kept = self.profile.stubborn_bytes
        leave = self.profile.saved_bytes - kept
        tried = [self._try(kept, share * leave, 0) for share in SHARES]
        tried += self.checkpointed(lambda found: False)
        return min(tried, key=lambda s: (s.predicted.peak_bytes, s.predicted.overhead_seconds))

    def checkpointed(self, holds: Callable[[Solution], bool], *, fewest: bool = True) -> list[Solution]:
        """Return plans that checkpoint so many of the first blocks that a test begins to hold, or all of them.

        Args:
            holds: A test that holds from some number of blocks on.
            fewest: Return the first plan for which it holds; else the last for which it does not.
        """
        able = sum(block.checkpointable for block in self.profile.blocks)
        found: list[Solution] = []
        for inputs in (Action.KEEP, Action.OFFLOAD) if able else ():

            def plan(count: int, inputs: Action = inputs) -> Solution:
                return self._solution(checkpointed(self.profile, count, inputs))

            first = bisect_left(range(able + 1), True, key=lambda count: holds(plan(count)))
            found.append(plan(min(first, able) if fewest else max(first - 1, 0)))
        return found

    def border(self, least: Solution, most: Solution, holds: Callable[[Solution], bool]) -> tuple[Solution, Solution]:
        """Return two neighbours: the last for which a test holds, and the first for which it does not.

        Args:
            least: Keeps the least; the test holds for it.
            most: Keeps the most; the test does not hold.
            holds: A test that fails from some number of kept bytes on.
        """
        low, high = self.profile.stubborn_bytes, self.profile.saved_bytes
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            found = self.candidate(middle)
            if holds(found):
                low, least = middle, found
            else:
                high, most = middle, found
        return least, most

    def _try(self, kept_bytes: int, offloaded_bytes: float, tail: int) -> Solution:
        return self._solution(self._assign(kept_bytes, offloaded_bytes, tail))

    def _solution(self, assignment: Assignment) -> Solution:
        return Solution(
            profile=self.profile,
            assignment=assignment,
            predicted=simulate(self.profile, assignment),
            everything_kept=self._everything,
            bound=self._bound,
        )

    def _assign(self, kept_bytes: int, offloaded_bytes: float, tail: int) -> Assignment:
        """Return actions that recompute the cheapest until no more than so many bytes are kept and moved.

        Args:
            kept_bytes: Bytes that may stay.
            offloaded_bytes: Bytes that are to be offloaded.
            tail: The last so many blocks come first when it is decided what stays.
        """
        blocks = self.profile.blocks
        actions = [[Action.OFFLOAD] * len(block.units) for block in blocks]
        drop = self.profile.saved_bytes - kept_bytes - offloaded_bytes
        for place, number in self._by_cost:
            if drop <= 0:
                break
            actions[place][number] = Action.RECOMPUTE
            drop -= blocks[place].units[number].nbytes
        room = float(kept_bytes)
        for place, number, unit in self.profile.units():
            if not unit.movable and actions[place][number] is not Action.RECOMPUTE:
                actions[place][number] = Action.KEEP
                room -= unit.nbytes
        room = self._keep_last(actions, range(len(blocks) - tail, len(blocks)), room)
        self._keep_evenly(actions, range(len(blocks) - tail), room)
        return tuple(map(tuple, actions))

    def _keep_last(self, actions: list[list[Action]], places: range, room: float) -> float:
        """Keep what these blocks would offload while there is room, the last first; what is moved as less, at the end.

        Returns:
            The room that is left.
        """
        for place in reversed(places):
            units = self.profile.blocks[place].units
            narrow_last = sorted(range(len(units)), key=lambda n: (units[n].narrow_bytes is not None, -n))
            for number in narrow_last:
                if actions[place][number] is Action.OFFLOAD and units[number].nbytes <= room:
                    actions[place][number] = Action.KEEP
                    room -= units[number].nbytes
        return room

    def _keep_evenly(self, actions: list[list[Action]], places: range, room: float) -> None:
        """Keep in each of these blocks an equal part of the room; what does not fit in one goes to others."""
        share, left = room / max(len(places), 1), 0.0
        for place in places:
            left = self._keep_last(actions, range(place, place + 1), left + share)
        self._keep_last(actions, places, left)


def _cheapest_first(profile: Profile) -> list[tuple[int, int]]:
    """Return the units that can be recomputed, cheapest per byte first; those of one site spread over the blocks.

    Times that were measured differ a little from block to block: a site has the mean of its blocks.
    """
    per_site: dict[tuple[Site, int], list[tuple[int, int]]] = defaultdict(list)
    seconds: dict[tuple[Site, int], float] = defaultdict(float)
    for place, number, unit in profile.units():
        if unit.recompute_seconds is not None and unit.nbytes:
            key = (unit.site, unit.nbytes)
            per_site[key].append((place, number))
            seconds[key] += unit.recompute_seconds
    cost = {key: seconds[key] / len(where) / key[1] for key, where in per_site.items()}
    ordered: list[tuple[int, int]] = []
    for key in sorted(per_site, key=lambda key: (cost[key], key[0])):
        where = per_site[key]
        ordered += [where[i] for i in _spread(len(where))]
    return ordered


def _spread(count: int) -> list[int]:
    """Return the numbers below ``count`` so that every beginning of the list is spread over all of them.

    The golden section: each next one falls into one of the widest gaps (Weyl's equidistribution).
    """
    step = (math.sqrt(5) - 1) / 2
    return sorted(range(count), key=lambda i: (i + 1) * step % 1.0)


def _holder(least: Solution) -> str:
    where, block = least.predicted.peak_at
    what = {"turn": "the head and the loss"}.get(where, f"the {where} of block {block!r}")
    beside = format_size(least.predicted.peak_bytes - max(least.predicted.levels_bytes, default=0))
    return (
        f"that peak is in {what}, and {beside} of it are no saved tensors of blocks but weights, gradients, optimizer "
        "state and working memory; shorter sequences, a smaller batch or sharding over more devices make it smaller"
    )
