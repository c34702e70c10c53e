"""The units of a profile that can be recomputed, by site."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.base.actions import Site
from ebbtide.planner.profile import Profile, Unit


@dataclass(frozen=True, slots=True)
class SiteUnits:
    """Equally large units of one site: one of them, and the indices of all, spread over the blocks."""

    unit: Unit
    places: Sequence[tuple[int, int]]


def by_site(profile: Profile) -> list[SiteUnits]:
    """Return the units that can be recomputed, by site.

    Measured times vary between blocks; a site has the mean of its blocks.
    """
    per_site: dict[tuple[Site, int, int | None, bool], list[tuple[int, int]]] = defaultdict(list)
    seconds: dict[tuple[Site, int, int | None, bool], float] = defaultdict(float)
    for place, number, unit in profile.units():
        if unit.recompute_seconds is not None and unit.nbytes:
            key = (unit.site, unit.nbytes, unit.narrow_bytes, unit.movable)
            per_site[key].append((place, number))
            seconds[key] += unit.recompute_seconds
    return [
        SiteUnits(
            Unit(
                site=key[0], nbytes=key[1], narrow_bytes=key[2], movable=key[3],
                recompute_seconds=seconds[key] / len(places),
            ),
            [places[i] for i in _spread(len(places))],
        )
        for key, places in sorted(per_site.items(), key=lambda item: item[0][0])
    ]  # fmt: skip


def _spread(count: int) -> list[int]:
    """Return the numbers below ``count`` ordered so that every prefix is evenly spread.

    By the golden ratio, each number falls into one of the widest gaps (Weyl's equidistribution).
    """
    step = (math.sqrt(5) - 1) / 2
    return sorted(range(count), key=lambda i: (i + 1) * step % 1.0)
