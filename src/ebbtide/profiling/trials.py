"""What ``Minimal`` tries in steps of the model, and how times are compared. See [Note: four methods]."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

from ebbtide.config import Minimal
from ebbtide.engine.timed import TimedStep
from ebbtide.planner import TablePlan, plan_for
from ebbtide.planner.table import table_plan
from ebbtide.profiling.baseline import has_backward, quartile
from ebbtide.profiling.solutions import FASTER, within_checkpointing
from ebbtide.profiling.step_profile import measured_rates, profile_of
from ebbtide.schedule.window import LEAST_WINDOW
from ebbtide.store.disk import DiskTier
from ebbtide.store.meter import allocatable_bytes, store_bytes
from ebbtide.store.protocol import Tier

NOTCH = 1.57
"""Times the interquartile range, over the root of the count: the 95 % uncertainty of a median."""


class Method(enum.Enum):
    """How the saved tensors of a block are restored."""

    CHECKPOINT = "checkpointed"
    RECIPES = "recomputed by recipes"
    OFFLOAD = "offloaded"
    MIXED = "kept, offloaded or recomputed tensor by tensor"


SHARED = (Method.CHECKPOINT, Method.RECIPES)
"""Methods that are tried in the same steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried in a step; all other blocks use recipes.

    Attributes:
        checkpointed: Blocks that are checkpointed.
        methods: Kind of blocks → the method of all blocks of the kind.
    """

    checkpointed: frozenset[str] = frozenset()
    methods: Mapping[str, Method]


@dataclass(frozen=True, slots=True)
class Range:
    """A median and its uncertainty: the notches of a box plot (McGill, Tukey and Larsen, 1978)."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of a sample."""
        middle = median(values)
        notch = NOTCH * (quartile(values, upper=True) - quartile(values)) / sqrt(len(values))
        return cls(max(middle - notch, 0.0), middle, middle + notch)


def fastest(took: Mapping[Method, Range]) -> Method:
    """Return the fastest method: of those that share their steps the lower median, another one only if it is certain.

    It must be faster by ``FASTER``, too, because what a method costs outside of blocks is not in these times.
    """
    first = min((method for method in SHARED if method in took), key=lambda method: took[method].middle)
    certain = [m for m, one in took.items() if m not in SHARED and one.high < took[first].low * (1 - FASTER)]
    return min(certain, key=lambda method: took[method].middle, default=first)


def trials(step: TimedStep, tier: Tier, *, mixes: bool) -> list[Trial]:
    """Return what is tried in each round after a step in which all blocks used recipes. See [Note: four methods]."""
    step = replace(step, blocks=tuple(filter(has_backward, step.blocks)))
    kinds = dict.fromkeys(block.kind for block in step.blocks)
    if mixes and step.head_peak_bytes is not None:
        able = frozenset(block.name for block in step.blocks if block.checkpointable)
        return [Trial(checkpointed=able, methods={}), Trial(methods=dict.fromkeys(kinds, Method.MIXED))]
    checkpointed, offloaded = every_other(step), may_offload(step, tier)
    found = [Trial(checkpointed=checkpointed, methods={})] if checkpointed or offloaded else []
    return [*found, Trial(methods=dict.fromkeys(offloaded, Method.OFFLOAD))] if offloaded else found


def every_other(step: TimedStep) -> frozenset[str]:
    """Return every other block of those that can be checkpointed, of each kind that has several."""
    able = [block for block in step.blocks if block.checkpointable]
    kinds = {kind: [b.name for b in able if b.kind == kind] for kind in {b.kind for b in able}}
    return frozenset(name for names in kinds.values() for name in names[1::2])


def may_offload(step: TimedStep, tier: Tier) -> frozenset[str]:
    """Return the kinds of blocks that may be offloaded entirely."""
    largest = max((block.saved_bytes for block in step.blocks), default=0)  # some may be checkpointed by the heuristic
    if not isinstance(tier, DiskTier) or tier.free_bytes < 2 * largest * len(step.blocks):
        return frozenset()
    inputs = sum(block.input_bytes for block in step.blocks)
    fits = max(2 * largest, LEAST_WINDOW) <= inputs + largest + LEAST_WINDOW
    return frozenset(block.kind for block in step.blocks if fits and block.saved_bytes)


def mixed(step: TimedStep, tier: Tier, window_bytes: int | None, limit_bytes: int) -> TablePlan | None:
    """Return the mix for a measured step, within the peak of one whose blocks were checkpointed.

    None: no mix promises to be faster.
    """
    profile = profile_of(step, measured_rates(tier), window_bytes)
    profile = replace(profile, store_bytes=store_bytes(tier))
    found = within_checkpointing(profile, limit_bytes, allocatable_bytes(tier) or 0)
    heuristic = plan_for(Minimal())
    return None if found is None else replace(table_plan(found, heuristic.name), heuristic=heuristic)
