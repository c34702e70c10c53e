"""The time of a plan from one pass: its blocks are compared with those that ran without hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ebbtide.base.actions import Action, keeps_all
from ebbtide.engine.spans import BlockSpan, Span
from ebbtide.planner.simulate import without_copies
from ebbtide.planner.solve import Solution
from ebbtide.profiling.baseline import has_backward, quartile

SLOWER = 2
"""Copies that take up to this many times as long as predicted do not disturb the comparison with ordinary training."""

ALONE = 0.03
"""Assumed relative error of a single block without hooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The time of steps under a plan.

    Attributes:
        seconds: Their median.
        low_seconds: Lower end of the error bar.
        high_seconds: Upper end of the error bar.
        peak_bytes: Their highest peak; None if not measured.
        steps: Their number.
        system_seconds: The kernel's part of it, in seconds of one core; None if not measured.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    peak_bytes: int | None = None
    steps: int = 1
    system_seconds: float | None = None


def from_blocks(span: Span, solution: Solution) -> Measured | None:
    """Return the time of a plan from one pass, by comparing its blocks with those that ran without hooks.

    Times are scaled to the machine's speed in the measured step. Blocks that ran without hooks only for comparison
    count with the times of equal blocks. Of a pass of other blocks, as where layers are dropped at random, or are
    frozen later, only those count that the plan knows. Blocks without a backward are not compared: what they take
    without hooks was not measured.

    Returns:
        The step and its error bar; None if no block ran without hooks.
    """
    step_seconds, others = solution.profile.step_seconds, span.seconds - sum(block.seconds for block in span.blocks)
    if not same_blocks(span, solution):
        span, solution = _known(span, solution)
    profile = solution.profile
    pairs = list(zip(span.blocks, profile.blocks, strict=True))
    compared = {place: pair for place, pair in enumerate(pairs) if pair[0].plain and has_backward(pair[1])}
    plain = list(compared.values())
    quiet_forwards, quiet_backwards = (
        [pair for place, pair in compared.items() if place in quiet] for quiet in _quiet(span, solution)
    )
    forwards = _speeds([(found.forward_seconds, block.forward_seconds) for found, block in quiet_forwards or plain])
    if forwards is None:
        return None
    backwards = _speeds([(found.backward_seconds, block.backward_seconds) for found, block in quiet_backwards])
    planned = sum(_planned_seconds(span.blocks, solution, place) for place in range(len(span.blocks)))
    others = max(others, 0.0) + profile.epilogue_seconds

    def seconds(forward: float, backward: float) -> float:
        plain = forward * profile.forward_seconds + backward * profile.backward_seconds
        return step_seconds * (planned + others) / (plain + others)

    longest, middle, shortest = map(seconds, forwards, backwards or forwards)
    return Measured(seconds=middle, low_seconds=shortest, high_seconds=longest, peak_bytes=span.peak_bytes)


def _quiet(span: Span, solution: Solution) -> tuple[frozenset[int], frozenset[int]]:
    """Return the blocks during whose forward, and backward, no copies run, as in ordinary training.

    Copies may be slower than predicted.
    """
    rates = solution.profile.rates
    slower = replace(
        rates,
        out_bytes_per_second=rates.out_bytes_per_second / SLOWER,
        in_bytes_per_second=rates.in_bytes_per_second / SLOWER,
    )
    ran = [
        (Action.KEEP,) * len(actions) if block.plain else actions
        for block, actions in zip(span.blocks, solution.assignment, strict=True)
    ]
    return without_copies(replace(solution.profile, rates=slower), ran)


def same_blocks(span: Span, solution: Solution) -> bool:
    """Whether a pass ran the blocks of a plan, and no weights were frozen or trained meanwhile."""
    return _ran(span) == _planned(solution)


def _ran(span: Span) -> list[tuple[str, bool]]:
    """Return the blocks of a pass, and whether each had a backward."""
    return [(block.name, block.backward_seconds > 0) for block in span.blocks]


def _planned(solution: Solution) -> list[tuple[str, bool]]:
    """Return the blocks of a plan, and whether each had a backward when it was measured."""
    return [(block.name, has_backward(block)) for block in solution.profile.blocks]


def _known(span: Span, solution: Solution) -> tuple[Span, Solution]:
    """Return the blocks of a pass that a plan knows, and what it has for them."""
    profile, ran = solution.profile, _ran(span)
    places = {block: place for place, block in enumerate(_planned(solution))}
    known = [places[block] for block in ran if block in places]
    blocks = tuple(found for found, block in zip(span.blocks, ran, strict=True) if block in places)
    return replace(span, blocks=blocks), replace(
        solution,
        profile=replace(profile, blocks=tuple(profile.blocks[place] for place in known)),
        assignment=[solution.assignment[place] for place in known],
    )


def _speeds(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Return by how many times the first of each pair is longer: lower quartile, median and upper quartile."""
    found = [now / before for now, before in pairs if before]
    if len(found) == 1:
        return found[0] * (1 - ALONE), found[0], found[0] * (1 + ALONE)
    return (quartile(found), median(found), quartile(found, upper=True)) if found else None


def _planned_seconds(blocks: tuple[BlockSpan, ...], solution: Solution, place: int) -> float:
    """Return the time of a block under the plan; if it ran without hooks only for comparison, that of equal blocks."""
    mine, profile = blocks[place], solution.profile.blocks
    actions = solution.assignment[place]
    if not mine.plain or keeps_all(actions):
        return mine.seconds
    hooked = [
        other for other, block in enumerate(blocks) if not block.plain and profile[other].kind == profile[place].kind
    ]
    equals = [other for other in hooked if solution.assignment[other] == actions] or hooked
    factors = [blocks[other].seconds / profile[other].seconds for other in equals if profile[other].seconds]
    return profile[place].seconds * median(factors) if factors else mine.seconds
