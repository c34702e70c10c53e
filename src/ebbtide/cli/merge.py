"""Joins the rounds of a comparison: arithmetic on summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any, TypeVar, cast

from ebbtide.report.table import saved_percent

T = TypeVar("T")
Summary = Mapping[str, Any]
Rounds = Mapping[int, Mapping[str, Summary]]
"""Summaries of the children that ended well, by round and mode."""


QUARTILES_FROM = 5
"""From so many rounds on the spread is the quartiles; of fewer, the extremes."""


def merge(rounds: Rounds, modes: Sequence[str], failures: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Make one summary a mode.

    Args:
        rounds: What the children that ended well left.
        modes: In the order in which they are to be listed. A mode no child of which ended well is listed too.
        failures: By mode, what its failed children said.
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
    """Join values of the same meaning: numbers to their median, objects field by field, all else to the last.

    A number that one round does not know is not known.
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


def step_ratio(rounds: Rounds, mode: str) -> dict[str, float] | None:
    """Compare step times with plain's of the same round; ``low`` and ``high`` are as ``spread_of`` says.

    Pairs within a round are close in time, so a machine that slows down over the rounds does not show as a mode's cost.
    """
    ratios: list[float] = []
    for by_mode in rounds.values():
        ours = by_mode.get(mode, {}).get("step_seconds_median")
        theirs = by_mode.get("plain", {}).get("step_seconds_median")
        if ours is not None and theirs:
            ratios.append(ours / theirs)
    return spread(ratios) if ratios else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, low and high of the rounds' values; see ``spread_of``."""
    if len(values) >= QUARTILES_FROM:
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return {"median": middle, "low": low, "high": high}
    return {"median": median(values), "low": min(values), "high": max(values)}


def spread_of(rounds: int) -> str:
    """Say what ``low`` and ``high`` are for so many rounds."""
    return "quartiles of the rounds" if rounds >= QUARTILES_FROM else "lowest and highest round"


def loss_equal(rounds: Rounds, mode: str) -> bool | None:
    """Return whether every loss of every round is bitwise equal to plain's; ``None`` without losses."""
    plain = [list(by_mode["plain"]["loss"]) for by_mode in rounds.values() if "plain" in by_mode]
    ours = [list(by_mode[mode]["loss"]) for by_mode in rounds.values() if mode in by_mode]
    if not plain or not ours or not plain[0] or any(None in losses for losses in (*plain, *ours)):
        return None
    return all(losses == plain[0] for losses in (*plain, *ours))


def latest_complete_round(rounds: Mapping[int, Mapping[str, T]], modes: Sequence[str]) -> list[T]:
    """Choose what the pictures show: the last round that has all modes, else the last that each mode has."""
    ordered = [by_mode for _, by_mode in sorted(rounds.items())]
    complete = [by_mode for by_mode in ordered if len(by_mode) == len(modes)]
    latest = {mode: value for by_mode in (complete[-1:] or ordered) for mode, value in by_mode.items()}
    return [latest[mode] for mode in modes if mode in latest]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
