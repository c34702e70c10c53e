"""The picture of memory over one step, runs over each other, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ebbtide.base.units import format_size
from ebbtide.report import style
from ebbtide.report.run import Run, Span, common_step
from ebbtide.report.table import size as size_text

_WIDTH, _LEFT, _RIGHT, _TOP, _PLOT = 960.0, 116.0, 24.0, 62.0, 280.0
_STRIP, _STRIP_GAP = 18.0, 8.0
_PHASES = ("forward", "backward", "optimizer")


class _Frame:
    """Where a time and a size lie in the picture."""

    def __init__(self, seconds: float, size: float) -> None:
        self.seconds, self.size = max(seconds, 1e-9), max(size, 1.0)
        self.bottom = _TOP + _PLOT

    def x(self, t: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * t / self.seconds

    def y(self, size: float) -> float:
        return self.bottom - _PLOT * size / self.size


def timeline_svg(runs: Sequence[Run]) -> str:
    """Draw memory over the same step of several runs, aligned where its forward begins.

    Under the curves each run has a strip with its forward, backward and optimizer, and its stalls. The last step that
    all runs finished is shown.

    Args:
        runs: In the order in which they are to be listed.

    Returns:
        A stand-alone SVG, readable on light and on dark. A step or samples that are missing are said in the picture.
    """
    step = common_step(runs)
    spans = [run.step_span(step) for run in runs]
    windows = [(run, span, _window(run, span)) for run, span in zip(runs, spans, strict=True) if span is not None]
    if not windows or not any(points for _, _, points in windows):
        words = "No finished step with memory samples in these runs."
        return style.svg(_WIDTH, 60, [style.text(24, 35, words, "soft")], label=words)
    colors = style.run_classes([run.name for run, _, _ in windows])
    sizes = style.ticks(max(size for _, _, points in windows for _, size in points) * 1.02, base=2)
    frame = _Frame(max(span.end - span.begin for _, span, _ in windows), sizes[-1])
    height = frame.bottom + 34 + len(windows) * (_STRIP + _STRIP_GAP) + 30
    pieces = [*_axes(frame, sizes, height), *_legend(windows, colors, step)]
    pieces += [_curve(frame, points, color) for (_, _, points), color in zip(windows, colors, strict=True)]
    pieces += _peaks(frame, [points for _, _, points in windows], colors)
    for row, ((run, span, _), color) in enumerate(zip(windows, colors, strict=True)):
        pieces += _strip(frame, run, span, color, frame.bottom + 34 + row * (_STRIP + _STRIP_GAP))
    pieces += _phase_legend(height - 10)
    return style.svg(_WIDTH, height, pieces, label=f"Memory over step {step}: " + ", ".join(run.name for run in runs))


def _window(run: Run, span: Span) -> list[tuple[float, int]]:
    """Return the run's samples in a step, on the step's clock, with the last one before it carried to its begin."""
    curve = run.curve()
    before = [size for t, size in curve if t < span.begin]
    inside = [(t - span.begin, size) for t, size in curve if span.begin <= t <= span.end]
    if before:
        inside.insert(0, (0.0, before[-1]))
    if inside:
        inside.append((span.end - span.begin, inside[-1][1]))
    return inside


def _axes(frame: _Frame, sizes: Sequence[float], height: float) -> list[str]:
    pieces: list[str] = []
    for size in sizes:
        pieces.append(style.line(_LEFT, frame.y(size), _WIDTH - _RIGHT, frame.y(size)))
        pieces.append(style.text(_LEFT - 10, frame.y(size) + 4, format_size(size), "soft", "num", "end"))
    for second in style.ticks(frame.seconds, count=8):
        if second <= frame.seconds * 1.0001:
            x = frame.x(second)
            pieces.append(style.line(x, frame.bottom, x, frame.bottom + 5))
            pieces.append(style.text(x, frame.bottom + 19, f"{second:g} s", "soft", "num", "mid"))
    return pieces


def _legend(
    windows: Sequence[tuple[Run, Span, Sequence[tuple[float, int]]]], colors: Sequence[str], step: object
) -> list[str]:
    pieces = [style.text(_LEFT, 22, f"Memory over step {step}", "strong")]
    kinds = list(dict.fromkeys(run.memory_kind for run, _, _ in windows))
    pieces.append(style.text(_WIDTH - _RIGHT, 22, "; ".join(kinds), "soft", "end"))
    peaks = [size_text(max(size for _, size in points)) if points else "" for _, _, points in windows]
    labels = [
        f"{run.name}: {span.end - span.begin:.2f} s" + (f", peak {peak}" if peak else "")
        for (run, span, _), peak in zip(windows, peaks, strict=True)
    ]
    if _LEFT + sum(map(_legend_width, labels)) > _WIDTH - _RIGHT:  # many runs: the curves themselves show the seconds
        labels = [f"{run.name}: {peak}" for (run, _, _), peak in zip(windows, peaks, strict=True)]
    x = _LEFT
    for label, color in zip(labels, colors, strict=True):
        pieces.append(style.rect(x, 38, 14, 4, color, radius=2))
        pieces.append(style.text(x + 20, 44, label, "num"))
        x += _legend_width(label)
    return pieces


def _legend_width(label: str) -> float:
    return 44 + 6.6 * len(label)


def _curve(frame: _Frame, points: Sequence[tuple[float, int]], color: str) -> str:
    """Draw a step-wise area; samples that fall on one pixel are reduced to their lowest and highest."""
    columns: dict[int, list[int]] = {}
    for t, size in points:
        columns.setdefault(round(frame.x(t)), []).append(size)
    xy: list[str] = []
    for x, sizes in sorted(columns.items()):
        shown = sizes if len(sizes) < 3 else [sizes[0], min(sizes), max(sizes), sizes[-1]]
        xy += [f"{x},{frame.y(size):.1f}" for size in shown]
    if not xy:
        return ""
    first, last = xy[0].split(",")[0], xy[-1].split(",")[0]
    area = f"{first},{frame.bottom:.1f} {' '.join(xy)} {last},{frame.bottom:.1f}"
    return (
        f'<polygon points="{area}" style="fill:var(--{color});opacity:.09"/>'
        f'<polyline points="{" ".join(xy)}" style="fill:none;stroke:var(--{color});stroke-width:2;'
        'stroke-linejoin:round"/>'
    )


def _peaks(frame: _Frame, curves: Sequence[Sequence[tuple[float, int]]], colors: Sequence[str]) -> list[str]:
    """Mark each curve's highest point, and write its size where there is room; the legend has them all."""
    tops = [(max(points, key=lambda p: p[1]), color) for points, color in zip(curves, colors, strict=True) if points]
    pieces: list[str] = []
    taken: list[tuple[float, float]] = []
    for (t, size), color in sorted(tops, key=lambda top: -top[0][1]):
        x, y = frame.x(t), frame.y(size)
        label_x, label_y = min(x + 8, _WIDTH - _RIGHT - 70), y - 8
        pieces.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:var(--{color});stroke:var(--bg);stroke-width:1.5"/>'
        )
        if all(abs(label_y - other_y) > 24 or abs(label_x - other_x) > 90 for other_x, other_y in taken):
            taken.append((label_x, label_y))
            pieces.append(style.text(label_x, label_y, size_text(size), "num", "strong", "halo", color=color))
    return pieces


def _strip(frame: _Frame, run: Run, step: Span, color: str, y: float) -> list[str]:
    pieces = [style.text(_LEFT - 10, y + 13, run.name, "end", color=color)]
    for span in run.phases():
        if span.step != step.step or span.name not in _PHASES:
            continue
        x, width = frame.x(span.begin - step.begin), frame.x(span.end - step.begin) - frame.x(span.begin - step.begin)
        title = f"{run.name}: {span.name}, {span.end - span.begin:.3f} s"
        pieces.append(style.rect(x, y, width, _STRIP, span.name, title=title, radius=2))
        words = f"{span.name} {span.end - span.begin:.2f} s"
        if width > 7 * len(words):
            pieces.append(style.text(x + 6, y + 13, words, "num"))
    for stall in run.all("stall"):
        begin = stall["t"] - stall["seconds"]
        if step.begin <= begin and stall["t"] <= step.end:
            x = frame.x(begin - step.begin)
            title = f"stall in {stall.get('where')}, block {stall.get('block')}: {stall['seconds']:.4f} s"
            width = max(frame.x(stall["t"] - step.begin) - x, 1.5)
            pieces.append(style.rect(x, y - 2, width, _STRIP + 4, "stall", title=title))
    return pieces


def _phase_legend(y: float) -> list[str]:
    pieces: list[str] = []
    x = _LEFT
    for name in (*_PHASES, "stall"):
        pieces.append(style.rect(x, y - 10, 12, 12, name, radius=2))
        pieces.append(f'<g transform="translate({x + 18:.1f} {y:.1f})">{style.text(0, 0, escape(name), "soft")}</g>')
        x += 44 + 6.6 * len(name)
    return pieces
