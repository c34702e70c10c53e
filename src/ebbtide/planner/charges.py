"""Overhead of offloading and recomputing beyond their own prices, charged to moved and recomputed storages.

[Note: charges]
A step with offloading takes longer than the plain step plus its recomputes: hooks, fresh memory, shared cores and
links. This unexplained time cannot be attributed to single copies or recomputes, so it is charged to all in proportion
to their prices, with copies in both directions counted as if none were hidden. The charge for copies is split into host
time per storage, and the rest per byte. After a plan that took longer than predicted, kinds of work that it did not
have cost more by the same factor: else the next plan has those instead, and takes as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.planner.profile import BlockProfile, Profile, Rates, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The copies and recomputes of some period.

    Attributes:
        recompute_seconds: Price of the recomputes.
        moved_bytes: Bytes across the link, each way.
        crossings: Storages across it, both ways together.
        all_kinds: Whether copies, and checkpointed blocks, cost more even if there were none.
        hook_seconds: Price of the hooks, if it may be wrong, too; 0: it was measured by itself.
    """

    recompute_seconds: float
    moved_bytes: int
    crossings: int
    all_kinds: bool = False
    hook_seconds: float = 0.0


def charged(profile: Profile, work: Work, extra_seconds: float, *, host_seconds: float = 0.0) -> Profile | None:
    """Return a profile in which work of the same kind costs ``extra_seconds`` more; None: there is nothing to charge.

    See [Note: charges]. Of a storage's copy at most ``host_seconds`` are the host's, each way.
    """
    rates = profile.rates
    both_ways = 1 / rates.out_bytes_per_second + 1 / rates.in_bytes_per_second
    moving = work.moved_bytes * both_ways
    total = moving + work.recompute_seconds + work.hook_seconds
    if total <= 0 or extra_seconds <= 0:
        return None
    factor = extra_seconds / total
    checkpoints, hooks = (1 + factor if work.all_kinds else 1.0), (1 + factor if work.hook_seconds else 1.0)
    return replace(
        profile,
        rates=_charged_rates(rates, work, factor * both_ways, host_seconds),
        blocks=_blocks(profile, hooks=hooks, recomputes=1 + factor, checkpoints=checkpoints),
    )


def scaled(profile: Profile, factor: float) -> Profile:
    """Return a profile in which hooks, recomputes and handling cost ``factor`` times as much; copy rates stay."""
    rates = profile.rates
    return replace(
        profile,
        rates=replace(
            rates,
            handling_seconds=rates.handling_seconds * factor,
            handling_seconds_per_byte=rates.handling_seconds_per_byte * factor,
        ),
        blocks=_blocks(profile, hooks=factor, recomputes=factor),
    )


def _blocks(profile: Profile, *, hooks: float, recomputes: float, checkpoints: float = 1.0) -> tuple[BlockProfile, ...]:
    """Return the blocks, in which each kind of work costs so many times as much."""

    def priced(unit: Unit) -> Unit:
        seconds = unit.recompute_seconds
        return unit if seconds is None else replace(unit, recompute_seconds=seconds * recomputes)

    return tuple(
        replace(
            block,
            checkpoint_factor=block.checkpoint_factor * checkpoints,
            hook_seconds=block.hook_seconds * hooks,
            units=tuple(map(priced, block.units)),
        )
        for block in profile.blocks
    )


def _charged_rates(rates: Rates, work: Work, each_byte: float, host_seconds: float) -> Rates:
    """Return rates at which copying a byte, both ways together, takes ``each_byte`` seconds more of compute time."""
    if not (work.moved_bytes or work.all_kinds):
        return rates
    seconds = each_byte * work.moved_bytes
    each = min(host_seconds, seconds / work.crossings) if work.crossings else 0.0
    by_byte = each_byte / 2
    if each:
        by_byte = max(seconds - each * work.crossings, 0.0) / (2 * work.moved_bytes)  # rounding may go below 0
    return replace(
        rates,
        handling_seconds=rates.handling_seconds + each,
        handling_seconds_per_byte=rates.handling_seconds_per_byte + by_byte,
    )
