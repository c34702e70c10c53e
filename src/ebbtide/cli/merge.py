"""Merge the rounds of a comparison: arithmetic on summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any, TypeVar, cast

from ebbtide.cli.modes import MODES
from ebbtide.report.table import saved_percent

T = TypeVar("T")
Summary = Mapping[str, Any]
ByRound = Mapping[int, Mapping[str, Summary]]
"""Summaries of the successful children, by round and mode."""

QUARTILES_FROM = 5
"""From this many values on, the spread is the quartiles; below, the extremes."""


def merge(rounds: ByRound, modes: Sequence[str], failures: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Make one summary per mode.

    Args:
        rounds: Summaries of the successful children.
        modes: In display order; a mode without a successful child is listed, too.
        failures: By mode, the messages of its failed children.
    """
    merged: list[dict[str, Any]] = []
    for mode in modes:
        summaries = [by_mode[mode] for _, by_mode in sorted(rounds.items()) if mode in by_mode]
        joined: dict[str, Any] = dict(cast("Summary", medians(summaries))) if summaries else {}
        joined.update(
            mode=mode,
            rounds=len(summaries),
            step_ratio=step_ratio(rounds, mode),
            loss_equal=loss_equal(rounds, mode),
            failures=list(failures.get(mode, ())),
        )
        joined["status"] = "ok" if summaries and not joined["failures"] else "error"
        merged.append(joined)
    plain = next((mode for mode in merged if mode["mode"] == "plain" and mode["rounds"]), None)
    for mode in merged:
        mode["saved_percent"] = saved_percent(mode, plain) if mode is not plain else None
    return merged


def medians(values: Sequence[Any]) -> Any:
    """Merge corresponding values: numbers to their median, objects field by field, others to the last.

    A number that is None in one round is None.
    """
    last = values[-1]
    if any(isinstance(value, Mapping) for value in values):
        if not all(isinstance(value, Mapping) for value in values):
            return None
        objects = cast("Sequence[Mapping[str, Any]]", values)
        return {key: medians([value.get(key) for value in objects]) for key in objects[-1]}
    if any(_is_number(value) for value in values):
        if not all(_is_number(value) for value in values):
            return None
        middle = median(values)
        return int(middle) if float(middle).is_integer() and isinstance(last, int) else middle
    return last


def step_ratio(rounds: ByRound, mode: str) -> dict[str, float] | None:
    """Compare step times with ordinary training's; ``low`` and ``high`` as in ``spread_of``.

    Pairs are close in time, so a machine that slows down is not counted as a mode's cost: steps of the same turn, or
    medians of a round whose runs followed one another. If a round has two runs of ordinary training, their mean counts.
    """
    ratios: list[float] = []
    for by_mode in rounds.values():
        ours = by_mode.get(mode, {})
        plain = [by_mode[name] for name in MODES if MODES[name].ordinary and name in by_mode]
        if plain and in_lockstep(ours, *plain):
            others = map(fmean, zip(*(summary["step_seconds"] for summary in plain), strict=True))
            ratios += [own / other for own, other in zip(ours["step_seconds"], others, strict=True)]
            continue
        others = [summary["step_seconds_median"] for summary in plain if summary.get("step_seconds_median")]
        if ours.get("step_seconds_median") is not None and others:
            ratios.append(ours["step_seconds_median"] / fmean(others))
    return spread(ratios) if ratios else None


def in_lockstep(*summaries: Summary) -> bool:
    """Whether runs of a round took their steps in turn, so that those correspond."""
    counts = {len(summary.get("step_seconds") or ()) for summary in summaries}
    return all(summary.get("lockstep") for summary in summaries) and len(counts) == 1 and 0 not in counts


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, low and high of several values; see ``spread_of``."""
    if len(values) >= QUARTILES_FROM:
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return {"median": middle, "low": low, "high": high}
    return {"median": median(values), "low": min(values), "high": max(values)}


def spread_of(count: int, noun: str = "round") -> str:
    """Describe ``low`` and ``high`` of a number of rounds, or of steps."""
    return f"quartiles of the {noun}s" if count >= QUARTILES_FROM else f"lowest and highest {noun}"


def loss_equal(rounds: ByRound, mode: str) -> bool | None:
    """Return whether every loss of every round is bitwise equal to plain's; ``None`` without losses."""
    plain = [list(by_mode["plain"]["loss"]) for by_mode in rounds.values() if "plain" in by_mode]
    ours = [list(by_mode[mode]["loss"]) for by_mode in rounds.values() if mode in by_mode]
    if not plain or not ours or not plain[0] or any(None in losses for losses in (*plain, *ours)):
        return None
    return all(losses == plain[0] for losses in (*plain, *ours))


def latest_complete_round(rounds: Mapping[int, Mapping[str, T]], modes: Sequence[str]) -> list[T]:
    """Choose the round of the pictures: the last with all modes, else the last of each mode."""
    ordered = [by_mode for _, by_mode in sorted(rounds.items())]
    complete = [by_mode for by_mode in ordered if len(by_mode) == len(modes)]
    latest = {mode: value for by_mode in (complete[-1:] or ordered) for mode, value in by_mode.items()}
    return [latest[mode] for mode in modes if mode in latest]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
