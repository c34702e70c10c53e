"""A run read from its folder, and the queries of the reports."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, cast

from ebbtide.base.errors import DataError
from ebbtide.base.runs import (
    BOTH_PHASE,
    EVENTS_FILE,
    SUMMARY_FILE,
    Curve,
    Event,
    PhaseSpan,
    check_schema,
    of_kind,
    outside_events,
    phase_spans,
    read_events,
    samples,
)
from ebbtide.report.table import on_cpu


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest sample of a run, and the phase and block then.

    Attributes:
        bytes_: The sample.
        t: Its time, in seconds of the run's clock.
        phase: Its phase; ``None`` between phases.
        step: That phase's step.
        block: The running block; ``None`` if that is not known, or after the last block's forward.
        dated: It is the allocator's, dated half-way between two edges, so that another block may have been running.
    """

    bytes_: int
    t: float
    phase: str | None
    step: Any
    block: str | None
    dated: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder.

    Attributes:
        folder: Its path.
        name: Its mode, else its folder's name.
        summary: ``summary.json``.
        events: ``run.jsonl``, sorted by time.
        outside: ``outside.jsonl``, sorted by time; empty without one.
    """

    folder: Path
    name: str
    summary: dict[str, Any]
    events: Sequence[Event]
    outside: Sequence[Event]

    def all(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return of_kind(self.events, kind)

    @property
    def error(self) -> str | None:
        """The error that ended the run, if any."""
        ends = self.all("run_end")
        return ends[-1].get("error") if ends else None

    @property
    def memory_kind(self) -> str:
        """Description of ``curve``."""
        if not on_cpu(self.summary):
            return "device memory, allocated"
        return "resident memory, sampled from outside" if self.outside else "resident memory"

    def curve(self, *, dated: bool = True) -> Curve:
        """Return the run's memory over time: seconds of its clock and bytes.

        Args:
            dated: With the allocator's peaks, which are dated half-way between two edges.
        """
        field = "rss_bytes" if on_cpu(self.summary) else "device_bytes"
        events = self.outside if self.outside and field == "rss_bytes" else self.events
        return samples((event for event in events if dated or not _is_dated(event)), field)

    def loads(self) -> list[PhaseSpan]:
        """Return the time range of each load of weights, from its begin to its last event."""
        spans: list[PhaseSpan] = []
        for event in self.all("load"):
            begins = event.get("edge") == "begin" or not spans
            begin = event["t"] if begins else spans.pop().begin
            spans.append(PhaseSpan(name="loading", step=None, begin=begin, end=event["t"]))
        return spans

    @cached_property
    def phases(self) -> list[PhaseSpan]:
        """The finished phases."""
        return phase_spans(self.events)

    def step_span(self, step: Any) -> PhaseSpan | None:
        """Return a step from its first phase's begin to the end of its last; ``None`` without a whole forward."""
        return next((span for span in self._steps if span.step == step), None)

    @cached_property
    def _steps(self) -> list[PhaseSpan]:
        """The steps that have a whole forward, in the order of their first phases."""
        by_step: dict[Any, list[PhaseSpan]] = {}
        for span in sorted(self.phases, key=lambda span: span.begin):
            by_step.setdefault(span.step, []).append(span)
        return [
            PhaseSpan(name="step", step=step, begin=spans[0].begin, end=max(span.end for span in spans))
            for step, spans in by_step.items()
            if any(span.name in ("forward", BOTH_PHASE) for span in spans)
        ]

    def finished_steps(self) -> list[PhaseSpan]:
        """Return the steps that have a whole forward and a whole backward."""
        done = {span.step for span in self.phases if span.name in ("backward", BOTH_PHASE)}
        return [span for span in self._steps if span.step in done]

    def warm_up(self) -> list[Event]:
        """Return the ``step`` events of the warm-up."""
        return self.all("step")[: self.summary.get("warm_up_steps") or 0]

    def counted_steps(self) -> list[PhaseSpan]:
        """Return the finished steps whose time counts: after the warm-up and not trimmed; all if there are none."""
        steps = self.finished_steps()
        left_out = {event.get("step") for event in [*self.warm_up(), *self.all("trim")]}
        return [span for span in steps if span.step not in left_out] or steps

    def blocks(self, step: Any) -> list[Event]:
        """Return the ``block`` events of the last forward of a step by each model, in execution order."""
        span = self.step_span(step)
        within = [e for e in self.all("block") if span is not None and span.begin <= e["t"] <= span.end]
        latest = {(event.get("engine"), event.get("kind"), event.get("index")): event for event in within}
        return sorted(latest.values(), key=lambda event: event["t"])

    def peak(self, *, counted: bool = False) -> Peak | None:
        """Return the highest sample, with its phase and block.

        Args:
            counted: Use only the steps after the warm-up, if there are any.
        """
        curve = self.curve()
        begin, end = self._counted_time() if counted else (float("-inf"), float("inf"))
        curve = [point for point in curve if begin <= point[0] <= end] or curve
        if not curve:
            return None
        t, size = max(curve, key=lambda point: point[1])
        span = next((span for span in self.phases if span.begin <= t <= span.end), None)
        block = self._block_at(t, span) if span is not None else None
        return Peak(
            bytes_=size,
            t=t,
            phase=span.name if span is not None else None,
            step=span.step if span is not None else None,
            block=block,
            dated=any(event["t"] == t and _is_dated(event) for event in self.all("memory")),
        )

    def _counted_time(self) -> tuple[float, float]:
        """Return the end of the warm-up and of the last phase or step."""
        ends, warm_up = [event["t"] for event in self.all("step")], self.warm_up()
        begin = warm_up[-1]["t"] if 0 < len(warm_up) < len(ends) else float("-inf")
        return begin, max([*ends, *(span.end for span in self.phases)], default=float("inf"))

    def _block_at(self, t: float, span: PhaseSpan) -> str | None:
        """Return the running block: forward events mark a block's end, backward events its begin."""
        if span.name == "backward":
            begun = [event for event in self.all("block_backward") if span.begin <= event["t"] <= t]
            return begun[-1].get("name") if begun else None
        return next((event.get("name") for event in self.all("block") if t <= event["t"] <= span.end), None)


def _is_dated(sample: Event) -> bool:
    return sample.get("rss_bytes") is None


def load_run(folder: str | os.PathLike[str], *, summary: dict[str, Any] | None = None) -> Run:
    """Read a run folder.

    Args:
        folder: Holds ``run.jsonl`` and ``summary.json``.
        summary: In place of the second.

    Raises:
        DataError: A file is missing or damaged, or a newer ebbtide wrote it.
    """
    folder = Path(folder)
    events = read_events(folder / EVENTS_FILE)
    summary = _read_summary(folder / SUMMARY_FILE) if summary is None else summary
    return Run(
        folder=folder,
        name=str(summary.get("mode") or os.path.basename(os.path.abspath(folder))),  # "." has no name
        summary=summary,
        events=events,
        outside=outside_events(folder, events),
    )


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary: object = json.loads(path.read_text())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror})",
            expected="the summary of a finished run",
            hint=f"`ebbtide report {path.parent}` makes it from {EVENTS_FILE}",
        ) from error
    except ValueError:
        summary = None
    if not isinstance(summary, dict) or "schema" not in summary:
        raise DataError(
            f"{path} is not a summary",
            expected="a JSON object with 'schema'",
            hint=f"remove it; `ebbtide report {path.parent}` writes it again from {EVENTS_FILE}",
        )
    found = cast("dict[str, Any]", summary)
    check_schema(found, path)
    return found


def common_step(runs: Sequence[Run]) -> Any | None:
    """Return the step for pictures of several runs; ``None`` if no step was finished by all.

    It is the most typical step: over all runs its times are closest to the medians of the counted steps; the last of
    equals.
    """
    if not runs:
        return None
    finished = [{span.step: span.end - span.begin for span in run.finished_steps()} for run in runs]
    shared = [step for step in finished[0] if all(step in times for times in finished)]
    counted = [{span.step for span in run.counted_steps()} for run in runs]
    preferred = [step for step in shared if all(step in steps for steps in counted)] or shared
    middles = [median([times[step] for step in preferred]) if preferred else 0.0 for times in finished]

    def distance(step: Any) -> float:
        return sum(abs(times[step] / middle - 1) for times, middle in zip(finished, middles, strict=True) if middle)

    return min(reversed(preferred), key=lambda step: round(distance(step), 6), default=None)
