"""The plans that measure steps: ``AutoPlan`` of ``Auto``, ``MinimalPlan`` of ``Minimal``."""

from __future__ import annotations

from ebbtide.base.actions import Plan
from ebbtide.base.events import BUS
from ebbtide.config import Auto, Minimal, Policy
from ebbtide.profiling.auto import AutoPlan
from ebbtide.profiling.minimal import MinimalPlan
from ebbtide.store.protocol import Tier


def measured_plan(policy: Policy | Plan, tier: Tier, window_bytes: int | None) -> AutoPlan | MinimalPlan | None:
    """Return the plan of a policy that measures steps; None for other policies."""
    match policy:
        case Auto():
            return AutoPlan(policy, tier, window_bytes, BUS)
        case Minimal():
            return MinimalPlan(policy, tier, window_bytes, BUS)
        case _:
            return None
