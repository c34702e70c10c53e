"""The tables of a report as plain strings, equal in the terminal, the page and the text report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ebbtide.base.errors import counted
from ebbtide.base.units import format_size

ABSENT = "–"
"""Stands for an unknown value."""

Summary = Mapping[str, Any]
Named = Mapping[str, Summary]
"""Summaries of runs, or of the modes of a comparison, by name; in display order."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of strings.

    Attributes:
        columns: The headers.
        rows: One string per column; the first names the row.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def section(summary: Summary, key: str) -> Mapping[str, Any]:
    """Return a nested part of a summary or comparison; empty if missing or unknown."""
    return cast("Mapping[str, Any]", summary.get(key) or {})


def on_cpu(summary: Summary) -> bool:
    """Whether a run trained on a CPU, or recorded no device."""
    return summary.get("device") in (None, "cpu")


def measured(summary: Summary) -> Mapping[str, Any]:
    """Return the best view of memory: the device's figures; on a CPU the outside view, if there is one."""
    return (section(summary, "outside") if on_cpu(summary) else {}) or section(summary, "inside")


NOISE_BYTES = 4 * 1024**2
"""Differences below this are noise of a process's resident size."""


def saved_percent(summary: Summary, plain: Summary | None) -> float | None:
    """Return the saving of measured activation memory against plain, in percent; None if it is at most a few MiB.

    A forward that ends with less memory than it began with saved 100 %, not more: it reused memory of an earlier phase.
    """
    ours = measured(summary).get("activation_bytes")
    theirs = measured(plain).get("activation_bytes") if plain else None
    if ours is None or theirs is None or theirs < NOISE_BYTES or abs(theirs - ours) < NOISE_BYTES:
        return None
    return 100 * (1 - max(ours, 0) / theirs)


def plain_of(named: Named) -> str | None:
    """Return the name of the baseline: the run of the mode ``plain``; None if there is none."""
    return next((name for name, summary in named.items() if summary.get("mode") == "plain"), None)


def headline(named: Named, *, baseline: str | None = None) -> Table:
    """Make the main table: memory, its price in time, and equality of losses.

    Args:
        named: The runs or modes.
        baseline: The name of the run that others are compared with; default: that of the mode ``plain``.
    """
    against = plain_of(named) if baseline is None else baseline
    plain = None if against is None else named[against]
    rows: list[tuple[str, ...]] = []
    for name, summary in named.items():
        view = measured(summary)
        peak = view.get("peak_bytes")
        rows.append(
            (
                name,
                size(peak if peak is not None else summary.get("peak_device_bytes")),
                size(view.get("activation_bytes")),
                number(None if summary is plain else saved_percent(summary, plain), "{:.1f} %"),
                number(summary.get("step_seconds_median"), "{:.3f} s"),
                ratio(summary, plain),
                number(summary.get("tokens_per_second"), "{:,.0f}"),
                number(summary.get("stall_seconds"), "{:.3f} s"),
                loss_verdict(summary, plain),
            )
        )
    heads = (
        "mode",
        "peak memory",
        "activation memory",
        "saved",
        "step",
        f"step / {baseline or 'plain'}",
        "tokens / s",
        "stall",
        "losses",
    )
    return Table(columns=heads, rows=tuple(rows))


def bytes_table(named: Named) -> Table:
    """Make the table of saved bytes by action, as counted by the engine; a CPU's memory is the host's."""
    peaks = ("host peak",) if all(map(on_cpu, named.values())) else ("device peak", "host peak")
    rows: list[tuple[str, ...]] = []
    for name, summary in named.items():
        counted = section(summary, "activation_bytes")
        cells = [size(counted.get(key)) for key in ("saved", "unique", "kept", "offloaded", "recomputed")]
        cells.append(number(summary.get("memory_saved_percent"), "{:.1f} %"))
        cells += [rate(summary.get("copy_out_bytes_per_second")), rate(summary.get("copy_in_bytes_per_second"))]
        device = None if on_cpu(summary) else summary.get("peak_device_bytes")
        cells += [size(device), size(summary.get("peak_host_bytes"))][-len(peaks) :]
        rows.append((name, *cells))
    heads = ("mode", "saved tensors", "storages", "kept", "offloaded", "recomputed", "memory saved")
    return Table(columns=(*heads, "copy-out", "copy-in", *peaks), rows=tuple(rows))


def phases_table(named: Named) -> Table:
    """Make the table of phases: time and memory of each; times are medians over the steady steps that have it."""
    rows: list[tuple[str, ...]] = []
    for name, summary in named.items():
        for phase, figures in section(summary, "phases").items():
            cells = [number(figures.get("seconds_median"), "{:.3f} s"), size(figures.get("peak_bytes"))]
            rows.append((name, phase, *cells, size(figures.get("rise_bytes"))))
    # A device works behind the host, which marks the phases when it queues their work.
    time = "time per step that has it" if all(map(on_cpu, named.values())) else "host time per step that has it"
    columns = ("mode", "phase", time, "highest memory", "rise within it")
    return Table(columns=columns, rows=tuple(rows))


_MOST_LOSSES = 2000
"""Most steps in the table of losses, about; a hundred thousand would be a page of 12 MB."""


def losses_table(named: Named) -> Table:
    """Make the table of losses per step, with all digits; the last column tells whether they are bitwise equal.

    Of a long training it has evenly spaced steps, the last one, and the first one whose losses differ.
    """
    columns = [losses_by_step(summary) for summary in named.values()]
    rows: list[tuple[str, ...]] = []
    for step in sorted({step for column in columns for step in column}):
        values = [column.get(step) for column in columns]
        known = [value for value in values if value is not None]
        verdict = ABSENT if len(known) < 2 else "equal" if all(v == known[0] for v in known) else "differ"
        rows.append((str(step), *(ABSENT if value is None else str(value) for value in values), verdict))
    every = -(-len(rows) // _MOST_LOSSES) or 1
    differing = next((place for place, row in enumerate(rows) if row[-1] == "differ"), 0)
    shown = [row for place, row in enumerate(rows) if place % every == 0 or place in (differing, len(rows) - 1)]
    head = "step" if every == 1 else f"step (1 of {every} shown)"
    return Table(columns=(head, *named, "bitwise equal"), rows=tuple(shown))


def losses_by_step(summary: Summary) -> dict[int, Any]:
    """Return the losses of a run by step: a resumed one does not begin with step 1, and some leave out numbers."""
    first, losses = summary.get("first_step"), summary.get("loss") or []
    numbers = summary.get("step_numbers") or itertools.count(first if isinstance(first, int) else 1)
    return dict(zip(numbers, losses, strict=False))


def ratio(summary: Summary, plain: Summary | None) -> str:
    """Format the step time relative to plain, with its spread if rounds were compared pairwise."""
    times, pairs = ratio_value(summary, plain), summary.get("step_ratio") or {}
    if times is None:
        return ABSENT
    spread = pairs.get("median") is not None and pairs["low"] != pairs["high"]
    return f"×{times:.2f}" + (f" ({pairs['low']:.2f} to {pairs['high']:.2f})" if spread else "")


def ratio_value(summary: Summary, plain: Summary | None) -> float | None:
    """Return the step time relative to plain; the median of pairs if rounds were compared pairwise."""
    pairs = summary.get("step_ratio")
    if pairs and pairs.get("median") is not None:
        return pairs["median"]
    ours, theirs = summary.get("step_seconds_median"), plain.get("step_seconds_median") if plain else None
    return ours / theirs if ours is not None and theirs else None


def loss_verdict(summary: Summary, plain: Summary | None) -> str:
    """Return in words whether losses are bitwise equal to plain's: those of one model, of the steps that both have."""
    if plain is not None and summary.get("model") != plain.get("model"):
        return ABSENT
    equal, where = summary.get("loss_equal"), ""
    if "loss_equal" not in summary and plain is not None:
        ours, theirs = (
            {step: loss for step, loss in losses_by_step(run).items() if loss is not None} for run in (summary, plain)
        )
        if both := ours.keys() & theirs.keys():
            equal = all(ours[step] == theirs[step] for step in both)
            where = "" if ours.keys() == theirs.keys() else f" in {counted(len(both), 'step')}"
    return ABSENT if equal is None else f"equal{where}" if equal else "differ"


def size(value: float | None) -> str:
    """Format a size, or "unknown"."""
    if value is None:
        return ABSENT
    # Modes may differ by less than 0.1 GiB; smaller units have enough digits. Below zero is noise.
    return format_size(max(value, 0), digits=2 if value >= 1024**3 else 1)


def rate(value: float | None) -> str:
    """Format a rate in bytes per second, or "unknown"."""
    return ABSENT if value is None else f"{format_size(value)}/s"


def number(value: float | None, form: str) -> str:
    """Format a number, or "unknown"."""
    return ABSENT if value is None else form.format(value)
