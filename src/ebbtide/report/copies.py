"""Each step's copies, and how much of the copying overlapped compute.

[Note: overlap]
A ``stats`` event has totals: bytes copied out and in, and the time that compute waited for copies. The difference of
two is a step's. Bytes divided by the store's measured rates are the copies' time; the part that compute did not wait
for overlapped. Single copies have no events, so their start and end are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.base.runs import Event
from ebbtide.base.units import format_size
from ebbtide.report.run import Run


@dataclass(frozen=True, kw_only=True)
class StepCopies:
    """The copies of one step.

    Attributes:
        step: Its number.
        t: Its end, in seconds of the run's clock.
        out_bytes: Bytes copied out.
        in_bytes: Bytes copied in.
        seconds: Time that the copies took; ``None``: a rate is not known.
        stall_seconds: Time that compute waited for them.
    """

    step: Any
    t: float
    out_bytes: int
    in_bytes: int
    seconds: float | None
    stall_seconds: float


def copies(run: Run) -> list[StepCopies]:
    """Return the copies of each step with figures."""
    found: list[StepCopies] = []
    before: Event = {}
    for event in run.all("stats"):
        names = ("total_copy_out_bytes", "total_copy_in_bytes", "total_stall_seconds")
        out, back, stall = (max(0, (event.get(name) or 0) - (before.get(name) or 0)) for name in names)
        times = [
            _seconds(out, event.get("copy_out_bytes_per_second")),
            _seconds(back, event.get("copy_in_bytes_per_second")),
        ]
        known = [seconds for seconds in times if seconds is not None]
        found.append(
            StepCopies(
                step=event.get("step"), t=event["t"], out_bytes=out, in_bytes=back, stall_seconds=stall,
                seconds=sum(known) if len(known) == len(times) else None,
            )
        )  # fmt: skip
        before = event
    return found


def overlap(run: Run) -> float | None:
    """Return the share of the copying, 0 to 1, that compute did not wait for; ``None``: not known, or no copies."""
    steps = copies(run)
    if any(step.seconds is None for step in steps):
        return None
    seconds = sum(step.seconds or 0.0 for step in steps)
    return max(0.0, 1 - sum(step.stall_seconds for step in steps) / seconds) if seconds else None


def sentence(run: Run) -> str | None:
    """Describe the copies and their overlap with compute; ``None`` without copies."""
    steps = copies(run)
    out, back = sum(step.out_bytes for step in steps), sum(step.in_bytes for step in steps)
    if not out and not back:
        return None
    share = overlap(run)
    words = (
        "how much of it overlapped compute is not known" if share is None else f"{100 * share:.0f} % overlapped compute"
    )
    return f"Copies: {format_size(out)} out and {format_size(back)} in; {words}."


def _seconds(nbytes: int, rate: float | None) -> float | None:
    if not nbytes:
        return 0.0
    return nbytes / rate if rate else None
