"""Costs charged to copies are never negative."""

from __future__ import annotations

from ebbtide.planner.charges import Work, charged
from ebbtide.planner.profile import Profile, Rates


def test_rounding_charges_no_byte_with_less_than_nothing() -> None:
    rates = Rates(out_bytes_per_second=3e9, in_bytes_per_second=7e9)
    profile = Profile(blocks=(), rates=rates)
    for crossings in range(1, 500):
        work = Work(recompute_seconds=1e-3, moved_bytes=4096, crossings=crossings)
        found = charged(profile, work, 1e-3 / crossings, host_seconds=1.0)
        assert found is not None
        assert found.rates.handling_seconds > 0 and found.rates.handling_seconds_per_byte >= 0
