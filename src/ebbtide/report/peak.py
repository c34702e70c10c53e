"""The contents of the peak: the highest sample of the counted steps, divided into known parts.

[Note: the parts of a peak]
Every part is a recorded figure; the unexplained rest is ``other``, so the parts add up to the peak. Weights and
optimizer state are those of the event ``parts``. Memory at the start of forward is theirs and ``other`` (libraries,
data). Memory added by forward is first the engine's kept bytes, then tensors saved outside of the blocks (logits and
loss: from the blocks' share of the saved bytes), then ``other``; without the engine, all of it is activations. Memory
added by backward before it reached the last block belongs to the loss; later additions are the work of backward:
gradients so far, copies in flight and recomputed tensors, which cannot be told apart. In the optimizer step all
gradients exist, and no activations; from the second micro-batch of a step on, gradients exist before its forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.base.runs import KeptBecause, PhaseSpan, nearest_sample
from ebbtide.report import style
from ebbtide.report.run import Peak, Run
from ebbtide.report.table import Summary, Table, section, size

WEIGHTS, OPTIMIZER, GRADIENTS, AVERAGE = "weights", "optimizer state", "gradients", "moving average"
KEPT, PLAIN, LOGITS = "kept activations", "activations", "logits and loss"
WORK, OTHER = "work of backward", "other"

COLORS = {
    WEIGHTS: "part-weights", OPTIMIZER: "part-optimizer", GRADIENTS: "part-gradients", AVERAGE: "part-average",
    KEPT: "kept", PLAIN: "part-activations", LOGITS: "part-logits", WORK: "part-work", OTHER: "part-other",
}  # fmt: skip
"""In display order."""

LOWERED = {
    LOGITS: "a chunked or fused cross-entropy, or fewer tokens in a forward",
    WEIGHTS: "weights in bfloat16 or 4 bits, or shards (FSDP)",
    OPTIMIZER: "adapters (LoRA), an 8-bit optimizer, or shards (FSDP)",
    GRADIENTS: "adapters (LoRA), or shards (FSDP)",
    PLAIN: "ebbtide.enable_activation_offloading(model)",
    WORK: "a smaller micro-batch",
    AVERAGE: "a moving average in host memory",
}
"""Part → how to lower it; kept activations: see ``less_kept``."""

NO_CHECKPOINTS = (
    "switch the model's own checkpointing off (`model.gradient_checkpointing_disable()`, or the trainer's flag)"
)
"""How to lower kept activations where the model checkpoints its blocks: policies choose nothing inside of these."""

SMALLER_BLOCKS = "smaller blocks (`blocks=[...]`): backward needs all of the one that ran at once"
"""How to lower kept activations where a step runs one block."""

_SMALL = 0.05
"""Share of the peak below which lowering a part is no advice."""


@dataclass(frozen=True, kw_only=True)
class PeakParts:
    """A peak and its parts.

    Attributes:
        peak: The highest sample of the counted steps.
        parts: Bytes by part; they add up to the peak.
        less_kept: How to lower kept activations.
    """

    peak: Peak
    parts: dict[str, int]
    less_kept: str = ""

    @property
    def advice(self) -> str | None:
        """How to lower the largest part for which that is known; ``None`` if there is none, or it is small."""
        lowered = {**LOWERED, **({KEPT: self.less_kept} if self.less_kept else {})}
        known = [name for name in self.parts if name in lowered]
        largest = max(known, key=lambda name: self.parts[name], default=None)
        if largest is None or self.parts[largest] < _SMALL * self.peak.bytes_:
            return None
        return f"{largest}: {lowered[largest]}"

    @property
    def words(self) -> str:
        """The parts in words, the largest first."""
        ordered = sorted(self.parts.items(), key=lambda part: (part[0] == OTHER, -part[1]))
        return ", ".join(f"{name} {size(count)}" for name, count in ordered)


def split(run: Run) -> PeakParts | None:
    """Divide a run's peak into its parts; ``None`` without memory samples. See [Note: the parts of a peak]."""
    peak = run.peak(counted=True)
    if peak is None:
        return None
    left, parts = peak.bytes_, dict[str, int]()

    def take(name: str, count: float, most: float | None = None) -> None:
        nonlocal left
        found = max(0, min(round(count), left, left if most is None else round(most)))
        left -= found
        if found:
            parts[name] = parts.get(name, 0) + found

    held: dict[str, Any] = (run.all("parts") or [{}])[-1]
    forward, curve = _forward_before(run, peak), run.curve(dated=False)
    base = floor = left if forward is None else min(curve[nearest_sample(curve, forward.begin)][1], left)
    for name, count in (
        (WEIGHTS, sum((held.get("weights") or {}).values())),
        (OPTIMIZER, held.get("optimizer_bytes") or 0),
        (AVERAGE, held.get("average_bytes") or 0),
    ):
        take(name, count, most=base)  # memory at the start of forward includes them all
        base -= parts.get(name, 0)
    if forward is not None and _accumulates(run, forward):
        take(GRADIENTS, held.get("gradient_bytes") or 0, most=base)
    if peak.phase == "optimizer":
        take(GRADIENTS, held.get("gradient_bytes") or 0)
    elif forward is not None:
        height = peak.bytes_ if peak.t < forward.end else curve[nearest_sample(curve, forward.end)][1]
        grown = max(height - floor, 0)
        kept, outside = _saved(run, forward)
        if kept is None:
            take(PLAIN, grown)
        else:
            take(KEPT, kept, most=grown)
            take(LOGITS, outside, most=max(grown - kept, 0))
        before_blocks = peak.phase == "backward" and peak.block is None and bool(run.all("block_backward"))
        take(LOGITS if before_blocks else WORK, peak.bytes_ - height)
    if left:
        parts[OTHER] = left
    return PeakParts(peak=peak, parts=parts, less_kept=less_kept(run.summary))


def _forward_before(run: Run, peak: Peak) -> PhaseSpan | None:
    """Return the latest forward of the peak's step, in which several models' before one backward are one."""
    if peak.phase not in ("forward", "backward"):
        return None
    before = [s for s in run.phases if s.step == peak.step and s.begin <= peak.t]
    forwards = [span for span in before if span.name == "forward"]
    if not forwards:
        return None
    last = max(forwards, key=lambda span: span.begin)
    parted = max((s.end for s in before if s.name == "backward" and s.end <= last.begin), default=float("-inf"))
    return dataclasses.replace(last, begin=min(span.begin for span in forwards if span.begin >= parted))


def _accumulates(run: Run, forward: PhaseSpan) -> bool:
    """Whether gradients of an earlier micro-batch are there when a forward begins."""
    spans = [s for s in run.phases if s.step == forward.step and s.end <= forward.begin]
    ended = [s for s in spans if s.name in ("backward", "optimizer")]
    return bool(ended) and max(ended, key=lambda span: span.end).name == "backward"


def _saved(run: Run, forward: PhaseSpan) -> tuple[int | None, float]:
    """Return the bytes that the engine kept of a forward, and the bytes saved outside of its blocks.

    Passes of one model before a backward are all alive; the figures of a step are those of the last one with blocks.
    """
    passes = [e for e in run.all("pass_end") if forward.begin <= e["t"] <= forward.end + 1e-3]
    if not passes:
        return None, 0.0
    last = {e.get("engine"): e["unique_bytes"] for e in passes if e.get("unique_bytes")}
    times = sum(e.get("unique_bytes") or 0 for e in passes) / (sum(last.values()) or 1)
    stats, outside = run.all("stats"), 0.0
    own = [e for e in stats if e.get("step") == forward.step]  # one of each model
    for event in own or [e for e in stats if e.get("step") == stats[-1].get("step")]:
        if share := event.get("coverage_percent"):
            inside = (event.get("unique_bytes") or 0) + (event.get("small_bytes") or 0)
            outside += inside * (100 - share) / share
    return sum(e.get("kept_bytes") or 0 for e in passes), outside * times


def checkpoints_itself(summary: Summary) -> bool:
    """Whether a run's model is known to checkpoint its own blocks."""
    return bool(section(summary, "plan").get("own_checkpoints"))


def less_kept(summary: Summary) -> str:
    """Return how to lower the kept activations of a run."""
    plan = section(summary, "plan")
    if checkpoints_itself(summary):
        return NO_CHECKPOINTS
    if plan.get("kept_because") == KeptBecause.LONE:
        return SMALLER_BLOCKS
    return "a smaller micro-batch" if plan.get("name") == "minimal" else "policy 'minimal' keeps fewer"


def splits_of(runs: Sequence[Run]) -> dict[str, PeakParts]:
    """Return the parts of each run's peak, by its name; a run without memory samples has none."""
    return {run.name: found for run in runs if (found := split(run)) is not None}


def splits_table(splits: Mapping[str, PeakParts]) -> Table:
    """Make the table of parts: one row per part, one column per run."""
    rows = [(name, *(size(found.parts.get(name)) for found in splits.values())) for name in _parts_in(splits)]
    total = ("peak", *(size(found.peak.bytes_) for found in splits.values()))
    return Table(columns=("part", *splits), rows=(*rows, total) if rows else ())


def _parts_in(splits: Mapping[str, PeakParts]) -> list[str]:
    return [name for name in COLORS if any(name in found.parts for found in splits.values())]


_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 960.0, 116.0, 92.0, 34.0, 22.0


def splits_svg(splits: Mapping[str, PeakParts]) -> str | None:
    """Draw a stacked bar for each run's peak, to one scale; ``None`` without any."""
    if not splits:
        return None
    scale = (_WIDTH - _LEFT - _RIGHT) / max(max(found.peak.bytes_ for found in splits.values()), 1)
    pieces: list[str] = []
    for row, (name, found) in enumerate(splits.items()):
        x, y = _LEFT, 10 + row * _ROW
        pieces.append(style.text(_LEFT - 10, y + 15, name, "end"))
        for part in (part for part in COLORS if part in found.parts):
            width = found.parts[part] * scale
            title = f"{name}: {part} {size(found.parts[part])}"
            pieces.append(style.rect(x, y, width, _BAR, COLORS[part], title=title))
            x += width
        pieces.append(style.text(x + 8, y + 15, size(found.peak.bytes_), "num", "strong"))
    colors = {part: COLORS[part] for part in _parts_in(splits)}
    legend, y = style.swatches(colors, _LEFT, 10 + len(splits) * _ROW + 14, _WIDTH)
    return style.svg(_WIDTH, y + 14, [*pieces, *legend], label="What holds the peak: " + ", ".join(splits))
