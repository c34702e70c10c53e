"""The picture of memory over one step of several runs, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebbtide.base.runs import Event, PhaseSpan
from ebbtide.report import style
from ebbtide.report.frame import LEFT, RIGHT, WIDTH, Frame, axes, curve, legend, legend_width, peaks, window
from ebbtide.report.run import Run, common_step
from ebbtide.report.table import size as size_text

_STRIP, _STALLS, _STRIP_GAP = 18.0, 5.0, 9.0
_PITCH = _STRIP + _STALLS + _STRIP_GAP


def timeline_svg(runs: Sequence[Run]) -> str:
    """Draw memory over the same step of several runs, aligned at its begin.

    Below the curves each run has a strip with the phases of the step, and a thin one with its stalls, to scale. The
    step is the most typical one that all runs finished.

    Args:
        runs: In display order.

    Returns:
        A stand-alone SVG, readable on light and on dark. It names a missing step or missing samples.
    """
    step = common_step(runs)
    spans = [run.step_span(step) for run in runs]
    windows = [
        (run, span, window(run.curve(), span.begin, span.end))
        for run, span in zip(runs, spans, strict=True)
        if span is not None
    ]
    if not windows or not any(points for _, _, points in windows):
        words = "No finished step with memory samples in these runs."
        return style.svg(WIDTH, 60, [style.text(24, 35, words, "soft")], label=words)
    colors = style.run_classes([run.name for run, _, _ in windows])
    sizes = style.ticks(max(size for _, _, points in windows for _, size in points) * 1.02, base=2)
    frame = Frame(max(span.end - span.begin for _, span, _ in windows), sizes[-1])
    pieces = [*axes(frame, sizes), *_legend(windows, colors, step)]
    pieces += [curve(frame, points, color) for (_, _, points), color in zip(windows, colors, strict=True)]
    pieces += peaks(frame, [points for _, _, points in windows], colors)
    named = [phase.name for run, span, _ in windows for phase in run.phases if phase.step == span.step]
    phases = style.phase_classes(named)
    for row, ((run, span, _), color) in enumerate(zip(windows, colors, strict=True)):
        pieces += _strip(frame, run, span, color, frame.bottom + 34 + row * _PITCH, phases)
    sums = [f"{run.name} {words}" for run, span, _ in windows if (words := _stalled(run, span)) is not None]
    entries = {**phases, f"stalls, to scale: {'; '.join(sums)}": "stall"} if sums else phases
    swatches, y = style.swatches(entries, LEFT, frame.bottom + 34 + len(windows) * _PITCH + 20, WIDTH)
    label = f"Memory over step {step}: " + ", ".join(run.name for run in runs)
    return style.svg(WIDTH, y + 10, [*pieces, *swatches], label=label)


def _legend(
    windows: Sequence[tuple[Run, PhaseSpan, Sequence[tuple[float, int]]]], colors: Sequence[str], step: object
) -> list[str]:
    pieces = [style.text(LEFT, 22, f"Memory over step {step}", "strong")]
    kinds = list(dict.fromkeys(run.memory_kind for run, _, _ in windows))
    pieces.append(style.text(WIDTH - RIGHT, 22, "; ".join(kinds), "soft", "end"))
    peaks = [size_text(max(size for _, size in points)) if points else "" for _, _, points in windows]
    labels = [
        f"{run.name}: {span.end - span.begin:.2f} s" + (f", peak {peak}" if peak else "")
        for (run, span, _), peak in zip(windows, peaks, strict=True)
    ]
    if LEFT + sum(map(legend_width, labels)) > WIDTH - RIGHT:  # many runs: the curves themselves show the seconds
        labels = [f"{run.name}: {peak}" for (run, _, _), peak in zip(windows, peaks, strict=True)]
    return [*pieces, *legend(labels, colors, 44)]


def _strip(frame: Frame, run: Run, step: PhaseSpan, color: str, y: float, phases: Mapping[str, str]) -> list[str]:
    pieces = [style.text(LEFT - 10, y + 13, run.name, "end", color=color)]
    for span in run.phases:
        if span.step != step.step:
            continue
        x, width = frame.x(span.begin - step.begin), frame.x(span.end - step.begin) - frame.x(span.begin - step.begin)
        title = f"{run.name}: {span.name}, {span.end - span.begin:.3f} s"
        pieces.append(style.rect(x, y, width, _STRIP, phases[span.name], title=title, radius=2))
        words = f"{span.name} {span.end - span.begin:.2f} s"
        if width > 7 * len(words):
            pieces.append(style.text(x + 6, y + 13, words, "num"))
    for begin, stall in _stalls(run, step):
        x = frame.x(begin - step.begin)
        title = f"stall in {stall.get('where')}, block {stall.get('block')}: {stall['seconds']:.4f} s"
        width = frame.x(stall["t"] - step.begin) - x
        pieces.append(style.rect(x, y + _STRIP + 1, width, _STALLS, "stall", title=title))
    return pieces


def _stalls(run: Run, step: PhaseSpan) -> list[tuple[float, Event]]:
    """Return the begin and the event of each stall of a step."""
    begun = [(event["t"] - event["seconds"], event) for event in run.all("stall")]
    return [(begin, event) for begin, event in begun if step.begin <= begin and event["t"] <= step.end]


def _stalled(run: Run, step: PhaseSpan) -> str | None:
    """Describe a step's stalls; ``None`` for a run without the engine."""
    if not run.all("pass_end"):
        return None
    seconds = sum(event["seconds"] for _, event in _stalls(run, step))
    return f"{seconds:.3f} s ({100 * seconds / max(step.end - step.begin, 1e-9):.2f} %)"
