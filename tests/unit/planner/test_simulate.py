"""The simulated step, compared with figures computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from ebbtide.base.actions import Action
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.simulate import Simulated, simulate
from tests.helpers.profiles import alike, profiles, unit

K, OFF, R = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
ONE_A_SECOND = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0)
FAST = Rates(out_bytes_per_second=1e12, in_bytes_per_second=1e12)


def run(profile: Profile, *actions: Action) -> Simulated:
    """Simulate with the same action for each unit of a block in every block."""
    return simulate(profile, [actions] * len(profile.blocks))


def test_everything_kept_is_plain_training() -> None:
    profile = alike(3, (unit("a", 10), unit("b", 5)), FAST, beside=7, head_base_bytes=11, head_seconds=2.0)
    found = run(profile, K, K)
    assert found.step_seconds == profile.step_seconds == 3 * 1 + 2 + 3 * 2
    assert (found.overhead_seconds, found.kept_bytes) == (0, 45)
    assert (found.peak_bytes, found.peak_at[0]) == (45 + 11, "head")


def test_a_copy_that_hides_costs_nothing_and_frees_the_memory() -> None:
    profile = alike(4, (unit("a", 100),), FAST, beside=7, window_bytes=100)
    found = run(profile, OFF)
    assert found.overhead_seconds == pytest.approx(0, abs=1e-6)
    assert found.offloaded_bytes == 400
    # In the last block's backward: its own bytes, still on the device, and those of the previous block, coming in.
    assert (found.peak_bytes, found.peak_at) == (7 + 200, ("backward", "layers.3"))


def test_more_than_the_window_makes_compute_wait() -> None:
    profile = alike(2, (unit("a", 4),), ONE_A_SECOND, window_bytes=1)
    found = run(profile, OFF)
    # Saved at 1 s, waited for until 5 s; then at 6 s, until 10 s. Backward: the copy-in of the last takes 4 s, that of
    # the first begins when the last was read (14 s), is done at 18 s and is wanted at 16 s.
    assert found.overhead_seconds == (4 + 4) + (4 + 2)


def test_what_has_not_left_at_the_turn_is_read_where_it_is() -> None:
    profile = alike(3, (unit("a", 10),), ONE_A_SECOND, window_bytes=1000)
    found = run(profile, OFF)
    # The first copy runs from 1 s to 11 s, past the start of backward at 3 s; the others never begin. All sources stay.
    assert found.overhead_seconds == 0
    assert found.peak_bytes == 30
    assert found.levels_bytes == (10, 20, 30, 30, 30, 20, 10)


def test_what_is_recomputed_costs_its_time_in_backward_and_no_memory_before() -> None:
    profile = alike(2, (unit("a", 10, 0.5),), FAST, head_base_bytes=3)
    found = run(profile, R)
    assert found.overhead_seconds == found.recompute_seconds == 1.0
    assert (found.recomputed_bytes, found.peak_bytes, found.peak_at[0]) == (20, 10, "backward")


def test_what_backward_reads_first_is_held_back_and_takes_its_part_of_the_window() -> None:
    found = run(alike(5, (unit("a", 10),), FAST, window_bytes=20), OFF)
    # Of 50 bytes the last 20, one window, are never copied; the others are freed when the next are saved.
    assert found.levels_bytes[:6] == (10, 10, 10, 10, 20, 20)
    # In backward: what is read, and one window ahead of it. Nothing is copied in before the first was read.
    assert found.levels_bytes[6:] == (30, 30, 30, 20, 10)


def test_what_is_offloaded_before_a_block_that_keeps_all_is_copied() -> None:
    """Its backward hides the first copy-ins."""
    profile = alike(3, (unit("a", 10),), FAST, window_bytes=20)
    found = simulate(profile, [[OFF], [OFF], [K]])
    assert found.levels_bytes[:4] == (10, 10, 20, 10) and found.overhead_seconds < 1e-6
    assert simulate(profile, [[OFF], [K], [OFF]]).levels_bytes[3] == 30


def test_a_step_that_is_one_block_offloads_most_of_it() -> None:
    units = tuple(unit(f"u{n}", 10 << 20) for n in range(32))
    found = run(alike(1, units, FAST), *[OFF] * 32)
    assert found.levels_bytes[1] == 20 << 20, "a sixteenth"


def test_copies_begin_and_end_in_groups() -> None:
    rates = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1e12)
    profile = alike(8, (unit("a", 2), unit("b", 2)), rates, forward=3.0, window_bytes=20)
    # A quarter of the window is more than a block saves, so its copies begin at its end. Those of the first run from
    # 3 s to 7 s, and at 6 s, when the second block ends, none of them is done.
    assert run(profile, OFF, OFF).levels_bytes[:3] == (4, 8, 12)
    # A quarter is one of them: the first runs from 1.5 s to 3.5 s, the second from then to 5.5 s, and at 4.5 s and 6 s,
    # when others are saved, they are released.
    assert run(replace(profile, window_bytes=8), OFF, OFF).levels_bytes[:2] == (4, 4)


def test_recomputes_hide_copies_in() -> None:
    """A block that computes longer leaves more time for copy-ins."""
    units = (unit("a", 6), unit("b", 1, 2.0))
    slow_in = Rates(out_bytes_per_second=1e9, in_bytes_per_second=2.0)
    profile = alike(3, units, slow_in, window_bytes=7)
    waits, hides = run(profile, OFF, K), run(profile, OFF, R)
    assert waits.overhead_seconds > hides.overhead_seconds - hides.recompute_seconds


def test_handling_is_compute_time() -> None:
    rates = Rates(out_bytes_per_second=1e12, in_bytes_per_second=1e12, handling_seconds=0.25)
    # Three go out and two come back: the last one's source still serves.
    assert run(alike(3, (unit("a", 10),), rates), OFF).overhead_seconds == pytest.approx(5 * 0.25)


def test_a_block_that_saves_nothing_takes_its_time() -> None:
    assert run(alike(2, (), FAST)).step_seconds == 6


@given(profiles())
def test_more_that_stays_is_never_slower_than_all_offloaded_or_recomputed(profile: Profile) -> None:
    keep = simulate(profile, [[K] * len(b.units) for b in profile.blocks])
    other = simulate(
        profile,
        [[OFF if u.movable else R if u.recompute_seconds is not None else K for u in b.units] for b in profile.blocks],
    )
    assert keep.overhead_seconds == pytest.approx(0)
    assert other.step_seconds >= profile.step_seconds + other.recompute_seconds - 1e-9
    assert keep.kept_bytes == profile.saved_bytes
