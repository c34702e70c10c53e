"""Simulated checkpointing, against figures worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.base.errors import ConfigError
from ebbtide.planner.checkpointing import rerun_blocks
from ebbtide.planner.profile import Profile, Rates
from tests.helpers.profiles import alike, unit

FAST = Rates(out_bytes_per_second=1e12, in_bytes_per_second=1e12)


def profile(count: int = 4, *, input_bytes: int = 10, other_bytes: int = 90, turn: int = 7) -> Profile:
    units = (dataclasses.replace(unit("input", input_bytes), block_input=True), unit("other", other_bytes))
    return alike(count, units, FAST, beside=7, turn_beside_bytes=turn)


def test_the_last_block_holds_all_inputs_and_what_it_saves() -> None:
    found = rerun_blocks(profile())
    # Four inputs of 10, the last block's other 90, and 7 beside: its input is the storage that it was called with.
    assert (found.peak_bytes, found.peak_at) == (4 * 10 + 90 + 7, ("backward", "layers.3"))
    assert found.kept_bytes == 40


def test_the_overhead_is_every_forward_once_more() -> None:
    assert rerun_blocks(profile(5)).overhead_seconds == profile(5).forward_seconds == 5


def test_the_head_may_take_more_than_any_block() -> None:
    found = rerun_blocks(profile(turn=500))
    assert (found.peak_bytes, found.peak_at) == (40 + 500, ("turn", ""))


def test_an_input_saved_in_a_wider_type_counts_beside_the_input() -> None:
    found = rerun_blocks(profile(), [5] * 4)
    assert found.peak_bytes == 4 * 5 + 100 + 7
    assert found.kept_bytes == 20


def test_a_block_that_saves_none_of_its_input_keeps_it_all_the_same() -> None:
    units = (unit("other", 90),)
    found = rerun_blocks(alike(2, units, FAST, beside=7), [10, 10])
    assert found.peak_bytes == 20 + 90 + 7


def test_a_larger_early_block_may_hold_the_peak() -> None:
    many = profile()
    first = dataclasses.replace(many.blocks[0], backward_beside_bytes=1000)
    found = rerun_blocks(dataclasses.replace(many, blocks=(first, *many.blocks[1:])))
    assert (found.peak_bytes, found.peak_at) == (10 + 90 + 1000, ("backward", "layers.0"))


def test_it_never_takes_more_memory_than_keeping_everything_where_inputs_are_saved() -> None:
    from ebbtide.planner.solve import keep_everything

    for count in (1, 2, 9):
        assert rerun_blocks(profile(count)).peak_bytes <= keep_everything(profile(count)).peak_bytes


def test_inputs_of_other_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="input_bytes has 3 numbers; expected one for each of 4 executed blocks"):
        rerun_blocks(profile(), [1, 2, 3])
