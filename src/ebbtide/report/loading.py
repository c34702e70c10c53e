"""The picture of memory while weights are loaded, with several runs in one, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.base.runs import PhaseSpan, samples
from ebbtide.report import style
from ebbtide.report.frame import LEFT, PLOT, RIGHT, WIDTH, Frame, axes, curve, legend, peaks, window
from ebbtide.report.run import Run
from ebbtide.report.table import size as size_text

_FIELDS = {"rss_bytes": "host memory, resident", "device_bytes": "device memory, allocated"}
_ROW = 18.0


def loading_svg(runs: Sequence[Run]) -> str:
    """Draw host memory, and device memory if there is any, while runs load their weights.

    Runs are aligned at the begin of loading; of several loads of a run, the longest is drawn.

    Args:
        runs: In display order; those without a load are skipped.

    Returns:
        A stand-alone SVG, readable on light and on dark.
    """
    loads = [(run, max(spans, key=lambda s: s.end - s.begin)) for run in runs if (spans := run.loads())]
    found = {
        field: [window(samples(run.events, field), span.begin, span.end) for run, span in loads]
        for field in _FIELDS
        if any(samples(run.events, field) for run, _ in loads)
    }
    if not loads or not found:
        words = "No load with memory samples in these runs."
        return style.svg(WIDTH, 60, [style.text(24, 35, words, "soft")], label=words)
    colors = style.run_classes([run.name for run, _ in loads])
    pieces: list[str] = []
    head = 44 + _ROW * len(loads)
    for number, (field, curves) in enumerate(found.items()):
        pieces += _panel(number * (head + PLOT + 40) + head, _FIELDS[field], loads, curves, colors)
    height = len(found) * (head + PLOT + 40)
    return style.svg(WIDTH, height, pieces, label="Memory while loading: " + ", ".join(run.name for run, _ in loads))


def _panel(
    top: float,
    kind: str,
    loads: Sequence[tuple[Run, PhaseSpan]],
    curves: Sequence[Sequence[tuple[float, int]]],
    colors: Sequence[str],
) -> list[str]:
    """Draw the curves of one kind of memory."""
    sizes = style.ticks(max((size for points in curves for _, size in points), default=0) * 1.02, base=2)
    frame = Frame(max(span.end - span.begin for _, span in loads), sizes[-1], top=top)
    labels = [
        f"{run.name}: {span.end - span.begin:.1f} s"
        + (f", +{size_text(max(size for _, size in points) - points[0][1])}" if points else "")
        for (run, span), points in zip(loads, curves, strict=True)
    ]
    y = top - _ROW * len(loads)
    heading = style.text(LEFT, y - 22, "Memory while weights are loaded", "strong")
    pieces = [heading, style.text(WIDTH - RIGHT, y - 22, kind, "soft", "end"), *axes(frame, sizes)]
    for row, (label, color) in enumerate(zip(labels, colors, strict=True)):  # a row each: names are long
        pieces += legend([label], [color], y + _ROW * row)
    pieces += [curve(frame, points, color) for points, color in zip(curves, colors, strict=True)]
    return [*pieces, *peaks(frame, curves, colors)]
