"""The verdict on each run in one line, and the plan's prediction next to measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, median

from ebbtide.base.errors import counted
from ebbtide.base.runs import KeptBecause
from ebbtide.report.copies import copies
from ebbtide.report.peak import NO_CHECKPOINTS, PeakParts, checkpoints_itself, less_kept
from ebbtide.report.run import Run
from ebbtide.report.table import (
    ABSENT,
    NOISE_BYTES,
    Named,
    Summary,
    Table,
    loss_verdict,
    measured,
    number,
    plain_of,
    ratio_value,
    section,
    size,
)

PLAIN_AGAIN = "plain-again"
"""The mode of a second run of ordinary training."""

LEAST_TIMED = 3
"""Fewer timed steps than these judge no step time."""

_KEPT: dict[str | None, str] = {
    KeptBecause.GAINS_NOTHING: "no plan saves memory within max_slowdown",
    KeptBecause.LONE: "only one block ran",
    KeptBecause.SMALL: "all that blocks save is below min_bytes",
    KeptBecause.UNLIKE: "blocks differ from step to step",
}
"""Reason to keep everything → its words."""


def verdicts(named: Named, splits: Mapping[str, PeakParts], baseline: str | None = None) -> list[str]:
    """Return a one-line verdict for each run that is compared with another, else for all runs.

    Of the modes of `ebbtide compare`, only those of ebbtide have a line, if there are any.
    """
    against = plain_of(named) if baseline is None else baseline
    plain = None if against is None else named[against]
    names = [name for name in named if name != against] or [*named]
    if baseline is None and plain is not None:  # names are modes, not folders
        names = [name for name in names if name.startswith("ebbtide")] or names
    again = next((s for s in named.values() if s.get("mode") == PLAIN_AGAIN), None) if baseline is None else None
    return [
        verdict(name, named[name], plain, splits.get(name), against=against or "plain", again=again) for name in names
    ]


def verdict(
    name: str,
    summary: Summary,
    plain: Summary | None,
    found: PeakParts | None,
    *,
    against: str = "plain",
    again: Summary | None = None,
) -> str:
    """Describe in one line the run's saving, its price, the contents of the remaining peak and how to lower it.

    Args:
        name: Name of the run.
        summary: Its summary, or the merged one of its mode.
        plain: The baseline, if there is one.
        found: The contents of its peak.
        against: The name of ``plain``.
        again: An equal run of it, if there is one: its peak counts as much.
    """
    held = plain is not None and plain is not summary
    if plain is not None and None not in (models := (summary.get("model"), plain.get("model"))) and len({*models}) > 1:
        against += ", of another model"
    facts = [f"{_against(summary, plain, again)} (against {against})"] if plain and held else _alone(summary)
    line = f"{name}: {', '.join(facts)}"
    why = section(summary, "plan").get("kept_because")
    if why in _KEPT:
        line += f"; Auto kept everything: {_KEPT[why]}"
    if found is not None:
        line += f"; {'what is left of the peak' if plain and held else 'it holds'}: {found.words}"
    advice = None if found is None else found.advice
    if why == KeptBecause.GAINS_NOTHING:
        first = NO_CHECKPOINTS if checkpoints_itself(summary) else "use policy 'minimal'"
        advice = f"{first}, or a larger limit: ebbtide.Auto(max_slowdown=...)"
    elif why == KeptBecause.LONE:
        advice = less_kept(summary)
    if advice is not None:
        line += f" → {advice}"
    return line + "."


def _against(summary: Summary, plain: Summary, again: Summary | None) -> str:
    ours = measured(summary).get("peak_bytes")
    theirs = [peak for equal in (plain, again) if equal and (peak := measured(equal).get("peak_bytes"))]
    facts: list[str] = []
    if ours is not None and theirs:
        usual, apart = fmean(theirs), max(theirs) - min(theirs)
        less = usual - ours
        change = f"{'−' if less > 0 else '+'}{size(abs(less))} ({100 * abs(less) / usual:.0f} %)"
        if NOISE_BYTES <= abs(less) <= apart:
            change += f", no more than equal runs differ by ({size(apart)})"
        change = "unchanged" if abs(less) < NOISE_BYTES else change
        facts.append(f"peak {change}")
    timed = int(summary.get("timed_steps", LEAST_TIMED) * (summary.get("rounds") or 1))
    if timed < LEAST_TIMED:
        facts.append(f"step time not judged ({counted(timed, 'step')} timed)")
    elif (times := ratio_value(summary, plain)) is not None:
        facts.append(f"step {100 * (times - 1):+.0f} %".replace("-", "−"))
    if (losses := loss_verdict(summary, plain)) != ABSENT:
        facts.append("LOSSES DIFFER" if losses == "differ" else f"losses bitwise {losses}")
    return ", ".join(facts) or "nothing was measured"


def _alone(summary: Summary) -> list[str]:
    peak = measured(summary).get("peak_bytes") or summary.get("peak_device_bytes")
    facts: list[str] = []
    saved, of = summary.get("memory_saved_bytes"), summary.get("baseline_activation_bytes")
    if saved is not None and of:
        facts.append(f"{size(saved)} of the {size(of)} of activations per forward are offloaded or recomputed")
    if summary.get("step_seconds_median") is not None:
        facts.append(f"step {number(summary['step_seconds_median'], '{:.3f} s')}")
    return [*facts, f"peak {size(peak)}"]


def prediction(run: Run) -> Table:
    """Compare the last plan with a prediction to the counted steps; no rows without one."""
    plans = [event["predicted"] for event in run.all("plan") if isinstance(event.get("predicted"), Mapping)]
    if not plans:
        return Table(columns=(), rows=())
    plan, saved = plans[-1], section(run.summary, "activation_bytes")
    step, passes = run.summary.get("step_seconds_median"), _micro_batches(run)
    rows = [("step", _seconds(plan.get("step_seconds")), _seconds(None if step is None else step / passes))]
    rows += [(f"of it, {words}", ABSENT, _seconds(value / passes)) for words, value in step_costs(run).items()]
    rows += [
        (words, size(plan.get(f"{words}_bytes")), size(saved.get(words)))
        for words in ("kept", "offloaded", "recomputed")
    ]
    overhead = number(plan.get("overhead_percent"), "{:+z.1f} %")
    head = f"predicted ({overhead} of the step that keeps everything)"
    each = "measured" if passes == 1 else f"measured, of one of {passes} micro-batches"
    return Table(columns=("a step", head, each), rows=tuple(rows))


def _micro_batches(run: Run) -> int:
    """Return the backwards of a step: what is predicted is one forward with its backward."""
    counts = Counter(span.step for span in run.phases if span.name == "backward")
    return max(round(median(counts.values())), 1) if counts else 1


def step_costs(run: Run) -> dict[str, float]:
    """Return the seconds of stalls, recomputing and copies in a counted step: medians over the steps."""
    left_out = {event.get("step") for event in run.warm_up()}
    pairs = [(last.step, step) for last, step in pairwise(copies(run)) if step.step not in left_out]
    # Of a long record, some are of many steps.
    steps = [step for last, step in pairs if not isinstance(last, int) or step.step == last + 1]
    if not steps:
        return {}
    found = {
        "stalls": median(step.stall_seconds for step in steps),
        "recomputing (host time)": median(step.recompute_seconds for step in steps),
    }
    for way, moved in (("out", [step.out_bytes for step in steps]), ("in", [step.in_bytes for step in steps])):
        if (nbytes := median(moved)) and (rate := run.summary.get(f"copy_{way}_bytes_per_second")):
            found[f"copying {way}, during compute"] = nbytes / rate
    return found


def _seconds(value: float | None) -> str:
    return number(value, "{:.3f} s")
