"""The picture of a plan: slowdown over peak memory of every option, and the bound under them, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ebbtide.base.errors import BudgetError
from ebbtide.base.units import format_size
from ebbtide.planner.bound import lower_bound
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Search
from ebbtide.report import style
from ebbtide.report.frame import LEFT, PLOT, RIGHT, TOP, WIDTH
from ebbtide_recipes.plan.options import Option

BUDGETS = 6
"""Number of budgets for which ``Auto`` plans, evenly from the smallest peak to plain training's."""

SAMPLES = 24
"""Points of the bound's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The cost of one option.

    Attributes:
        name: Its name in the table; ``auto`` for those of the curve.
        peak_bytes: Most device memory.
        step_ratio: Its step time relative to plain.
    """

    name: str
    peak_bytes: int
    step_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """All options, ``Auto`` at several budgets, and the bound.

    Attributes:
        options: The rows of the table that have a plan.
        auto: The fastest plan within each of some budgets, the smallest first.
        bound: Peaks, and the least step that any schedule within them could have.
    """

    options: Sequence[Point]
    auto: Sequence[Point]
    bound: Sequence[Point]


def pareto(profile: Profile, options: Sequence[Option], *, planned: bool = True) -> Pareto:
    """Return the points of the picture.

    Args:
        profile: The step that keeps everything.
        options: The rows of the table.
        planned: Whether ebbtide has anything to plan; if not, the options are all.
    """
    points = [
        Point(name=option.name, peak_bytes=option.peak_bytes, step_ratio=option.step_ratio)
        for option in options
        if option.peak_bytes is not None and option.step_ratio is not None
    ]
    if not planned:
        return Pareto(options=points, auto=(), bound=())
    search, step = Search(profile), profile.step_seconds
    bound = lower_bound(replace(profile, store_bytes=None))  # options may need more than the store has
    least, most = search.smallest.predicted.peak_bytes, search.everything.predicted.peak_bytes
    auto: list[Point] = []
    for part in range(BUDGETS):
        try:
            found = search.fit(least + (most - least) * part // BUDGETS).predicted
        except BudgetError:
            continue
        auto.append(Point(name="auto", peak_bytes=found.peak_bytes, step_ratio=found.step_seconds / step))
    floor = profile.head_base_bytes + bound.must_keep_bytes
    line: list[Point] = []
    for part in range(SAMPLES + 1):
        peak = floor + (most - floor) * part // SAMPLES
        seconds = bound.least(peak - profile.head_base_bytes)[0]
        line.append(Point(name="bound", peak_bytes=peak, step_ratio=1 + seconds / step))
    return Pareto(options=points, auto=auto, bound=[p for p in line if p.step_ratio < float("inf")])


def svg(found: Pareto, title: str) -> str:
    """Draw the picture.

    Args:
        found: The points.
        title: The planned training.

    Returns:
        A stand-alone SVG, readable on light and on dark.
    """
    shown = [*found.options, *found.auto]
    sizes = style.ticks(max(p.peak_bytes for p in shown) * 1.05, base=2)
    percents = style.ticks(max(100 * (p.step_ratio - 1) for p in shown) * 1.1 + 1)
    bottom = TOP + PLOT

    def x(point: Point) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * point.peak_bytes / sizes[-1]

    def y(point: Point) -> float:
        return bottom - PLOT * 100 * (point.step_ratio - 1) / percents[-1]

    pieces = [
        style.text(LEFT, 22, "Slowdown over peak memory", "strong"),
        style.text(WIDTH - RIGHT, 22, title, "soft", "end"),
    ]
    for percent in percents:
        height = bottom - PLOT * percent / percents[-1]
        pieces.append(style.line(LEFT, height, WIDTH - RIGHT, height))
        pieces.append(style.text(LEFT - 10, height + 4, f"+{percent:g} %", "soft", "num", "end"))
    for size in sizes:
        place = LEFT + (WIDTH - LEFT - RIGHT) * size / sizes[-1]
        pieces.append(style.line(place, bottom, place, bottom + 5))
        pieces.append(style.text(place, bottom + 19, format_size(size), "soft", "num", "mid"))
    bound = [(x(p), y(p)) for p in found.bound if y(p) >= TOP]
    pieces += [style.polyline(bound, "soft", "stroke-dasharray:5 4")]
    pieces += [style.polyline([(x(p), y(p)) for p in found.auto], "ebbtide")]
    pieces += [_dot(x(p), y(p), "ebbtide", _label(p)) for p in found.auto]
    colors = style.run_classes([p.name.split("-")[0] for p in found.options])
    for row, (point, color) in enumerate(zip(found.options, colors, strict=True)):
        pieces.append(_dot(x(point), y(point), color, _label(point), radius=6))
        pieces.append(_dot(LEFT + 6, bottom + 46 + 18 * row, color, _label(point), radius=6))
        pieces.append(style.text(LEFT + 20, bottom + 50 + 18 * row, _label(point), "num"))
    below = bottom + 50 + 18 * len(found.options)
    words = "line: ebbtide-auto within a budget; dashed: no schedule of any kind is faster; simulated, not measured"
    pieces.append(style.text(LEFT, below, words, "soft"))
    return style.svg(WIDTH, below + 18, pieces, label=f"Slowdown over peak memory: {title}")


def _label(point: Point) -> str:
    return f"{point.name}: {format_size(point.peak_bytes)}, {100 * (point.step_ratio - 1):+z.1f} %"


def _dot(x: float, y: float, color: str, title: str, *, radius: float = 4) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="fill:var(--{color})">'
        f"<title>{style.escape(title)}</title></circle>"
    )
