"""The bound: how little a step can cost at some memory, whatever the schedule.

[Note: the linear program]
Let ``K`` bytes stay, ``O`` bytes be offloaded and the rest be recomputed, cheapest per byte first, so that
its time ``R(K + O)`` is convex. Copies out hide behind the forward and the head (``F``), copies in behind the backward
(``B``) and the recomputes; what does not hide is a stall:

    overhead(K, O) = max(0, M(O) / out_rate - F) + max(R(K + O), M(O) / in_rate - B)

``M(O)`` is what crosses the link: ``O`` itself, but for storages offloaded in a narrower type, which come first. With
storages that may be split this is a linear program; because only sums of bytes matter, its minimum over ``O`` lies
where two straight pieces meet, and those places are few. No schedule of whole storages in a real order can be faster.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate, pairwise

from ebbtide.planner.profile import Profile


class Recomputes:
    """The least time of making so many bytes again: the cheapest per byte first.

    Args:
        profile: The step.
    """

    def __init__(self, profile: Profile) -> None:
        able = sorted(
            (unit.recompute_seconds / unit.nbytes, unit.nbytes)
            for _, _, unit in profile.units()
            if unit.recompute_seconds is not None and unit.nbytes
        )
        self.bytes_up_to = [0, *accumulate(nbytes for _, nbytes in able)]
        self._seconds_up_to = [0.0, *accumulate(rate * nbytes for rate, nbytes in able)]
        self._rates = [rate for rate, _ in able]

    def seconds(self, nbytes: float) -> float:
        """Return the least time of recomputing ``nbytes``; infinite when no rule covers so many."""
        if nbytes <= 0:
            return 0.0
        place = bisect_left(self.bytes_up_to, nbytes)
        if place == len(self.bytes_up_to):
            return math.inf
        before = place - 1
        return self._seconds_up_to[before] + (nbytes - self.bytes_up_to[before]) * self._rates[before]


class Crossings:
    """The fewest bytes that cross the link when so many are offloaded: those stored in a narrower type first.

    Args:
        profile: The step.
    """

    def __init__(self, profile: Profile) -> None:
        sizes: dict[float, int] = defaultdict(int)
        for _, _, unit in profile.units():
            if unit.movable and unit.nbytes:
                sizes[unit.moved_bytes / unit.nbytes] += unit.nbytes
        self._parts = sorted(sizes)
        self.bytes_up_to = [0, *accumulate(sizes[part] for part in self._parts)]
        self._moved_up_to = [0.0, *accumulate(part * sizes[part] for part in self._parts)]

    def moved(self, offloaded_bytes: float) -> float:
        """Return the fewest bytes that cross when ``offloaded_bytes`` are offloaded."""
        place = min(bisect_right(self.bytes_up_to, offloaded_bytes), len(self._parts)) - 1
        if place < 0:
            return offloaded_bytes
        return self._moved_up_to[place] + (offloaded_bytes - self.bytes_up_to[place]) * self._parts[place]

    def offloaded(self, moved_bytes: float) -> float:
        """Return how many bytes can be offloaded while so many cross."""
        place = min(bisect_right(self._moved_up_to, moved_bytes), len(self._parts)) - 1
        if place < 0 or not self._parts[place]:
            return moved_bytes
        return self.bytes_up_to[place] + (moved_bytes - self._moved_up_to[place]) / self._parts[place]


class Bound:
    """The linear program over one profile. See [Note: the linear program].

    Args:
        profile: The step.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile, self._recomputes, self._crossings = profile, Recomputes(profile), Crossings(profile)
        self._total = profile.saved_bytes
        self._hides_out = profile.forward_seconds + profile.turn_seconds
        self._hides_in = profile.backward_seconds

    def least(self, kept_bytes: float) -> tuple[float, float]:
        """Return the least extra time with at most ``kept_bytes`` kept, and the bytes offloaded then.

        Returns:
            Seconds beyond the step that keeps everything, infinite when more than ``kept_bytes`` must stay; and bytes.
        """
        if kept_bytes < self._profile.stubborn_bytes:
            return math.inf, 0.0
        leave = max(0.0, self._total - kept_bytes)
        best = min((self._overhead(leave, offloaded), offloaded) for offloaded in self._corners(leave))
        return best

    def _overhead(self, leave: float, offloaded: float) -> float:
        rates, moved = self._profile.rates, self._crossings.moved(offloaded)
        out = max(0.0, moved / rates.out_bytes_per_second - self._hides_out)
        return out + max(
            self._recomputes.seconds(leave - offloaded), moved / rates.in_bytes_per_second - self._hides_in
        )

    def _corners(self, leave: float) -> list[float]:
        """Return where straight pieces of the overhead meet."""
        rates = self._profile.rates
        kinks = {leave - nbytes for nbytes in self._recomputes.bytes_up_to} | {
            0.0,
            leave,
            self._crossings.offloaded(rates.out_bytes_per_second * self._hides_out),
            self._crossings.offloaded(rates.in_bytes_per_second * self._hides_in),
            *self._crossings.bytes_up_to,
        }
        corners = sorted(offloaded for offloaded in kinks if 0.0 <= offloaded <= leave)
        crossings: list[float] = []
        for low, high in pairwise(corners):
            at_low, at_high = self._gap(leave, low), self._gap(leave, high)
            if math.isfinite(at_low) and at_low > 0 > at_high:
                crossings.append(low + (high - low) * at_low / (at_low - at_high))
        return corners + crossings

    def _gap(self, leave: float, offloaded: float) -> float:
        """Return by how much the recomputes take longer than the copies in that do not hide."""
        late = self._crossings.moved(offloaded) / self._profile.rates.in_bytes_per_second - self._hides_in
        return self._recomputes.seconds(leave - offloaded) - late
