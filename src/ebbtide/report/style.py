"""Colours and SVG elements shared by all pictures.

Colours are CSS variables with a light and a dark set, so one file is readable in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

_RUNS = ("plain", "checkpointing", "ebbtide")
_SPARE_CLASSES = ("other-a", "other-b", "other-c", "other-d")
_PHASES = ("forward", "backward", "optimizer")
_SPARE_PHASES = ("phase-a", "phase-b", "phase-c", "phase-d")
BEGINNING = '<svg xmlns="http://www.w3.org/2000/svg" class="eb" '
"""Of every picture."""
ACTIONS = ("kept", "offloaded", "recomputed", "checkpointed")

STYLE = """
.eb{--bg:#ffffff;--fg:#1c2430;--soft:#5d6878;--grid:#e4e8ee;--panel:#f6f8fa;
--plain:#7a8594;--checkpointing:#c9780a;--ebbtide:#0b7f8a;
--other-a:#7c4dbd;--other-b:#2f6fd0;--other-c:#a8446b;--other-d:#5b8a1e;
--forward:#9db8dd;--backward:#c9b3df;--optimizer:#c7cfd9;--phase-a:#a9d3b4;--phase-b:#ecd49a;--phase-c:#9fd3d6;--phase-d:#e3b7c4;--stall:#d6303c;
--part-weights:#4a6fa5;--part-optimizer:#7d6bb0;--part-gradients:#4f9d8f;--part-average:#8a8f3c;--part-logits:#d17a2c;--part-work:#c2a23a;--part-activations:#d793ad;--part-other:#a9b2bd;
--kept:#b9527a;--offloaded:#3d7fd6;--recomputed:#6f9f3c;--checkpointed:#d39a2a;--good:#1a7f4b;--bad:#c62f3a}
@media (prefers-color-scheme: dark){
.eb{--bg:#11161d;--fg:#e3e8ef;--soft:#97a3b3;--grid:#27303b;--panel:#181f28;
--plain:#a3adba;--checkpointing:#f0a53c;--ebbtide:#35c3cf;
--other-a:#b48ef0;--other-b:#74a9f5;--other-c:#e58ab0;--other-d:#a3cf66;
--forward:#3c5f92;--backward:#664d86;--optimizer:#4a5563;--phase-a:#3f6b4c;--phase-b:#7a6430;--phase-c:#33696d;--phase-d:#77485a;--stall:#ff6670;
--part-weights:#7f9fd0;--part-optimizer:#a896db;--part-gradients:#6fc4b5;--part-average:#b8bd62;--part-logits:#ef9d55;--part-work:#dcc063;--part-activations:#a35f7b;--part-other:#5b6674;
--kept:#dd7ba2;--offloaded:#6aa5f2;--recomputed:#9ac866;--checkpointed:#ecbd5c;--good:#4fc487;--bad:#ff7078}}
svg.eb text{font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;fill:var(--fg)}
svg.eb .soft{fill:var(--soft)}
svg.eb .num{font-variant-numeric:tabular-nums}
svg.eb .strong{font-weight:600}
svg.eb .end{text-anchor:end}
svg.eb .mid{text-anchor:middle}
svg.eb .grid{stroke:var(--grid);stroke-width:1}
svg.eb .halo{paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
"""


def run_classes(names: Sequence[str]) -> list[str]:
    """Return a colour for each run: modes have their own, others cycle."""
    return _classes(names, _RUNS, _SPARE_CLASSES)


def phase_classes(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name of a phase: three have their own, others cycle."""
    phases = list(dict.fromkeys(names))
    return dict(zip(phases, _classes(phases, _PHASES, _SPARE_PHASES), strict=True))


def _classes(names: Sequence[str], own: Sequence[str], spare: Sequence[str]) -> list[str]:
    others = itertools.cycle(spare)
    return [name if name in own else next(others) for name in names]


def text(x: float, y: float, words: str, *classes: str, color: str | None = None) -> str:
    """Return an SVG text."""
    fill = f' style="fill:var(--{color})"' if color else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{" ".join(classes)}"{fill}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, color: str, *, title: str = "", radius: float = 0) -> str:
    """Return an SVG rectangle, with a tooltip if ``title`` is given."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" rx="{radius:g}" '
        f'style="fill:var(--{color})">{tip}</rect>'
    )


def swatch_width(label: str) -> float:
    """Return the width of an entry of ``swatches``, with the gap to the next."""
    return 34 + 6.4 * len(label)


def swatches(entries: Mapping[str, str], left: float, y: float, right: float) -> tuple[list[str], float]:
    """Return a legend of labels and their colours, in rows up to ``right``, and the y of the last row."""
    pieces: list[str] = []
    x = left
    for label, color in entries.items():
        width = swatch_width(label)
        if x > left and x + width > right:
            x, y = left, y + 20
        pieces += [rect(x, y - 10, 12, 12, color, radius=2), text(x + 18, y, label, "soft")]
        x += width
    return pieces, y


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a grid line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def polyline(points: Sequence[tuple[float, float]], color: str, also: str = "stroke-linejoin:round") -> str:
    """Return a line through points; none if there are no points."""
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f"fill:none;stroke:var(--{color});stroke-width:2;{also}"
    return where and f'<polyline points="{where}" style="{style}"/>'


def svg(width: float, height: float, pieces: Sequence[str], *, label: str) -> str:
    """Return a complete SVG with its own style, for a page or stand-alone."""
    return (
        f'{BEGINNING}viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        f"<style>{STYLE}</style>"
        f'<rect width="{width:g}" height="{height:g}" style="fill:var(--bg)"/>{"".join(pieces)}</svg>'
    )


def ticks(highest: float, *, count: int = 5, base: int = 10) -> list[float]:
    """Return even, round tick values from 0 up to at least ``highest``.

    Args:
        highest: The value to cover.
        count: Approximate number of steps.
        base: 10 for seconds; 2 for bytes, so that ticks are round in KiB, MiB or GiB.
    """
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / count
    if base == 2:
        step = 2.0 ** math.ceil(math.log2(rough))
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * i for i in range(math.ceil(highest / step) + 1)]
