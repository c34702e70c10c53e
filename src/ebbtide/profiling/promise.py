"""Compare a plan's promise with measured steps, and correct the plan.

[Note: the loop]
Passes that execute the plan, and their blocks, are timed (``ebbtide.engine.spans``). Blocks that keep everything run
without hooks; memory permitting, so do a few others until the plan is judged. So each pass measures the plan and
ordinary training at the same machine speed, and their ratio is judged (``ebbtide.profiling.block_times``). The spread
of the blocks without hooks gives the ratio an error bar. The promise is missed once the bars of ``AGREE`` passes are
above it. Otherwise ``CHECKED`` passes decide if their median keeps it, or if the lower end of what their median may be
(``interval``) is above it; between the two, up to ``LATEST`` passes are awaited, and then the median decides. So that
luck does not last, passes at growing distances are added to those of a plan that stays, and it is judged again; that
may only lead to a plan that keeps more. Without such blocks, or with a memory budget, ``CHECKED`` whole passes, as long
as the measured steps, are compared with them, once: the promise is missed if all but the fastest took longer than
promised, by more than the measured steps differed.

After a miss, unexplained time is charged to all kinds of work (``ebbtide.planner.charges``), and the new plan keeps
more. If it would not, or after ``CORRECTIONS`` of them, everything is kept, without hooks, memory permitting. A memory
budget that was exceeded is reduced by the excess. A plan that kept its promise with time to spare is followed by one
that keeps less (``ebbtide.profiling.closed_loop``). Every rank does this independently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from ebbtide.base.actions import keeps_all
from ebbtide.base.errors import counted
from ebbtide.base.runs import SETTLING, KeptBecause
from ebbtide.base.units import format_size
from ebbtide.engine.spans import Span
from ebbtide.engine.timing import GROWTH
from ebbtide.planner.charges import Work, charged, scaled
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Solution
from ebbtide.profiling.block_times import Measured, from_blocks, same_blocks

CHECKED = 5
"""Timed passes before a plan is first judged, unless it clearly misses its promise."""

AGREE = 2
"""Passes that must agree that a promise was clearly missed: one may have been disturbed."""

UNUSED = 20
"""Passes in a row that cannot be compared until a plan is left unjudged: graphs may overlap in all of them."""

CORRECTIONS = 4
"""Most corrections of one plan; the last keeps everything."""

FIRST_LOOK, FURTHER = 16, 4
"""Passes after which a kept promise is judged again, and by how many times that distance grows each time."""

ADDED, LATEST = 3, 11
"""Passes that each later verdict adds, and most passes, the latest ones, that a verdict is made from."""

LEAST_PRICE = 0.25
"""Lowest share to which a price falls at once when a plan took less time than predicted."""

LOWER = 0.8
"""Prices that would stay above this share are left unchanged."""

LEAST_NOISE = 0.01
"""Steps that differ by at most this share are equal on any machine."""

UNLIKE_BLOCKS = "blocks differ from step to step, so ordinary training was not measured, and no slowdown is promised"

UNJUDGED = "not judged: graphs overlap or have several backwards, or steps are longer or run other blocks than measured"

VERIFYING = 5
"""Most further passes that do not count because recipes are verified in them. Where lengths vary, some always are."""


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return two of the values between which their true median lies at some 93 %, if there are five or more."""
    ordered = sorted(values)
    skipped = max(int(len(ordered) / 2 - 0.9 * len(ordered) ** 0.5), 0)  # order statistics, as of a sign test
    return ordered[skipped], ordered[-1 - skipped]


class Judgement:
    """Judges one plan. See [Note: the loop].

    Args:
        solution: The plan; its profile has the time of an ordinary step.
        allowed_seconds: The longest step that was promised.
        noise: Relative difference of the equal steps that were measured.
        budget_bytes: The promised peak; None: no promise.
        spare_bytes: Bytes of it that should stay free.
        known: Whether the profile's times are those of ordinary training.
    """

    def __init__(
        self, solution: Solution, *, allowed_seconds: float, noise: float, budget_bytes: int | None,
        spare_bytes: int = 0, known: bool = True,
    ) -> None:  # fmt: skip
        self.solution, self.allowed_seconds = solution, allowed_seconds
        self.budget_bytes, self._spare_bytes = budget_bytes, spare_bytes
        self._noise = max(noise, LEAST_NOISE)
        self._steps = deque[Measured](maxlen=LATEST)
        self._settling, self._needed = SETTLING, CHECKED  # passes until those that count, and of those to a verdict
        self._verifying = VERIFYING
        self.looks = 0  # later ones, after the first verdict
        self.measured: Measured | None = None
        self.reserved_bytes: int | None = None  # by torch's allocator, when it was measured
        self.known = known
        self._unused = 0
        self.too_slow = False  # steps took longer than promised, beyond noise
        self.by_blocks = False  # judged by blocks without hooks in the same passes
        self.keeps = all(map(keeps_all, solution.assignment))

    def add(self, span: Span | None) -> Measured | None:
        """Process a pass, None if it could not be timed; return the measurement once the plan is judged."""
        self._unused += 1
        if span is None:
            return None
        if self._settling or (span.verifies and self._verifying):
            self._verifying -= not self._settling
            self._settling, self._unused = max(self._settling - 1, 0), 0
            return None
        found = None if self.budget_bytes is not None else from_blocks(span, self.solution)
        if found is not None:
            self._unused = 0
            return self._judge(found)
        if self.by_blocks or (self.budget_bytes is None and span.blocks and not same_blocks(span, self.solution)):
            return None  # other blocks take another time than was promised
        over_budget = self.budget_bytes is not None and (span.peak_bytes or 0) > self.budget_bytes
        if span.saved_bytes > GROWTH * self.solution.profile.saved_bytes and not over_budget:
            return None  # longer sequences take longer than was promised
        self._unused = 0
        if span.saved_bytes * GROWTH < self.solution.profile.saved_bytes and not over_budget:
            return None  # shorter sequences: it shows neither the time nor the peak that were promised
        seconds = span.seconds + self.solution.profile.epilogue_seconds
        self._steps.append(
            Measured(
                seconds=seconds,
                low_seconds=seconds,
                high_seconds=seconds,
                peak_bytes=span.peak_bytes,
                system_seconds=span.system_seconds,
            )
        )
        times = sorted(step.seconds for step in self._steps)
        if len(times) >= CHECKED:
            self.too_slow = not self.keeps and times[1] > self.allowed_seconds * (1 + self._noise)
            self.measured = self._summary(times[1], times[-2])
        elif over_budget:
            self.measured = self._summary(times[0], times[-1])  # one such step is enough
        return self.measured

    def _judge(self, found: Measured) -> Measured | None:
        """Judge the plan by the passes compared so far, if they suffice."""
        if not self.by_blocks:
            self._steps.clear()  # whole steps
        self._steps.append(found)
        self.by_blocks, self._needed = True, max(self._needed - 1, 0)
        plain, limit = self.solution.profile.step_seconds, self.allowed_seconds * (1 + LEAST_NOISE)
        promised = max(self.allowed_seconds, plain * (1 + LEAST_NOISE))  # steps that near are equal to plain ones
        low, high = interval(step.seconds for step in self._steps)
        clear, lucky = sum(step.low_seconds > limit for step in self._steps), not self._needed  # of five, one may be
        missed = self.measured is None and clear >= max(AGREE, len(self._steps) - lucky)
        if self._needed and not missed:
            return None
        above, missed = median(step.seconds for step in self._steps) > promised, missed or low > promised
        if above and not missed and len(self._steps) < LATEST:
            return None
        self.too_slow, self.measured = missed or above, self._summary(low, high)
        return self.measured

    def prepare_next(self) -> int:
        """Prepare the next verdict; return after how many passes those that count begin. 0: this one is final."""
        if self.measured is None or not self.by_blocks or self.too_slow:
            return 0
        self._settling, self._needed, self._unused = SETTLING, ADDED, 0
        self.looks += 1
        return FIRST_LOOK * FURTHER ** (self.looks - 1)

    def _summary(self, low: float, high: float) -> Measured:
        peaks = [step.peak_bytes for step in self._steps if step.peak_bytes is not None]
        kernels = [step.system_seconds for step in self._steps if step.system_seconds is not None]
        return Measured(
            seconds=median(step.seconds for step in self._steps),
            low_seconds=low,
            high_seconds=high,
            peak_bytes=max(peaks, default=None),
            steps=len(self._steps),
            system_seconds=median(kernels) if kernels else None,
        )

    @property
    def kept_because(self) -> KeptBecause | None:
        """Why it keeps everything, without hooks; None if it does not."""
        if not self.keeps or self.over_budget_bytes or self.hopeless:
            return None
        if self.budget_bytes is not None:
            return KeptBecause.FITS
        if not self.known:
            return KeptBecause.UNLIKE
        if not self.solution.profile.saved_bytes:
            return KeptBecause.SMALL
        return KeptBecause.LONE if len(self.solution.profile.blocks) == 1 else KeptBecause.GAINS_NOTHING

    @property
    def unjudged(self) -> bool:
        """Whether steps that execute it must judge it: one that keeps everything is as fast as ordinary training."""
        return self.measured is None and not (self.keeps and self.budget_bytes is None)

    @property
    def hopeless(self) -> bool:
        """Whether passes cannot be compared with the plan's, so that no verdict is expected."""
        return self._unused >= UNUSED

    @property
    def allowed_share(self) -> float:
        """The slowdown that was promised, as a share of the measured one; 1 if there was none."""
        plain, measured = self.solution.profile.step_seconds, self.measured
        slower = 0.0 if measured is None else measured.seconds - plain
        return (self.allowed_seconds - plain) / slower if slower > 0 else 1.0

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the peak exceeds the budget less what should stay free of it."""
        peak = None if self.measured is None else self.measured.peak_bytes
        return 0 if peak is None or self.budget_bytes is None else max(peak + self._spare_bytes - self.budget_bytes, 0)

    @property
    def over_budget_bytes(self) -> int:
        """Bytes by which the peak exceeds the budget."""
        return max(self.excess_bytes - self._spare_bytes, 0)

    def text(self) -> str:
        """Format the promised, predicted and measured figures, and the bound."""
        solution, measured = self.solution, self.measured
        plain = solution.profile.step_seconds or 1.0

        def slower(seconds: float) -> str:
            return f"{seconds:.4g} s" + (f" ({100 * (seconds / plain - 1):+z.1f} %)" if self.known else "")

        parts = [f"plain step {plain:.4g} s" if self.known else UNLIKE_BLOCKS]
        if self.keeps and not self.known and self.budget_bytes is None:
            return parts[0]
        if self.budget_bytes is None:
            parts.append(f"promised at most {slower(self.allowed_seconds)}")
        else:
            parts.append(f"promised a peak of at most {format_size(self.budget_bytes)}")
        parts.append(f"predicted {slower(solution.predicted.step_seconds)}")
        if self.keeps and self.budget_bytes is None:
            parts.append("not measured: it is ordinary training")
        elif measured is None and self.hopeless:
            parts.append(UNJUDGED)
        elif measured is None:
            parts.append(f"not measured yet ({len(self._steps)} of at most {LATEST} steps)")
        else:
            peak = "" if measured.peak_bytes is None else f", peak {format_size(measured.peak_bytes)}"
            if peak and self.reserved_bytes is not None:
                peak += f" allocated, {format_size(self.reserved_bytes)} reserved"
            between = f"{measured.low_seconds:.4g} to {measured.high_seconds:.4g} s"
            parts.append(f"measured {slower(measured.seconds)}, {between} in {counted(measured.steps, 'step')}{peak}")
            if measured.system_seconds is not None and self.budget_bytes is not None:
                parts.append(
                    f"{measured.system_seconds:.2g} core seconds of a step are the kernel's (files, fresh pages)"
                )
        if self.known:
            parts.append(f"bound {100 * solution.bound_seconds / plain:+z.1f} %")
        return "; ".join(parts)


def recalibrated(judgement: Judgement) -> Profile | None:
    """Return the step with prices that explain the plan's measured time; None if no prices apply."""
    predicted, profile, measured = judgement.solution.predicted, judgement.solution.profile, judgement.measured
    if measured is None:
        return None
    work = Work(
        recompute_seconds=predicted.recompute_seconds,
        moved_bytes=predicted.moved_bytes,
        crossings=0,
        all_kinds=True,
        hook_seconds=predicted.hook_seconds,
    )
    return charged(profile, work, measured.seconds - predicted.step_seconds)


def loosened(judgement: Judgement) -> Profile | None:
    """Return the step with lower prices, if a plan that kept its promise shows that its own are too high; else None."""
    profile, predicted, measured = judgement.solution.profile, judgement.solution.predicted, judgement.measured
    if judgement.keeps:
        return scaled(profile, LEAST_PRICE)
    comparable = judgement.by_blocks or judgement.budget_bytes is not None
    if measured is None or not comparable or predicted.overhead_seconds <= 0:
        return None
    # No plan is faster than ordinary training: what one seems to gain is an error, which may have the other sign, too.
    extra = max(measured.high_seconds - profile.step_seconds, profile.step_seconds - measured.seconds)
    factor = extra / predicted.overhead_seconds
    return None if factor > LOWER else scaled(profile, max(factor, LEAST_PRICE))
