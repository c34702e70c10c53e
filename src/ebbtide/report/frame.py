"""Axes, curves and peak marks of pictures of memory over time."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.base.units import format_size
from ebbtide.report import style
from ebbtide.report.table import size as size_text

WIDTH, LEFT, RIGHT, TOP, PLOT = 960.0, 116.0, 24.0, 62.0, 280.0
_LEGEND_ROW = 15.0


class Frame:
    """The scale of a picture: times and sizes to positions.

    Args:
        seconds: The last time in the picture.
        size: The largest size in the picture.
        top: The upper edge of the frame.
    """

    def __init__(self, seconds: float, size: float, *, top: float = TOP) -> None:
        self.seconds, self.size = max(seconds, 1e-9), max(size, 1.0)
        self.bottom = top + PLOT

    def x(self, t: float) -> float:
        """Return the position of a time."""
        return LEFT + (WIDTH - LEFT - RIGHT) * t / self.seconds

    def y(self, size: float) -> float:
        """Return the position of a size."""
        return self.bottom - PLOT * size / self.size


def window(points: Sequence[tuple[float, int]], begin: float, end: float) -> list[tuple[float, int]]:
    """Return the samples in a time range, relative to its begin; the last earlier sample gives the first value."""
    before = [size for t, size in points if t < begin]
    inside = [(t - begin, size) for t, size in points if begin <= t <= end]
    if before:
        inside.insert(0, (0.0, before[-1]))
    if inside:
        inside.append((end - begin, inside[-1][1]))
    return inside


def axes(frame: Frame, sizes: Sequence[float]) -> list[str]:
    """Draw a grid line for every size, and the seconds below."""
    pieces: list[str] = []
    for size in sizes:
        pieces.append(style.line(LEFT, frame.y(size), WIDTH - RIGHT, frame.y(size)))
        pieces.append(style.text(LEFT - 10, frame.y(size) + 4, format_size(size), "soft", "num", "end"))
    for second in style.ticks(frame.seconds, count=8):
        if second <= frame.seconds * 1.0001:
            x = frame.x(second)
            pieces.append(style.line(x, frame.bottom, x, frame.bottom + 5))
            pieces.append(style.text(x, frame.bottom + 19, f"{second:g} s", "soft", "num", "mid"))
    return pieces


def legend(labels: Sequence[str], colors: Sequence[str], y: float, *, left: float = LEFT) -> list[str]:
    """Draw the legend in rows around ``y``, mostly one."""
    places: list[tuple[float, float]] = []
    x, below = left, 0.0
    for label in labels:
        if x > left and x + legend_width(label) > WIDTH:
            x, below = left, below + _LEGEND_ROW
        places.append((x, below))
        x += legend_width(label)
    pieces: list[str] = []
    for label, color, (x, row) in zip(labels, colors, places, strict=True):
        at = y + row - below / 2
        pieces.append(style.rect(x, at - 6, 14, 4, color, radius=2))
        pieces.append(style.text(x + 20, at, label, "num"))
    return pieces


def legend_width(label: str) -> float:
    """Return the width of a label in the legend."""
    return 44 + 6.6 * len(label)


def curve(frame: Frame, points: Sequence[tuple[float, int]], color: str) -> str:
    """Draw a stepped area; samples on the same pixel are reduced to their lowest and highest."""
    columns: dict[int, list[int]] = {}
    for t, size in points:
        columns.setdefault(round(frame.x(t)), []).append(size)
    line: list[tuple[float, float]] = []
    for x, sizes in sorted(columns.items()):
        shown = sizes if len(sizes) < 3 else [sizes[0], min(sizes), max(sizes), sizes[-1]]
        line += [(x, frame.y(size)) for size in shown]
    if not line:
        return ""
    area = [(line[0][0], frame.bottom), *line, (line[-1][0], frame.bottom)]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in area)
    return f'<polygon points="{corners}" style="fill:var(--{color});opacity:.09"/>{style.polyline(line, color)}'


def peaks(frame: Frame, curves: Sequence[Sequence[tuple[float, int]]], colors: Sequence[str]) -> list[str]:
    """Mark each curve's highest point, with its size if there is room; the legend has all sizes."""
    tops = [(max(points, key=lambda p: p[1]), color) for points, color in zip(curves, colors, strict=True) if points]
    pieces: list[str] = []
    taken: list[tuple[float, float]] = []
    for (t, size), color in sorted(tops, key=lambda top: -top[0][1]):
        x, y = frame.x(t), frame.y(size)
        label_x, label_y = min(x + 8, WIDTH - RIGHT - 70), y - 8
        pieces.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:var(--{color});stroke:var(--bg);stroke-width:1.5"/>'
        )
        if all(abs(label_y - other_y) > 24 or abs(label_x - other_x) > 90 for other_x, other_y in taken):
            taken.append((label_x, label_y))
            pieces.append(style.text(label_x, label_y, size_text(size), "num", "strong", "halo", color=color))
    return pieces
