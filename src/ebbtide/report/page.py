"""``report.html``: one file, offline, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ebbtide.base.errors import counted
from ebbtide.base.extras import require
from ebbtide.report import run_memory, story, style
from ebbtide.report.blocks import blocks_svg
from ebbtide.report.loading import loading_svg
from ebbtide.report.losses import losses_svg
from ebbtide.report.peak import splits_of, splits_svg, splits_table
from ebbtide.report.run import Run, common_step
from ebbtide.report.table import (
    bytes_table,
    headline,
    losses_table,
    measured,
    on_cpu,
    phases_table,
    section,
)
from ebbtide.report.timeline import timeline_svg
from ebbtide.report.verdict import prediction, verdicts

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def page(runs: Sequence[Run], *, comparison: Mapping[str, Any] | None = None, baseline: str | None = None) -> str:
    """Return the text of ``report.html``.

    Args:
        runs: The runs; the pictures show the most typical step that all of them finished.
        comparison: ``summary.json`` of a comparison: the head table and the loss verdicts then use its merged rounds.
        baseline: As ``headline`` takes it.

    Raises:
        EbbtideError: Jinja2 is not installed.
    """
    jinja2 = require("jinja2", extra="track", use="report.html")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(_view(runs, comparison, baseline))


def _view(runs: Sequence[Run], comparison: Mapping[str, Any] | None, baseline: str | None) -> dict[str, Any]:
    """Gather everything the page shows; the template has no logic."""
    step = common_step(runs)
    own = {run.name: run.summary for run in runs}
    named = {str(mode.get("mode")): mode for mode in comparison["modes"]} if comparison else own
    pictures = [picture for run in runs if (picture := blocks_svg(run, step)) is not None]
    engine = [run for run in runs if section(run.summary, "activation_bytes").get("unique") is not None]
    lead = [*named.values()][-1] if named else {}
    splits = splits_of(runs)
    return {
        "style": style.STYLE,
        "title": " · ".join(str(value) for value in ("ebbtide", lead.get("model")) if value),
        "about": _about(runs),
        "endings": [words for run in runs if (words := story.ending(run))] + story.failures(named),
        "verdicts": verdicts(named, splits, baseline),
        "headline": headline(named, baseline=baseline),
        "colors": dict(zip(own, style.run_classes([*own]), strict=True)),
        "rounds": _rounds(comparison),
        "memory_words": _memory_words(lead),
        "timeline": timeline_svg(runs),
        "loads": [words for run in runs for words in story.loads(run)],
        "loading": loading_svg(runs),
        "phases": phases_table(named),
        "rewards": [words for run in runs if (words := story.rewards(run))],
        "split": splits_svg(splits),
        "parts": splits_table(splits),
        "peaks": [story.peak_sentence(run) for run in runs],
        "holdings": run_memory.holdings(runs),
        "whole": run_memory.phases(runs),
        "sheets": [sheet for run in runs for sheet in run_memory.sheets(run)],
        "blocks": pictures,
        "bytes": bytes_table({run.name: run.summary for run in engine}),
        "plans": [(run.name, story.plans(run), story.happened(run), prediction(run)) for run in engine],
        "stalls": [(run.name, story.stalls_table(run)) for run in engine],
        "curve": losses_svg(own),
        "losses": losses_table(own),
        "messages": [(run.name, words) for run in runs for words in story.messages(run)],
        "environment": _flat(section(comparison, "environment")) if comparison else [],
    }


def _about(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the settings that the runs have in common, and the start of the first."""
    facts: list[tuple[str, str]] = []
    for key in ("model", "device", "world_size", "torch", "ebbtide"):
        values = list(dict.fromkeys(str(run.summary[key]) for run in runs if run.summary.get(key) is not None))
        if values:
            facts.append((key.replace("_", " "), ", ".join(values)))
    begun = [event["unix_time"] for run in runs for event in run.all("run_begin") if event.get("unix_time")]
    if begun:
        facts.append(("began", datetime.fromtimestamp(min(begun), UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return facts


def _rounds(comparison: Mapping[str, Any] | None) -> str:
    if comparison is None:
        return ""
    rounds = max((mode.get("rounds") or 0 for mode in comparison["modes"]), default=0)  # fewer than planned if stopped
    spread = section(comparison, "environment").get("spread", "not said")
    return (
        f"Medians over {counted(rounds, 'round')} of fresh processes; step times are compared pair by pair, "
        f"and the spread is: {spread}. The pictures show the last complete round."
    )


def _memory_words(summary: Mapping[str, Any]) -> str:
    if measured(summary).get("activation_bytes") is None:
        return ""
    seen = "measured by another process" if summary.get("outside") else "sampled by the run itself"
    kind = f"resident memory, {seen}" if on_cpu(summary) else "allocated device memory, sampled by the run itself"
    return (
        f"Memory is {kind}. Activation memory is the growth during forward and loss, before backward begins: "
        "in the step with a trimmed heap, or the median over the counted steps."
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            facts += _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            words = " ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)
            facts.append((f"{prefix}{key}", words))
    return facts
