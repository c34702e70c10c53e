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
        recompute_seconds: Time of recomputing, as the host saw it.
    """

    step: Any
    t: float
    out_bytes: int
    in_bytes: int
    seconds: float | None
    stall_seconds: float
    recompute_seconds: float


def copies(run: Run) -> list[StepCopies]:
    """Return the copies of each step with figures."""
    found: list[StepCopies] = []
    for pairs in _totals(run):
        ways = {"out": 0, "in": 0}
        stall, recompute, times = 0.0, 0.0, list[float | None]()
        for before, event in pairs:
            for way in ways:
                moved = _between(before, event, f"total_copy_{way}_bytes")
                ways[way] += int(moved)
                times.append(_seconds(int(moved), event.get(f"copy_{way}_bytes_per_second")))
            stall += _between(before, event, "total_stall_seconds")
            recompute += _between(before, event, "total_recompute_seconds")
        known = [seconds for seconds in times if seconds is not None]
        last = pairs[-1][1]
        found.append(
            StepCopies(
                step=last.get("step"), t=last["t"], out_bytes=ways["out"], in_bytes=ways["in"], stall_seconds=stall,
                recompute_seconds=recompute, seconds=sum(known) if len(known) == len(times) else None,
            )
        )  # fmt: skip
    return found


def _totals(run: Run) -> list[list[tuple[Event, Event]]]:
    """Return for each step, and in it for each model, the totals before it, at first none, and after it."""
    # A step has an event of each model, in one order.
    found: list[list[tuple[Event, Event]]] = []
    latest: list[Event] = []
    for event in run.all("stats"):
        step = event.get("step")
        if not found or step is None or found[-1][-1][1].get("step") != step:
            found.append([])
        place = len(found[-1])
        found[-1].append((latest[place] if place < len(latest) else {}, event))
        latest[place : place + 1] = [event]
    return found


def _between(before: Event, after: Event, name: str) -> float:
    return max(0, (after.get(name) or 0) - (before.get(name) or 0))


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
