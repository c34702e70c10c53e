"""A run in words and short lists: shared by the text report, the page and the JSON report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ebbtide.base.runs import samples
from ebbtide.report import copies
from ebbtide.report.frame import window
from ebbtide.report.run import Run
from ebbtide.report.table import Named, Table, size


def peak_sentence(run: Run) -> str:
    """Describe the peak, and the phase and block then."""
    peak = run.peak()
    if peak is None:
        return f"{run.name}: no memory samples."
    if peak.phase in (None, "load") and any(load.begin <= peak.t <= load.end for load in run.loads()):
        where = "while weights were loaded"
    elif peak.phase is None:
        where = "outside of any phase (warm-up or between steps)"
    else:
        where = f"in {peak.phase}" + (f" of step {peak.step}" if peak.step else "")
        if peak.block and not peak.dated:
            where += f", at block {peak.block}"
        elif peak.block is None and peak.phase == "forward" and run.blocks(peak.step):
            where += ", after the last block"
        elif peak.block is None and peak.phase == "backward" and run.blocks(peak.step):
            where += ", before the first block (head and loss)"
    return f"{run.name}: {size(peak.bytes_)} {where}."


def plans(run: Run) -> list[tuple[str, str]]:
    """Return the plan's texts in the order of their events: the first plan, then its corrections.

    A text that the next one repeats and extends is skipped, and that of a plan whose verdict came.
    """
    named: list[tuple[str, str]] = []
    for event in run.events:
        name, text = str(event.get("name")), str(event.get("text"))
        if event["event"] == "verdict":  # its first line is the plan's
            named = [plan for plan in named if plan[1].partition("\n")[0] != text.partition("\n")[0]]
        elif event["event"] != "plan":
            continue
        elif named and text.startswith(named[-1][1]):
            named.pop()
        named.append((name, text))
    return named


def happened(run: Run) -> list[str]:
    """Describe the outcome of the plan in sentences."""
    summary = run.summary
    counted: dict[str, Any] = summary.get("activation_bytes") or {}
    sentences: list[str] = []
    if counted.get("unique") is not None:
        parts = [f"{size(counted[key])} {key}" for key in ("kept", "offloaded", "recomputed") if counted.get(key)]
        storages = f"{size(counted['unique'])} of storages saved"
        sentences.append(f"{storages}: {', '.join(parts)}." if parts else f"{storages}.")
    if (percent := summary.get("memory_saved_percent")) is not None:
        less = size(summary["memory_saved_bytes"])
        sentences.append(
            f"{less} of them ({percent:.1f} %) are offloaded or recomputed; tensors outside the blocks stay."
        )
    if summary.get("stall_seconds") is not None:
        steps = run.all("step")[len(run.warm_up()) :]
        seconds = sum(event["seconds"] for event in steps if event.get("seconds"))
        share = 100 * summary["stall_seconds"] / seconds if seconds else None
        sentences.append(
            f"Stalls: {summary['stall_seconds']:.3f} s" + (f", {share:.2f} % of the steps counted." if share else ".")
        )
    if (copied := copies.sentence(run)) is not None:
        sentences.append(copied)
    if passes := [event for event in run.all("pass_end") if event.get("checkpointed")]:
        # An earlier step may be of an engine that was closed.
        begin = max((event["t"] for event in run.all("step") if event["t"] < passes[-1]["t"]), default=-math.inf)
        checkpointed = {event.get("engine"): event["checkpointed"] for event in passes if event["t"] > begin}
        sentences.append(f"{sum(checkpointed.values())} blocks checkpointed.")
    return sentences


def rewards(run: Run) -> str | None:
    """Describe the change of the mean reward, for a run with rewards."""
    found = run.summary.get("reward") or []
    values = [value for value in found if isinstance(value, (int, float)) and math.isfinite(value)]
    if not values:
        return None
    few = min(10, len(values))
    first, last = sum(values[:few]) / few, sum(values[-few:]) / few
    return f"{run.name}: mean reward {first:.3f} over the first {few} steps, {last:.3f} over the last {few}."


def stalls_table(run: Run, *, most: int = 12) -> Table:
    """List the blocks that compute waited for longest, ``most`` of them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in run.all("stall"):
        groups.setdefault((str(event.get("where")), str(event.get("block"))), []).append(event)
    longest = sorted(groups.items(), key=lambda item: -sum(e["seconds"] for e in item[1]))[:most]
    rows = [
        (block, phase, str(len(events)), f"{sum(e['seconds'] for e in events):.4f} s",
         f"{max(e['seconds'] for e in events):.4f} s")
        for (phase, block), events in longest
    ]  # fmt: skip
    return Table(columns=("block", "in", "stalls", "sum", "longest"), rows=tuple(rows))


def ending(run: Run) -> str | None:
    """Describe the end of a failed run."""
    status = run.summary.get("status")
    if status == "ok":
        return None
    words = {
        "killed": "has no recorded end: it was killed, became another program (exec), or is still running",
        "interrupted": "was interrupted",
        "error": f"failed: {run.error}",
    }
    return f"{run.name} {words.get(str(status), f'ended with status {status}')}."


def failures(named: Named) -> list[str]:
    """Describe the failed runs of a comparison's modes."""
    return [f"{name}: {words}" for name, summary in named.items() for words in summary.get("failures") or ()]


def loads(run: Run) -> list[str]:
    """Describe each load of weights."""
    sentences: list[str] = []
    for span in run.loads():
        events = [event for event in run.all("load") if span.begin <= event["t"] <= span.end]
        ended = [event for event in events if event.get("edge") == "end"]
        read = sum(event.get("bytes") or 0 for event in ended)
        found = [
            f"{kind} rose by {size(max(b for _, b in points) - points[0][1])}"
            for kind, field in (("host memory", "rss_bytes"), ("device memory", "device_bytes"))
            if (points := window(samples(run.events, field), span.begin, span.end))
        ]
        sentence = f"{run.name}: by {events[0].get('source')} in {span.end - span.begin:.1f} s"
        sentence += (f", {size(read)} read" if read else "") + ("" if ended else ", not finished")
        sentences.append("; ".join([sentence, *found]) + ".")
    return sentences


def warnings(runs: Sequence[Run]) -> list[str]:
    """Return each warning of some runs once, with the names of the runs that logged it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for text in dict.fromkeys(messages(run)):
            names.setdefault(text, []).append(run.name)
    return [f"warning ({', '.join(logged)}): {text}" for text, logged in names.items()]


def messages(run: Run) -> list[str]:
    """Return the log messages at warning level or above."""
    return [
        str(event.get("text"))
        for event in run.all("message")
        if str(event.get("level")).lower() in ("warning", "error")
    ]
