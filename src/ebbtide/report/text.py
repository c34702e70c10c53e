"""Reports for the terminal and one for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ebbtide.base.errors import counted
from ebbtide.report import story
from ebbtide.report.blocks import block_bytes
from ebbtide.report.copies import copies, overlap
from ebbtide.report.peak import split, splits_of, splits_table
from ebbtide.report.run import Run, common_step
from ebbtide.report.table import Named, Table, bytes_table, headline, measured, phases_table, section
from ebbtide.report.verdict import prediction, verdict, verdicts


def text(run: Run) -> str:
    """Write a run's report as plain text."""
    summary, named = run.summary, {run.name: run.summary}
    about = [str(summary[key]) for key in ("model", "device") if summary.get(key)]
    steps, timed = summary.get("steps") or 0, summary.get("timed_steps")
    about.append(counted(steps, "step") + (f", {timed} of them timed" if timed not in (None, steps) else ""))
    held = split(run)
    lines = [verdict(run.name, summary, None, held), f"{run.name}: {', '.join(about)}"]
    lines += [ending for ending in (story.ending(run),) if ending]
    lines += ["", *_across(headline(named))]
    forwards = any(span.name == "forward" for span in run.phases)
    if forwards and measured(summary).get("activation_bytes") is None and summary.get("device") == "cpu":
        lines.append("(activation memory is unknown where a forward reuses freed memory of the process)")
    if section(summary, "activation_bytes").get("unique") is not None:
        lines += ["", *_across(bytes_table(named))]
    if held is not None:
        lines += ["", *grid(splits_table({run.name: held}))]
    lines += ["", f"peak      {story.peak_sentence(run).partition(': ')[2]}"]
    lines += [f"loading   {loaded.partition(': ')[2]}" for loaded in story.loads(run)]
    if (rewarded := story.rewards(run)) is not None:
        lines.append(f"rewards   {rewarded.partition(': ')[2]}")
    for name, words in story.plans(run):
        lines.append(f"plan      {name}: {words}")
    lines += [f"outcome   {sentence}" for sentence in story.happened(run)]
    if (predicted := prediction(run)).rows:
        lines += ["", *grid(predicted)]
    phases = phases_table(named)
    if phases.rows:
        own = Table(columns=phases.columns[1:], rows=tuple(row[1:] for row in phases.rows))
        lines += ["", *grid(own)]
    stalls = story.stalls_table(run, most=5)
    if stalls.rows:
        lines += ["", *grid(stalls)]
    lines += [f"warning   {words}" for words in story.messages(run)]
    return "\n".join(lines) + "\n"


def comparison_text(named: Named, runs: Sequence[Run], baseline: str | None = None) -> str:
    """Write the verdicts on several runs, or on the modes of a comparison, and their main table as plain text.

    Args:
        named: The runs or modes.
        runs: The runs whose peaks are described.
        baseline: As ``headline`` takes it.
    """
    lines = [*verdicts(named, splits_of(runs), baseline), *story.failures(named), *story.warnings(runs)]
    return "\n".join([*lines, "", *grid(headline(named, baseline=baseline))]) + "\n"


def as_values(run: Run) -> dict[str, Any]:
    """Return a run's report as JSON values: the summary, and the other contents of the page."""
    step = common_step([run])
    peak = run.peak()
    return {
        "summary": run.summary,
        "error": run.error,
        "peak": dataclasses.asdict(peak) if peak is not None else None,
        "peak_parts": held.parts if (held := split(run)) is not None else None,
        "step": step,
        "phases": [dataclasses.asdict(span) for span in run.phases if span.step == step],
        "blocks": [
            {"index": e.get("index"), "name": e.get("name"), "kind": e.get("kind"), **block_bytes(e)}
            for e in run.blocks(step)
        ],
        "stalls": [{key: e.get(key) for key in ("t", "where", "block", "seconds", "bytes")} for e in run.all("stall")],
        "copies": [dataclasses.asdict(step) for step in copies(run)],
        "overlap": overlap(run),
        "plans": [{"name": name, "text": words} for name, words in story.plans(run)],
        "messages": story.messages(run),
    }


def _across(table: Table) -> list[str]:
    """Format a table of one row as lines of name and value, without the row's name."""
    pairs = list(zip(table.columns, table.rows[0], strict=True))[1:]
    return [f"{head:<20}{value}" for head, value in pairs]


def grid(table: Table) -> list[str]:
    """Format a table as lines with aligned columns."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
