"""Make ``summary.json`` from a run folder's events; nothing is measured here.

Times, rates and memory are taken from the steps after the warm-up, see [Note: steady steps] in ``steady.py``; with a
single step, from that one, except the views of memory, which are then unknown. Unknown values are ``None``, never 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.base.files import replacing
from ebbtide.base.runs import (
    DETAILS_END,
    EVENTS_FILE,
    SCHEMA,
    SUMMARY_FILE,
    Curve,
    Event,
    check_schema,
    nearest_sample,
    of_kind,
    outside_events,
    phase_spans,
    read_events,
    samples,
)
from ebbtide.track.phases import phase_figures
from ebbtide.track.steady import Steady, steady_steps

_ACTIVATIONS = ("saved", "unique", "kept", "offloaded", "recomputed")
_RATES = ("copy_out_bytes_per_second", "copy_in_bytes_per_second")
_PLAN = ("name", "text", "kept_because", "own_checkpoints")
_NEAR_SECONDS = 0.02
"""Time from an edge of a forward within which a sample from outside is taken for that of the edge, if there is one."""
_GENERATION = "generation"
"""The phase that begins a rollout."""


def summarise(folder: str | os.PathLike[str], *, warm_up: int | None = None) -> dict[str, Any]:
    """Summarise a run folder.

    Args:
        folder: Holds ``run.jsonl``, and ``outside.jsonl`` if another process sampled this one's memory.
        warm_up: As ``steady_steps`` takes it.

    Returns:
        ``summary.json`` of schema 1 as values. A run without ``run_end`` has the status ``"killed"``.

    Raises:
        DataError: There is no run file, it is damaged before its last line, or a newer ebbtide wrote it.
    """
    folder = Path(folder)
    events = read_events(folder / EVENTS_FILE)
    begin = _last(events, "run_begin") or {}
    check_schema(begin, folder / EVENTS_FILE)
    end, plan = _last(events, "run_end"), _last(events, "plan", "verdict")
    steady = steady_steps(events, warm_up)
    activations = _activations(events, steady)
    on_cpu = begin.get("device") == "cpu"
    least = _least(events, steady) if on_cpu else -math.inf
    own = samples(events, "rss_bytes" if on_cpu else "device_bytes")
    inside, outside = _view(events, steady, own, least), None
    sampled = samples(outside_events(folder, events), "rss_bytes")
    if sampled:
        outside = _view(events, steady, sampled, least, outside=True)
        if steady.trimmed and inside["activation_bytes"] is not None:  # it may sample in the middle of trimming
            outside |= {key: inside[key] for key in ("floor_bytes", "activation_bytes")}
    host, device = _peak(events, "rss_bytes", begin, end), _peak(events, "device_bytes", begin, end)
    return {
        "schema": SCHEMA,
        **{key: begin.get(key) for key in ("ebbtide", "torch", "device", "world_size", "model", "mode")},
        **_pace(events, steady),
        "peak_device_bytes": host if on_cpu else device,
        "peak_host_bytes": host,
        **activations,
        **_copies(events, steady),
        "plan": {key: plan.get(key) for key in _PLAN} if plan else None,
        "inside": inside,
        "phases": phase_figures(events, sampled if on_cpu and sampled else own, steady),
        "status": end["status"] if end else "killed",
        "outside": outside,
    }


def write_summary(folder: str | os.PathLike[str], *, warm_up: int | None = None) -> dict[str, Any]:
    """Summarise a run folder and write its ``summary.json`` atomically.

    Args:
        folder: As ``summarise`` takes it.
        warm_up: As ``steady_steps`` takes it.

    Raises:
        DataError: As ``summarise``.
    """
    summary = summarise(folder, warm_up=warm_up)
    with replacing(Path(folder) / SUMMARY_FILE) as draft:
        draft.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    return summary


def record_failure(folder: Path, error: str) -> None:
    """Write into a record that its process failed after a run without an error, as by ``sys.exit(3)``."""
    with contextlib.suppress(Exception):  # a record, even a damaged one, must not change the end of a command
        end = read_events(folder / EVENTS_FILE)[-1]
        if end["event"] == "run_end" and end["status"] == "ok":
            with (folder / EVENTS_FILE).open("a") as file:
                file.write(json.dumps({**end, "status": "error", "error": error}) + "\n")
            write_summary(folder)


def _last(events: Sequence[Event], *kinds: str) -> Event | None:
    return next((event for event in reversed(events) if event["event"] in kinds), None)


def _pace(events: Sequence[Event], steady: Steady) -> dict[str, Any]:
    steps = _steps(events)
    counted = [step for step in steps if steady.counts(step.get("step"))] or steps
    timed = [step for step in counted if steady.timed(step.get("step"))] or counted
    seconds = [step["seconds"] for step in timed if step.get("seconds") is not None]
    rewards = [step.get("reward") for step in steps]
    numbers = [number for step in steps if isinstance(number := step.get("step"), int)]
    has_gaps = bool(numbers) and len(numbers) == len(steps) <= numbers[-1] - numbers[0]
    return {
        "steps": len(steps),
        "warm_up_steps": len(steady.warm_up) if len(steps) > 1 else 0,
        "timed_steps": len(timed),
        "step_seconds_median": median(seconds) if seconds else None,
        "step_seconds": seconds,
        "lockstep": len(steps) > 1 and len(of_kind(events, "wait")) == len(steps),
        "tokens_per_second": _tokens_per_second(events, timed),
        "first_step": steps[0].get("step") if steps else None,
        "step_numbers": numbers if has_gaps else None,
        "loss": [step["loss"] for step in steps],
        "reward": rewards if any(reward is not None for reward in rewards) else None,
    }


def _tokens_per_second(events: Sequence[Event], timed: Sequence[Event]) -> float | None:
    """Return the median rate of the steps; where not every step generates, the rate over all whole rollouts."""
    phases = [event for event in of_kind(events, "phase") if event.get("name") == _GENERATION]
    generating = {event.get("step") for event in phases if event.get("edge") == "begin"}
    begins = [index for index, step in enumerate(timed) if step.get("step") in generating]
    shared = bool(generating) and len(begins) < len(timed)
    if shared:  # a median would leave out the first step of a rollout, which generates it
        timed = timed[begins[0] : begins[-1]] if begins else []
    known = [(s["tokens"], s["seconds"]) for s in timed if s.get("tokens") is not None and s.get("seconds")]
    if not known or len(known) < len(timed):
        return None
    if shared:
        return sum(tokens for tokens, _ in known) / sum(seconds for _, seconds in known)
    return median(tokens / seconds for tokens, seconds in known)


def _steps(events: Sequence[Event]) -> list[Event]:
    """Return the steps; a loss or tokens that a step lacks are those that were logged after it."""
    steps = of_kind(events, "step")
    ends = [step["t"] for step in steps]  # numbers do not decide: a resumed trainer has others
    logged: dict[int, dict[str, Any]] = {}
    for event in of_kind(events, "log"):
        at = bisect_right(ends, event["t"]) - 1
        logged[at] = {**(event.get("logs") or {}), **logged.get(at, {})}
    for at, step in enumerate(steps):
        lacking = [name for name in ("loss", "tokens") if step.get(name) is None]
        steps[at] = {**step, **{name: logged.get(at, {}).get(name) for name in lacking}}
    return steps


def _peak(events: Sequence[Event], field: str, begin: Event, end: Event | None) -> int | None:
    """Return the highest sample, or the system's own peak if that rose during the run."""
    sampled = [size for _, size in samples(events, field)]
    kept = "peak_" + field
    before, after = begin.get(kept), end.get(kept) if end else None
    if before is not None and after is not None and after > before:
        sampled.append(after)
    return max(sampled, default=None)


def _activations(events: Sequence[Event], steady: Steady) -> dict[str, Any]:
    """Return the bytes of the largest pass, over all models; all five from the same pass, to be consistent."""
    passes = _passes(events)
    counted = _counted(passes, steady)
    # max() keeps the first of equals; the last pass ran under the final plan.
    largest: Event = max(reversed(counted), key=lambda p: p["unique"] or 0, default={})
    bytes_ = {name: largest.get(name) for name in _ACTIVATIONS}
    baseline, kept = bytes_["unique"], bytes_["kept"]
    if largest.get("checkpointed"):
        # Saved bytes of checkpointed blocks are unknown; only a pass without such blocks shows them.
        others = [p for p in passes if not p["checkpointed"] and p["models"] == largest["models"]]
        baseline = max((p["unique"] for p in others if p["unique"] is not None), default=None)
    saved = baseline - kept if baseline is not None and kept is not None else None
    return {
        "activation_bytes": bytes_,
        "baseline_activation_bytes": baseline,
        "memory_saved_bytes": saved,
        "memory_saved_percent": 100 * saved / baseline if saved is not None and baseline else None,
    }


def _counted(passes: list[Event], steady: Steady) -> list[Event]:
    return [p for p in passes if p["t"] > steady.begins] or passes


def _least(events: Sequence[Event], steady: Steady) -> float:
    """Return the least growth of a forward on a CPU: a heap that reuses freed memory grows by less than it holds."""
    kept = [p["kept"] for p in _counted(_passes(events), steady) if p["kept"] is not None]
    return max(median(kept), 1) if kept else 1


def _passes(events: Sequence[Event]) -> list[Event]:
    """Return the passes, those of several models before one backward as one: the largest of each, added up."""
    groups: list[dict[Any, Event]] = []
    together = False
    for event in events:
        kind = event["event"]
        if kind == "pass_end":
            if not together:
                groups.append({})
            together, largest = True, groups[-1].get(event.get("engine"))
            if largest is None or (event.get("unique_bytes") or 0) >= (largest.get("unique_bytes") or 0):
                groups[-1][event.get("engine")] = event
        elif kind in ("block_backward", "step") or (kind == "phase" and event.get("name") in ("backward", "optimizer")):
            together = False
    found: list[Event] = []
    for group in groups:
        sizes: dict[str, list[Any]] = {
            name: [one.get(f"{name}_bytes") for one in group.values()] for name in _ACTIVATIONS
        }
        found.append(
            {
                "t": max(one["t"] for one in group.values()),
                "models": set(group),
                "checkpointed": any(one.get("checkpointed") for one in group.values()),
                **{name: None if None in each else sum(each) for name, each in sizes.items()},
            }
        )
    return found


def _copies(events: Sequence[Event], steady: Steady) -> dict[str, Any]:
    engine_ran = any(event["event"] == "pass_end" for event in events)
    complete = not any(event.get("code") == DETAILS_END for event in of_kind(events, "message"))
    stats = of_kind(events, "stats")[::-1]
    counts = any(step["t"] > steady.begins for step in of_kind(events, "step"))
    stalls = [e for e in of_kind(events, "stall") if e["t"] > steady.begins or not counts]
    return {
        "stall_seconds": sum(e["seconds"] for e in stalls) if engine_ran and complete else None,
        # Each model has events of its own; one may copy nothing.
        **{name: next(filter(None, (event.get(name) for event in stats)), None) for name in _RATES},
    }


def _view(
    events: Sequence[Event], steady: Steady, curve: Curve, least: float, *, outside: bool = False
) -> dict[str, Any]:
    """Measure the forwards of the steady steps on a curve of memory over time.

    [Note: the same two instants]
    The floor is memory at the start of a forward; activation memory is memory between loss and backward, less the
    floor. Both instants exist in every mode, with the engine or without it, so modes can be compared. Below ``least``
    it is unknown, unless the heap was trimmed.
    """
    counted = [span for span in phase_spans(events) if span.name == "forward" and steady.counts(span.step)]
    floors: list[int] = []
    activations: list[int] = []
    trimmed = [span for span in counted if span.step in steady.trimmed]
    found: list[tuple[float, int, int]] = []
    for span in trimmed or counted:
        # The run's own samples are taken just after each edge. The last one before a forward contains nothing of it.
        low, high = (bisect_left(curve, (t, 0)) for t in (span.begin, span.end))
        if outside and curve:
            low, high = low - 1, nearest_sample(curve, span.end)
        if low >= 0 and high < len(curve):
            away = max(abs(curve[low][0] - span.begin), abs(curve[high][0] - span.end))
            found.append((away, curve[low][1], curve[high][1]))
    # Samples from outside become rarer the longer a run is.
    for _, floor, height in [each for each in found if each[0] <= _NEAR_SECONDS or not outside] or found:
        floors.append(floor)
        activations.append(height - floor)
    growth = median(activations) if activations else None
    last = max((e["t"] for e in events if e["event"] in ("phase", "step")), default=0.0)
    first = counted[0].begin if counted else steady.begins if math.isfinite(steady.begins) else math.inf
    during = [size for t, size in curve if first <= t <= last]
    return {
        "peak_bytes": max(during, default=None),
        "floor_bytes": median(floors) if floors else None,
        "activation_bytes": growth if growth is not None and (trimmed or growth >= least) else None,
        "samples": len(curve),
    }
