"""Time and memory of each phase of a step: arithmetic on events, for phases of any name."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median
from typing import Any

from ebbtide.base.runs import Curve, Event, of_kind, phase_spans
from ebbtide.track.steady import Steady


def phase_figures(events: Sequence[Event], curve: Curve, steady: Steady) -> dict[str, dict[str, Any]]:
    """Return the figures of every phase, in the order in which phases first began.

    They are taken from the steps after the warm-up, see [Note: steady steps], or from the warm-up for a phase that
    occurs only there. A step that did not end, because its forward raised, does not count.

    Args:
        events: Events of the run file.
        curve: Memory samples, sorted by time.
        steady: The counted steps.

    Returns:
        By the phase's name: ``seconds_median`` (of the sums over a step), ``peak_bytes`` (the highest sample in the
        phase) and ``rise_bytes`` (the most by which a sample was above the one at the phase's begin).
    """
    spans = sorted(phase_spans(events), key=lambda span: span.begin)
    ended = {event.get("step") for event in of_kind(events, "step")}
    times = [t for t, _ in curve]
    figures: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(span.name for span in spans):
        every = [span for span in spans if span.name == name]
        own = [span for span in every if span.step in ended] or every
        counted = [span for span in own if steady.counts(span.step)] or own
        timed = [span for span in counted if steady.timed(span.step)] or counted
        seconds: dict[Any, float] = {}
        peaks: list[int] = []
        rises: list[int] = []
        for span in timed:
            seconds[span.step] = seconds.get(span.step, 0.0) + span.end - span.begin
        for span in counted:
            # The sample of an edge is taken just after the edge, so the last one belongs to the phase.
            within = [size for _, size in curve[bisect_left(times, span.begin) : bisect_right(times, span.end) + 1]]
            if within:
                peaks.append(max(within))
                rises.append(max(within) - within[0])
        figures[name] = {
            "seconds_median": median(seconds.values()),
            "peak_bytes": max(peaks, default=None),
            "rise_bytes": max(rises, default=None),
        }
    return figures
