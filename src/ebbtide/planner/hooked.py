"""Choosing which blocks have hooks, given the price of hooks.

[Note: the price of hooks]
A block with anything offloaded or recomputed has hooks, which cost host time for each saved tensor, whatever its
action. A block that keeps everything has none. So offloading and recomputing more in fewer blocks may save more within
the same slowdown. The search runs for the first n blocks that save something, whose bytes stay longest, for several n
whose hooks leave time for more; all other blocks keep everything. Hooks cost more in a block in which anything is
recomputed, so each n is searched twice, with recomputes and without any. A checkpointed block has hooks for its inputs
only: where the host limits the step, a second forward may cost less than the hooks of recipes, so plans that checkpoint
the first blocks are tried, too. If hooks cost nothing, or were not measured, there is one search over all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ebbtide.planner.profile import RECOMPUTE_HOOKS, Profile
from ebbtide.planner.solve import GRAIN, Search, Solution

PARTS = (1.0, 0.75, 0.5, 0.25, 0.125)
"""The tried shares of blocks with hooks."""

FEW = (1, 2)
"""The numbers of blocks that are tried, too: in a small model a single block may cost as much as was promised."""


def shrink_hooked(profile: Profile, max_slowdown: float) -> Solution:
    """Return the plan with the smallest peak whose step, hooks included, is at most ``max_slowdown`` slower."""
    slack, search = max_slowdown * profile.step_seconds * (1 + 1e-9), Search(profile)
    if not any(block.hook_seconds for block in profile.blocks):
        return search.least_memory(slack)
    found = search.checkpointed(lambda s: s.predicted.overhead_seconds > slack, fewest=False)
    saving = [place for place, block in enumerate(profile.blocks) if block.units]
    counts = {*FEW, *(round(part * len(saving)) for part in PARTS)}
    for first in (saving[:count] for count in sorted(counts) if 0 < count <= len(saving)):
        hooks = sum(profile.blocks[place].hook_seconds for place in first)
        for price, recomputes in ((RECOMPUTE_HOOKS, True), (1.0, False)):
            if price * hooks < slack:
                only = Search(_only(profile, first, recomputes=recomputes)).least_memory(slack)
                found.append(search.simulated(only.assignment))  # later executions of a block share actions
    fitting = [search.everything, *(s for s in found if s.predicted.overhead_seconds <= slack)]
    grain = GRAIN * profile.saved_bytes or 1.0
    return min(fitting, key=lambda s: (round(s.predicted.peak_bytes / grain), s.predicted.overhead_seconds))


def _only(profile: Profile, treated: Sequence[int], *, recomputes: bool) -> Profile:
    """Return a profile in which all but some blocks keep their tensors; without recomputes, those only offload."""
    blocks = list(profile.blocks)
    for place, block in enumerate(blocks):
        able = place in treated
        if not (able and recomputes):
            units = (
                replace(unit, movable=unit.movable and able, recompute_seconds=None, recompute_flops=None)
                for unit in block.units
            )
            blocks[place] = replace(block, units=tuple(units), checkpointable=block.checkpointable and able)
    return replace(profile, blocks=tuple(blocks))
