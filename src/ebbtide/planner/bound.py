"""The bound: the least time of a step at given memory, whatever the schedule.

[Note: the linear program]
Each storage is kept (its size counts against ``K`` bytes), offloaded (its copied bytes count against ``M``) or
recomputed (its time counts). ``R(K, M)`` is the least time of recomputes, where a storage may be split; it is convex.
Copy-outs hide behind the blocks' forwards (``F``), copy-ins behind their backwards (``B``) and the recomputes; the rest
stalls:

    overhead(K) = min over M of  max(0, M / out_rate - F) + max(R(K, M), M / in_rate - B)

``K`` counts the bytes on the device when the head begins. Time of the head hides no copy: bytes copied out during it
are on the device when it begins, and count as kept. ``M`` is at most what the store holds. No schedule of whole
storages in a real order is faster (``lower_bound``), if what a checkpointed block drops costs no more than its share of
what the block pays once for all of it (``with_checkpoint_prices``), and if a storage that is offloaded in a narrower
type stays in it: such a storage may be held back.

A storage may be split, so only its prices per byte matter: storages whose copies are as wide and whose recomputes cost
the same, within ``PRICE_GRAIN``, are one to the program, at the lowest of their prices. So the bound stays one, at most
``PRICE_GRAIN`` below the exact program's, and experts of hundreds of sizes take no longer than one.

``R`` is computed from its dual: given prices for a kept byte and for a copied byte, every storage takes the cheapest of
its three actions, and the best prices give the value of the program. The prices also order the recomputes
(``Prices.rank``), which the search for a plan uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ebbtide.planner.checkpointing import with_checkpoint_prices
from ebbtide.planner.profile import Profile, Unit

HALVINGS = 50
"""Bisection steps, to float precision, for the bytes at which copy-ins take as long as the work that hides them."""

PRICE_GRAIN = 0.01
"""Relative difference of recomputes' prices per byte that the program does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The program's solution for given bytes kept and given bytes across the link.

    Attributes:
        seconds: The least time of recomputes; infinite where the bytes do not suffice.
        kept: Seconds that one more kept byte would save.
        moved: Seconds that one more byte across the link would save.
    """

    seconds: float
    kept: float
    moved: float

    def rank(self, unit: Unit) -> float:
        """Return the time of recomputing a unit relative to its cheapest alternative: below 1 it is recomputed."""
        if unit.recompute_seconds is None:
            return math.inf
        other = min(self.kept * unit.nbytes, self.moved * unit.moved_bytes if unit.movable else math.inf)
        return unit.recompute_seconds / other if other else math.inf


@dataclass(frozen=True, slots=True)
class _Sort:
    """Units that are equal to the program: their bytes, and per byte what is copied and the time of recomputing."""

    nbytes: int
    moved: float
    seconds: float

    def unkept(self, price: float) -> float:
        """Return the cost of not keeping a byte of them, at a price per copied byte."""
        crossing = price * self.moved if self.moved < math.inf else math.inf
        return min(crossing, self.seconds)


class Bound:
    """The linear program over one profile. See [Note: the linear program].

    Attributes:
        must_keep_bytes: The least bytes that stay.
    """

    def __init__(self, profile: Profile) -> None:
        self._rates = profile.rates
        self._hides_out, self._hides_in = profile.forward_seconds, profile.backward_seconds
        self.must_keep_bytes = profile.must_keep_bytes
        self._store_bytes = math.inf if profile.store_bytes is None else profile.store_bytes
        self._sorts = _sorts(u for _, _, u in profile.units() if u.nbytes and not u.must_keep)
        self._corners = _corners(self._sorts)

    def least(self, kept_bytes: float) -> tuple[float, float]:
        """Return the least extra time with at most ``kept_bytes`` kept, and the bytes that cross the link then.

        Returns:
            Seconds beyond the step that keeps everything, infinite when more than ``kept_bytes`` must stay; and bytes.
        """
        out, back = self._rates.out_bytes_per_second, self._rates.in_bytes_per_second
        free = out * self._hides_out
        marginal = self.prices(kept_bytes, free)
        if marginal.seconds == math.inf or marginal.moved * out > 1:  # stalling for a copy is cheaper than a recompute
            free = max(free, self._wanted(kept_bytes, 1 / out))
        moved = max(0.0, min(free, self._wanted(kept_bytes, 0.0), self._store_bytes))
        if self.seconds(kept_bytes, moved) < moved / back - self._hides_in:
            low, high = 0.0, moved
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                if self.seconds(kept_bytes, middle) < middle / back - self._hides_in:
                    high = middle
                else:
                    low = middle
            moved = high  # below it, storages without a rule may not fit
        return self.overhead(kept_bytes, moved), moved

    def overhead(self, kept_bytes: float, moved_bytes: float) -> float:
        """Return the least extra time for given bytes kept and given bytes across the link."""
        late = moved_bytes / self._rates.in_bytes_per_second - self._hides_in
        stall = max(0.0, moved_bytes / self._rates.out_bytes_per_second - self._hides_out)
        return stall + max(self.seconds(kept_bytes, moved_bytes), late)

    def seconds(self, kept_bytes: float, moved_bytes: float) -> float:
        """Return the least time of recomputes for given bytes kept and given bytes across the link."""
        return self.prices(kept_bytes, moved_bytes).seconds

    def prices(self, kept_bytes: float, moved_bytes: float, at_least: float = 0.0) -> Prices:
        """Return the program's solution for given bytes kept and given bytes across the link.

        The dual is concave in the price of crossing, and straight between two corners: its maximum is at one of them.
        That price is ``at_least`` so much, even where there is room for more.
        """
        room = kept_bytes - self.must_keep_bytes
        if room < 0:
            return Prices(seconds=math.inf, kept=math.inf, moved=math.inf)
        corners = [at_least, *(corner for corner in self._corners if corner > at_least)]
        known: dict[int, tuple[float, float]] = {}

        def value(place: int) -> float:
            if place not in known:
                cost, worth = self._knapsack(room, corners[place])
                known[place] = cost - (corners[place] - at_least) * moved_bytes, worth
            return known[place][0]

        low, high = 0, len(corners) - 1
        while low < high:
            middle = (low + high) // 2
            if value(middle) < value(middle + 1):
                low = middle + 1
            else:
                high = middle
        seconds = max(0.0, value(low))
        if low == len(corners) - 1 and self._wanted(kept_bytes, 2 * corners[-1] + 1) > moved_bytes + 1e-6:
            seconds = math.inf  # storages without a rule do not fit
        return Prices(seconds=seconds, kept=known[low][1], moved=corners[low])

    def _knapsack(self, room: float, price: float) -> tuple[float, float]:
        """Return the least cost of the units not kept, at a price per byte across the link, and a kept byte's worth."""
        cost, worth = 0.0, 0.0
        for per_byte, sort in sorted(((s.unkept(price), s) for s in self._sorts), key=lambda x: -x[0]):
            kept = min(sort.nbytes, room)
            room -= kept
            if kept < sort.nbytes:
                cost += per_byte * (sort.nbytes - kept)
                worth = max(worth, per_byte)
        return cost, worth

    def _wanted(self, kept_bytes: float, price: float) -> float:
        """Return how many bytes would cross the link at a price for each; of equally good numbers the largest."""
        room, moved = kept_bytes - self.must_keep_bytes, 0.0
        for _, sort in sorted(((s.unkept(price), s) for s in self._sorts), key=lambda x: (-x[0], x[1].moved)):
            kept = min(sort.nbytes, max(room, 0.0))
            room -= kept
            if sort.moved < math.inf and price * sort.moved <= sort.seconds:
                moved += (sort.nbytes - kept) * sort.moved
        return moved


def lower_bound(profile: Profile) -> Bound:
    """Return the program that no schedule is faster than. See [Note: the linear program]."""
    priced = with_checkpoint_prices(profile)
    blocks = tuple(replace(block, units=tuple(map(_as_held, block.units))) for block in priced.blocks)
    return Bound(replace(priced, blocks=blocks))


def _as_held(unit: Unit) -> Unit:
    """Return a unit as large as it is on the device if it is offloaded and its copy has not begun."""
    return replace(unit, nbytes=unit.moved_bytes, narrow_bytes=None) if unit.movable else unit


def _sorts(units: Iterable[Unit]) -> list[_Sort]:
    """Return units whose prices per byte are equal within ``PRICE_GRAIN`` as one, at the lowest of these prices."""
    found: dict[tuple[float, float], _Sort] = {}
    for unit in units:
        part = unit.moved_bytes / unit.nbytes if unit.movable else math.inf
        seconds = math.inf if unit.recompute_seconds is None else unit.recompute_seconds / unit.nbytes
        grade = math.floor(math.log(seconds) / PRICE_GRAIN) if 0 < seconds < math.inf else seconds
        known = found.get((part, grade), _Sort(0, part, seconds))
        found[part, grade] = _Sort(known.nbytes + unit.nbytes, part, min(known.seconds, seconds))
    return list(found.values())


def _corners(sorts: list[_Sort]) -> list[float]:
    """Return the prices per byte across the link at which a unit's best action, or the order of keeping, changes."""
    finite = [sort for sort in sorts if sort.seconds < math.inf]
    own = {sort.seconds / sort.moved for sort in finite if 0 < sort.moved < math.inf}
    per_kept = {sort.seconds for sort in finite}
    parts = {sort.moved for sort in sorts if 0 < sort.moved < math.inf}
    return sorted({0.0, *own, *(rate / part for rate in per_kept for part in parts)}) if parts else [0.0]
