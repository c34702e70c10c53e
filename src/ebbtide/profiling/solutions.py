"""The plan of a policy for a step.

[Note: the device's memory]
On an accelerator the measured steps show a plan's peak. If the plan for ``max_slowdown`` would not fit the device, the
device's memory becomes a budget: the fastest plan that fits is chosen. Peaks count memory allocated by torch; a share
of ``FRAGMENTS`` of it, for fragmentation, must fit too. A user's budget above the device's memory is replaced by that.
Without a device what a plan keeps must fit the memory that is free between two steps. What a plan offloads must fit the
rank's host memory, unless no other plan fits a budget: the rates of the disk behind it are not known.
"""

from __future__ import annotations

from dataclasses import replace

from ebbtide.base.errors import BudgetError
from ebbtide.base.units import format_size
from ebbtide.config import Auto, Minimal, Policy
from ebbtide.planner import plan_for
from ebbtide.planner.checkpointing import checkpointed_peak
from ebbtide.planner.hooked import shrink_hooked
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Search, Solution, follow

RESERVE = 0.03
"""Share by which a measured peak may exceed the predicted one; it is left free of a memory budget."""

FRAGMENTS = 0.2
"""Assumed fragmentation of torch's allocator, as a share of the allocated bytes: a sixth of the device's."""

FASTER = 0.03
"""Share by which a method that is timed in other steps than checkpointing must certainly be faster."""


def solution_for(policy: Policy, profile: Profile, memory_bytes: int | None = None) -> Solution:
    """Return the solution of a policy for a step, within a device's memory, less a share for fragments, if it is known.

    Raises:
        BudgetError: No plan fits the memory budget, or the device.
    """
    if isinstance(policy, Minimal) and (mix := minimal_mix(profile, memory_bytes)) is not None:
        return mix
    if not isinstance(policy, Auto):
        return follow(profile, plan_for(policy))
    budget = budget_within(policy.budget_bytes, memory_bytes)
    if budget is not None:
        return fit_with_reserve(profile, budget)
    found = shrink_hooked(profile, policy.max_slowdown)
    limit = None if memory_bytes is None else without_fragments(memory_bytes)
    if limit is None or found.predicted.peak_bytes * (1 + RESERVE) <= limit:
        return found
    try:
        return fit_with_reserve(profile, limit)
    except BudgetError as error:
        raise BudgetError(
            f"the device has {format_size(limit)}, less a sixth for fragments",
            expected=error.expected,
            hint=error.hint,
        ) from error


def budget_within(budget_bytes: int | None, memory_bytes: int | None) -> int | None:
    """Return a budget, or what a device's memory holds if that is less; None: no budget."""
    if budget_bytes is None or memory_bytes is None or budget_bytes <= memory_bytes:
        return budget_bytes
    return without_fragments(memory_bytes)


def without_fragments(memory_bytes: int) -> int:
    return int(memory_bytes / (1 + FRAGMENTS))


def fit_with_reserve(profile: Profile, budget_bytes: int, reserve: float = RESERVE) -> Solution:
    """Return the fastest plan whose peak is within a budget and leaves a share of it free; if none, the smallest.

    If that exceeds the budget, too, the plan may offload more than the store holds, which spills to disk.

    Raises:
        BudgetError: No plan fits the memory budget.
    """
    search = Search(profile)
    try:
        return search.fit(int(budget_bytes / (1 + reserve)))
    except BudgetError:
        if search.smallest.predicted.peak_bytes <= budget_bytes:
            return search.smallest
        if profile.store_bytes is None:
            return search.fit(budget_bytes)
    return fit_with_reserve(replace(profile, store_bytes=None), budget_bytes, reserve)  # slower, but it may fit


def minimal_mix(profile: Profile, memory_bytes: int | None) -> Solution | None:
    """Return the mix that ``Minimal`` would choose, as far as a prediction tells.

    None: none promises anything, or the store is a disk.
    """
    if profile.store_bytes is None:
        return None
    return within_checkpointing(profile, checkpointed_peak(profile), memory_bytes)


def within_checkpointing(profile: Profile, limit_bytes: int, memory_bytes: int | None) -> Solution | None:
    """Return the fastest plan that treats saved tensors one by one and takes no more memory than checkpointing.

    Where the head sets the peak, as logits do, no plan takes much less than checkpointing. Then half of what plans can
    save is left free instead of a share of the peak, if the device has room for a peak above its prediction.

    Args:
        profile: The step.
        limit_bytes: The peak that checkpointing would have.
        memory_bytes: Of the device; None: as much as is needed.

    Returns:
        None: no plan leaves enough of that free, or it is predicted to be hardly faster than checkpointing.
    """
    blocks = tuple(replace(block, checkpointable=False) for block in profile.blocks)
    search, budget_bytes = Search(replace(profile, blocks=blocks)), int(limit_bytes / (1 + RESERVE))
    if memory_bytes is None or limit_bytes * (1 + RESERVE) <= memory_bytes:
        budget_bytes = max(budget_bytes, min((search.smallest.predicted.peak_bytes + limit_bytes) // 2, limit_bytes))
    try:
        found = search.fit(budget_bytes)
    except BudgetError:
        return None
    checkpointed_seconds = profile.step_seconds + profile.forward_seconds
    return found if found.predicted.step_seconds < (1 - FASTER) * checkpointed_seconds else None
