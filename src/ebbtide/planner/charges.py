"""What offloading and recomputing cost beyond their own prices: charged to what is moved and to what is recomputed.

[Note: charges]
A step that offloads and recomputes is slower than the plain step and its recomputes, and nobody can tell which copy or
which recompute made it so: hooks, fresh memory, cores and links that are shared. So the time that is not explained is
charged to both in proportion to their prices, copies out and in counted as if none hid. What moving is charged with is
split once more: what the host needs for each storage, and the rest by byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.planner.profile import Profile, Rates, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What was moved and recomputed in some time.

    Attributes:
        recompute_seconds: Price of the recomputes.
        moved_bytes: What crossed the link, each way.
        crossings: Storages that crossed it, both ways together.
    """

    recompute_seconds: float
    moved_bytes: int
    crossings: int


def charged(profile: Profile, work: Work, extra_seconds: float, *, host_seconds: float = 0.0) -> Profile | None:
    """Return a profile in which work of the same kind costs ``extra_seconds`` more. See [Note: charges].

    Args:
        profile: The step.
        work: What cost that much more than its prices.
        extra_seconds: How much.
        host_seconds: What the host needs for one storage each way, at most.

    Returns:
        The profile; None where nothing was moved or recomputed that could be charged.
    """
    rates = profile.rates
    moving = work.moved_bytes * (1 / rates.out_bytes_per_second + 1 / rates.in_bytes_per_second)
    total = moving + work.recompute_seconds
    if total <= 0 or extra_seconds <= 0:
        return None
    factor = extra_seconds / total
    return replace(
        profile,
        rates=_charged_rates(rates, work, factor * moving, host_seconds),
        blocks=tuple(replace(block, units=_with_recomputes(block.units, 1 + factor)) for block in profile.blocks),
    )


def scaled(profile: Profile, factor: float) -> Profile:
    """Return a profile in which hooks, recomputes and handling cost ``factor`` times as much; copies are as fast.

    Args:
        profile: The step.
        factor: 0.5 halves the prices.
    """
    rates = profile.rates
    return replace(
        profile,
        rates=replace(
            rates,
            handling_seconds=rates.handling_seconds * factor,
            handling_seconds_per_byte=rates.handling_seconds_per_byte * factor,
        ),
        blocks=tuple(
            replace(
                block,
                hook_seconds=block.hook_seconds * factor,
                units=_with_recomputes(block.units, factor),
            )
            for block in profile.blocks
        ),
    )


def _with_recomputes(units: tuple[Unit, ...], factor: float) -> tuple[Unit, ...]:
    return tuple(
        unit if unit.recompute_seconds is None else replace(unit, recompute_seconds=unit.recompute_seconds * factor)
        for unit in units
    )


def _charged_rates(rates: Rates, work: Work, seconds: float, host_seconds: float) -> Rates:
    if not work.moved_bytes:
        return rates
    each = min(host_seconds, seconds / work.crossings) if work.crossings else 0.0
    by_byte = max(seconds - each * work.crossings, 0.0) / (2 * work.moved_bytes)  # rounding may go below 0
    return replace(
        rates,
        handling_seconds=rates.handling_seconds + each,
        handling_seconds_per_byte=rates.handling_seconds_per_byte + by_byte,
    )
