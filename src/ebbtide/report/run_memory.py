"""The whole run: contents of its memory, time of each phase, and its sample images."""

from __future__ import annotations

import base64
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ebbtide.report.run import Run
from ebbtide.report.table import Table, measured, size

_MOST = 6
"""Most sheets of one run, so that the report stays small enough for mail and browsers."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A contact sheet of samples.

    Attributes:
        title: The run and the number of steps done.
        image: A data URI; empty if the file is gone.
        note: A remark for the reader.
    """

    title: str
    image: str
    note: str


def holdings(runs: Sequence[Run]) -> Table:
    """List the bytes of models, gradients, optimizer and activations."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        parts = run.all("parts")
        if not parts:
            continue
        found = parts[-1]
        weights = cast("dict[str, int]", found.get("weights") or {})
        rows += [(run.name, f"weights: {name}", size(count)) for name, count in weights.items()]
        for key, name in (
            ("gradient_bytes", "gradients"),
            ("optimizer_bytes", "optimizer"),
            ("average_bytes", "moving average"),
        ):
            if found.get(key):
                rows.append((run.name, name, size(found[key])))
        rows.append((run.name, "activations, measured", size(measured(run.summary).get("activation_bytes"))))
    return Table(columns=("mode", "part", "bytes"), rows=tuple(rows))


def phases(runs: Sequence[Run]) -> Table:
    """List the phases of the whole run: count, time, and peak memory of each."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        curve, spans = run.curve(), run.phases
        times = [t for t, _ in curve]
        if not any(span.step is None for span in spans):
            continue  # phases of steps are shown by other parts of the report
        for name in dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.begin)):
            own = [span for span in spans if span.name == name]
            places = [slice(bisect_left(times, span.begin), bisect_right(times, span.end)) for span in own]
            within = [held for place in places for _, held in curve[place]]
            seconds = sum(span.end - span.begin for span in own)
            rows.append((run.name, name, str(len(own)), f"{seconds:.2f} s", size(max(within, default=None))))
    return Table(columns=("mode", "phase", "times", "in all", "highest memory"), rows=tuple(rows))


def sheets(run: Run) -> list[Sheet]:
    """Return the contact sheets of a run: the first, the last, and some in between."""
    events = run.all("sample")
    if len(events) > _MOST:
        events = [events[round(place * (len(events) - 1) / (_MOST - 1))] for place in range(_MOST)]
    return [_sheet(run, event) for event in events]


def _sheet(run: Run, event: dict[str, Any]) -> Sheet:
    path = run.folder / str(event.get("sheet"))
    note = "" if event.get("decoded", True) else "Three channels of the latents: without a VAE to decode them."
    if path.is_file():
        image = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    else:
        image, note = "", f"{event.get('sheet')} is not in the run folder any more."
    step = event.get("step")
    title = f"{run.name}: before training" if step == 0 else f"{run.name}: after {step} steps"
    return Sheet(title=title, image=image, note=note)
