"""The counted steps of a run.

[Note: steady steps]
The first step warms up allocators and caches, and under ``Auto`` the steps before the last plan do not run it, and its
first ``SETTLING`` steps are slower than all that follow: these warm-up steps do not count. A comparison skips the same
number of steps in every mode. A process's resident size includes freed memory that its allocator keeps; so in one step,
the last of a recipe's run, the heap is trimmed at both edges of the forward (the event ``trim``). Activation memory is
taken from that step, and times from the others, because fresh memory from the kernel is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.base.runs import SETTLING, Event, of_kind


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The steps of a run, classified.

    Attributes:
        warm_up: The first steps, which do not count.
        trimmed: Steps whose forward began and ended with a trimmed heap.
        begins: The end of the warm-up, in seconds of the run's clock; minus infinity without a warm-up.
    """

    warm_up: frozenset[Any]
    trimmed: frozenset[Any]
    begins: float

    def counts(self, step: Any) -> bool:
        """Whether memory of a step counts."""
        return step not in self.warm_up

    def timed(self, step: Any) -> bool:
        """Whether the time of a step counts."""
        return self.counts(step) and step not in self.trimmed


def steady_steps(events: Sequence[Event], warm_up: int | None = None) -> Steady:
    """Classify the steps of a run.

    Args:
        events: Events of the run file.
        warm_up: Number of steps to skip; ``None``: those before the last plan, and its first ones if others follow, at
            least one. With too few steps, one is skipped.
    """
    ends = {event.get("step"): event["t"] for event in of_kind(events, "step")}
    forwards = [e.get("step") for e in of_kind(events, "phase") if e.get("name") == "forward"]
    steps = list(dict.fromkeys([*forwards, *ends]))
    count = warm_up if warm_up is not None else min(steps_before_plan(events) + SETTLING, len(steps) - 1)
    left_out = frozenset(steps[: count if 1 <= count < len(steps) else 1])
    trimmed = frozenset(event.get("step") for event in of_kind(events, "trim"))
    over = max((ends.get(step, -math.inf) for step in left_out), default=-math.inf)
    return Steady(warm_up=left_out, trimmed=trimmed, begins=over)


def steps_before_plan(events: Sequence[Event]) -> int:
    """Return the number of steps before the last plan that was followed by a step."""
    ends = [event["t"] for event in of_kind(events, "step")]
    plans = [event["t"] for event in of_kind(events, "plan") if ends and event["t"] < ends[-1]]
    return sum(end < plans[-1] for end in ends) if plans else 0
