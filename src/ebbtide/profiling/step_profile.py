"""The profile of a measured step, and the rates of its copies, for the planner."""

from __future__ import annotations

from dataclasses import replace

import torch

from ebbtide.base.errors import CapError, DiskFullError
from ebbtide.engine.timed import TimedBlock, TimedStep, recompute_seconds
from ebbtide.planner.profile import BlockProfile, Profile, Rates
from ebbtide.planner.simulate import simulate
from ebbtide.store.meter import home_of, synchronize
from ebbtide.store.protocol import Tier, copy_out_one

PROBE_BYTES = 16 * 1024**2
"""Copied out and in to measure the rates if the measured steps copied nothing."""


def profile_of(
    step: TimedStep, rates: Rates, window_bytes: int | None, *, ran: tuple[Rates, int | None] | None = None
) -> Profile:
    """Return the profile of a measured step.

    Recomputes are subtracted from the blocks' backward times, because the plan adds its own. Base memory is the
    measured memory less the larger of the bytes that the simulated schedule of the same actions holds then and the
    resident bytes.

    Args:
        step: The measured step.
        rates: The cost of offloading.
        window_bytes: See ``Profile``.
        ran: Rates and window under which the step was measured, if different.
    """
    profile = Profile(
        blocks=tuple(map(_block, step.blocks)),
        rates=rates,
        head_seconds=step.head_seconds,
        epilogue_seconds=step.epilogue_seconds,
        window_bytes=window_bytes,
    )
    if step.head_peak_bytes is None:
        return profile
    as_it_ran = profile if ran is None else replace(profile, rates=ran[0], window_bytes=ran[1])
    levels = simulate(as_it_ran, [[unit.action for unit in block.units] for block in step.blocks]).levels_bytes
    count = len(step.blocks)
    blocks = tuple(
        replace(
            profile.blocks[place],
            forward_base_bytes=_base(block.forward_peak_bytes, max(levels[place], block.forward_resident_bytes)),
            backward_base_bytes=_base(
                block.backward_peak_bytes, max(levels[-1 - place], block.backward_resident_bytes)
            ),
        )
        for place, block in enumerate(step.blocks)
    )
    return replace(
        profile,
        blocks=blocks,
        head_base_bytes=_base(step.head_peak_bytes, max(levels[count], step.head_resident_bytes)),
    )


def _block(block: TimedBlock) -> BlockProfile:
    return BlockProfile(
        name=block.name,
        kind=block.kind,
        forward_seconds=block.forward_seconds,
        backward_seconds=max(block.backward_seconds - recompute_seconds(block.units), 0.0),
        checkpointable=block.checkpointable,
        input_bytes=block.input_bytes,
        units=block.units,
    )


def _base(peak_bytes: int | None, level_bytes: int) -> int:
    return max((peak_bytes or 0) - level_bytes, 0)


def measured_rates(tier: Tier) -> Rates:
    """Return the rates of a store's copies so far; if there were none, of a copy-out and a copy-in, made now."""
    counters = tier.counters
    if not (counters.out_bytes_per_second and counters.in_bytes_per_second):
        _probe(tier)
        counters = tier.counters  # with the times of copies that have ended since
    return Rates(
        out_bytes_per_second=max(counters.timed_out_bytes, 1) / max(counters.out_seconds, 1e-9),
        in_bytes_per_second=max(counters.timed_in_bytes, 1) / max(counters.in_seconds, 1e-9),
    )


def _probe(tier: Tier) -> None:
    tier.stalls.timed, tier.stalls.reader = True, None  # until the next pass begins
    before = tier.counters.stalls.total_seconds
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=home_of(tier) or "cpu")
    try:
        (slot := copy_out_one(tier, source)).take()
    except (CapError, DiskFullError):
        return  # what it cannot take stays, at whatever rate
    slot.free()
    synchronize(source.device)  # a copy has its time when it has ended
    counters = tier.counters
    counters.probed(PROBE_BYTES, counters.stalls.total_seconds - before)
