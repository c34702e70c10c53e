"""The picture of the losses of several runs, as SVG."""

from __future__ import annotations

import math

from ebbtide.report import style
from ebbtide.report.frame import legend
from ebbtide.report.table import Named, Summary, losses_by_step

_WIDTH, _LEFT, _RIGHT, _TOP, _PLOT = 960.0, 116.0, 24.0, 44.0, 180.0
_MOST = 800
"""Most points of a curve; of more, evenly spaced ones are drawn."""


def losses_svg(named: Named) -> str | None:
    """Draw a curve of losses for each run; ``None`` if fewer than two steps of all have a finite loss."""
    curves = [_points(summary) for summary in named.values()]
    values = [loss for points in curves for _, loss in points]
    steps = [step for points in curves for step, _ in points]
    first, last = min(steps, default=0), max(steps, default=0)
    if len(values) < 2 or last == first:
        return None
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(step: int, loss: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / (last - first)
        return x, _TOP + _PLOT * (high - loss) / (high - low)

    pieces = [style.text(_LEFT, 22, "Loss of each step", "strong")]
    for loss in (low + (high - low) * share for share in (0.05, 0.35, 0.65, 0.95)):
        y = place(first, loss)[1]
        pieces.append(style.line(_LEFT, y, _WIDTH - _RIGHT, y))
        pieces.append(style.text(_LEFT - 10, y + 4, f"{loss:.4g}", "soft", "num", "end"))
    for step in sorted({round(first + (last - first) * share / 4) for share in range(5)}):
        pieces.append(style.text(place(step, low)[0], _TOP + _PLOT + 19, f"{step}", "soft", "num", "mid"))
    colors = style.run_classes([*named])
    for points, color in zip(curves, colors, strict=True):
        pieces.append(style.polyline([place(*point) for point in points], color))
    pieces += legend([*named], colors, 22, left=_LEFT + 150)
    return style.svg(_WIDTH, _TOP + _PLOT + 28, pieces, label="Losses: " + ", ".join(named))


def _points(summary: Summary) -> list[tuple[int, float]]:
    """Return the number and the loss of the steps whose loss is a finite number."""
    found = [
        (step, float(loss))
        for step, loss in losses_by_step(summary).items()
        if isinstance(loss, (int, float)) and math.isfinite(loss)
    ]
    every = -(-len(found) // _MOST) or 1
    return [*found[::every], *(found[-1:] if (len(found) - 1) % every else [])]
