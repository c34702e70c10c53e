"""Time that is not explained is charged to copies and recomputes."""

from __future__ import annotations

import pytest

from ebbtide.planner.charges import Work, charged
from ebbtide.planner.profile import BlockProfile, Profile, Rates


def test_rounding_charges_no_byte_with_less_than_nothing() -> None:
    rates = Rates(out_bytes_per_second=3e9, in_bytes_per_second=7e9)
    profile = Profile(blocks=(), rates=rates)
    for crossings in range(1, 500):
        work = Work(recompute_seconds=1e-3, moved_bytes=4096, crossings=crossings)
        found = charged(profile, work, 1e-3 / crossings, host_seconds=1.0)
        assert found is not None
        assert found.rates.handling_seconds > 0 and found.rates.handling_seconds_per_byte >= 0


def test_kinds_of_work_that_a_step_did_not_have_cost_more_only_where_the_cause_is_unknown() -> None:
    """One second of recomputes took two; a gigabyte that is copied out and in takes one second."""
    block = BlockProfile(name="0", kind="Layer", forward_seconds=1.0, backward_seconds=2.0, units=())
    profile = Profile(blocks=(block,), rates=Rates(out_bytes_per_second=2e9, in_bytes_per_second=2e9))
    for all_kinds, factor, handling in ((True, 2.0, 0.5e-9), (False, 1.0, 0.0)):
        work = Work(recompute_seconds=1.0, moved_bytes=0, crossings=0, all_kinds=all_kinds)
        found = charged(profile, work, 1.0)
        assert found is not None
        assert found.blocks[0].checkpoint_factor == pytest.approx(factor * block.checkpoint_factor)
        assert found.rates.handling_seconds_per_byte == pytest.approx(handling)


def test_what_is_charged_to_copies_is_the_same_by_storage_and_by_byte() -> None:
    profile = Profile(blocks=(), rates=Rates(out_bytes_per_second=2e9, in_bytes_per_second=2e9))
    work = Work(recompute_seconds=0.0, moved_bytes=10**9, crossings=10)
    for host_seconds in (0.0, 0.01, 1.0):
        found = charged(profile, work, 0.5, host_seconds=host_seconds)
        assert found is not None
        rates = found.rates
        total = 10 * rates.handling_seconds + 2 * 10**9 * rates.handling_seconds_per_byte
        assert total == pytest.approx(0.5) and rates.handling_seconds == pytest.approx(min(host_seconds, 0.05))
