"""A run as a Chrome trace, for chrome://tracing and Perfetto.

Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUUO5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from ebbtide.base.runs import Event
from ebbtide.report.copies import copies
from ebbtide.report.run import Run

_STEPS, _PHASES, _BLOCKS, _STALLS = 1, 2, 3, 4
_ROWS = {_STEPS: "steps", _PHASES: "phases", _BLOCKS: "blocks", _STALLS: "stalls"}
_INSTANTS = {"block", "block_backward", "pass_end", "plan", "verdict", "message"}


def chrome_trace(run: Run) -> dict[str, Any]:
    """Return a run as a Chrome trace: steps, phases and stalls are slices, blocks instants, memory and copies counters.

    A step's copies are shown at its end: see [Note: overlap] in ``copies.py``.
    """
    begin = run.events[0]["t"] if run.events else 0.0
    pid = next((event.get("pid") for event in run.all("run_begin")), None) or 1

    def slice_(row: int, name: str, start: float, end: float, **arguments: Any) -> dict[str, Any]:
        micros = {"ts": (start - begin) * 1e6, "dur": (end - start) * 1e6}
        return {"ph": "X", "pid": pid, "tid": row, "name": name, **micros, "args": arguments}

    def counter(name: str, t: float, **values: Any) -> dict[str, Any]:
        return {"ph": "C", "pid": pid, "name": name, "ts": (t - begin) * 1e6, "args": values}

    traced: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": run.name}}]
    traced += [
        {"ph": "M", "pid": pid, "tid": row, "name": "thread_name", "args": {"name": words}}
        for row, words in _ROWS.items()
    ]
    traced += [slice_(_PHASES, span.name, span.begin, span.end, step=span.step) for span in run.phases]
    for event in run.all("step"):
        if event.get("seconds") is not None:
            traced.append(slice_(_STEPS, f"step {event.get('step')}", event["t"] - event["seconds"], event["t"]))
    for event in run.all("stall"):
        name = f"stall in {event.get('where')}"
        traced.append(slice_(_STALLS, name, event["t"] - event["seconds"], event["t"], **_fields(event)))
    traced += [
        counter("copied in the step", step.t, out_bytes=step.out_bytes, in_bytes=step.in_bytes) for step in copies(run)
    ]
    for event in run.events:
        if event["event"] in _INSTANTS:
            micros = (event["t"] - begin) * 1e6
            row = _BLOCKS if event["event"].startswith("block") else _PHASES
            name = str(event.get("name") or event["event"])
            traced.append(
                {"ph": "i", "s": "t", "pid": pid, "tid": row, "name": name, "ts": micros, "args": _fields(event)}
            )
        elif event["event"] == "memory":
            known = {key: event[key] for key in ("rss_bytes", "device_bytes") if event.get(key) is not None}
            traced.append(counter("memory", event["t"], **known))
    traced += [counter("memory from outside", event["t"], rss_bytes=event.get("rss_bytes")) for event in run.outside]
    return {"traceEvents": traced, "displayTimeUnit": "ms"}


def _fields(event: Event) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "t"}
