"""Compare what a plan promised with what was measured: the loop that keeps ``Auto`` to its word.

[Note: the loop]
Passes that carry the plan out are timed from their first block to the end of their backward (``ebbtide.engine.spans``).
After ``CHECKED`` of them the plan is judged. Machines are noisy, so a promise is missed only if all but the fastest of
them took longer than promised, by more than the measured steps differed among themselves. Then what was not explained
is charged to copies and recomputes (``ebbtide.planner.charges``) and the plan is made anew from that: it keeps more. If
it would not, or after the last of ``CORRECTIONS``, everything is kept, without hooks, where the memory is there. A
memory budget that was exceeded is taken as so much smaller. Every rank does this for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ebbtide.base.units import format_size
from ebbtide.engine.spans import Span
from ebbtide.planner.charges import Work, charged
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Solution

CHECKED = 5
"""Passes that are timed before a plan is judged."""

SETTLING = 1
"""Passes after a new plan that are not timed: the store takes other sizes."""

CORRECTIONS = 3
"""Most corrections of one plan; the last keeps everything."""

LEAST_NOISE = 0.01
"""Steps that differ by no more than this part are alike on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps that carried a plan out.

    Attributes:
        seconds: Median of their times; with what follows their backward, as it was measured before the plan.
        low_seconds: The shortest but one.
        high_seconds: The longest but one.
        peak_bytes: The highest peak of them; None if not measured.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    peak_bytes: int | None

    @staticmethod
    def of(spans: Sequence[Span], tail_seconds: float) -> Measured:
        """Return what ``CHECKED`` spans show.

        Args:
            spans: Of the passes.
            tail_seconds: From the end of the backward to the next pass.
        """
        times = sorted(span.seconds for span in spans)
        peaks = [span.peak_bytes for span in spans if span.peak_bytes is not None]
        return Measured(
            seconds=median(times) + tail_seconds,
            low_seconds=times[1] + tail_seconds,
            high_seconds=times[-2] + tail_seconds,
            peak_bytes=max(peaks, default=None),
        )


class Check:
    """Judges one plan. See [Note: the loop].

    Args:
        solution: What was chosen; its profile tells what a plain step takes.
        allowed_seconds: The longest step that was promised.
        noise: Part by which equal steps differed when they were measured.
        budget_bytes: The highest peak that was promised; None: none was.
    """

    def __init__(
        self, solution: Solution, *, allowed_seconds: float, noise: float, budget_bytes: int | None = None
    ) -> None:
        self.solution, self.allowed_seconds, self.budget_bytes = solution, allowed_seconds, budget_bytes
        self._noise = max(noise, LEAST_NOISE)
        self._spans: list[Span] = []
        self._settling = SETTLING
        self.measured: Measured | None = None
        self.reserved_bytes: int | None = None  # by torch's allocator, when it was measured

    def add(self, span: Span) -> Measured | None:
        """Take a pass in; return what was measured once there are enough."""
        if self._settling:
            self._settling -= 1
            return None
        self._spans.append(span)
        if len(self._spans) == CHECKED:
            self.measured = Measured.of(self._spans, self.solution.profile.tail_seconds)
        return self.measured

    @property
    def too_slow(self) -> bool:
        """Whether steps took longer than promised, beyond noise."""
        measured = self.measured
        return measured is not None and measured.low_seconds > self.allowed_seconds * (1 + self._noise)

    @property
    def over_budget_bytes(self) -> int:
        """By how much the peak is above the budget."""
        peak = None if self.measured is None else self.measured.peak_bytes
        return 0 if peak is None or self.budget_bytes is None else max(peak - self.budget_bytes, 0)

    def text(self) -> str:
        """Return promised, predicted, measured and bound, with their figures."""
        solution, measured = self.solution, self.measured
        plain = solution.profile.step_seconds or 1.0

        def slower(seconds: float) -> str:
            return f"{seconds:.4g} s ({100 * (seconds / plain - 1):+.1f} %)"

        parts = [f"plain step {plain:.4g} s"]
        if self.budget_bytes is None:
            parts.append(f"promised at most {slower(self.allowed_seconds)}")
        else:
            parts.append(f"promised a peak of at most {format_size(self.budget_bytes)}")
        parts.append(f"predicted {slower(solution.predicted.step_seconds)}")
        if not (solution.predicted.offloaded_bytes or solution.predicted.recomputed_bytes):
            parts.append("not measured: it is plain training")
        elif measured is None:
            parts.append(f"not measured yet ({len(self._spans)} of {CHECKED} steps)")
        else:
            peak = "" if measured.peak_bytes is None else f", peak {format_size(measured.peak_bytes)}"
            if peak and self.reserved_bytes is not None:
                peak += f" allocated, {format_size(self.reserved_bytes)} reserved"
            between = f"{measured.low_seconds:.4g} to {measured.high_seconds:.4g} s"
            parts.append(f"measured {slower(measured.seconds)}, {between} in {CHECKED} steps{peak}")
        parts.append(f"bound {100 * solution.bound_seconds / plain:+.1f} %")
        return "; ".join(parts)


def recalibrated(check: Check) -> Profile | None:
    """Return the step with prices under which the plan takes as long as it did; None where it pays no prices.

    Args:
        check: A plan that was judged.
    """
    predicted, profile, measured = check.solution.predicted, check.solution.profile, check.measured
    if measured is None:
        return None
    work = Work(recompute_seconds=predicted.recompute_seconds, moved_bytes=predicted.moved_bytes, crossings=0)
    return charged(profile, work, measured.seconds - predicted.step_seconds)
