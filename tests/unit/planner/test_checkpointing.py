"""Simulated checkpointing, compared with figures computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.base.actions import Action
from ebbtide.planner.checkpointing import checkpointed, checkpointed_peak
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.simulate import simulate
from ebbtide.planner.solve import Search, keep_everything
from tests.helpers.profiles import alike, fit, shrink, unit

FAST = Rates(out_bytes_per_second=1e12, in_bytes_per_second=1e12)


def profile(count: int = 4, *, input_bytes: int = 10, other_bytes: int = 90, turn: int = 7) -> Profile:
    units = (dataclasses.replace(unit("input", input_bytes), block_input=True), unit("other", other_bytes))
    return alike(count, units, FAST, beside=7, head_base_bytes=turn)


def called_with(input_bytes: int, found: Profile) -> Profile:
    blocks = tuple(dataclasses.replace(block, input_bytes=input_bytes) for block in found.blocks)
    return dataclasses.replace(found, blocks=blocks)


def test_the_last_block_holds_all_inputs_and_what_it_saves() -> None:
    # Four inputs of 10, the last block's other 90, and 7 of base: its input is the storage of its argument.
    assert checkpointed_peak(profile()) == 4 * 10 + 90 + 7


def test_the_head_may_take_more_than_any_block() -> None:
    assert checkpointed_peak(profile(turn=500)) == 40 + 500


def test_an_input_saved_in_a_wider_type_counts_beside_the_input() -> None:
    assert checkpointed_peak(called_with(5, profile())) == 4 * 5 + 100 + 7


def test_a_block_that_saves_none_of_its_input_keeps_it_all_the_same() -> None:
    units = (unit("other", 90),)
    assert checkpointed_peak(called_with(10, alike(2, units, FAST, beside=7))) == 20 + 90 + 7


def test_a_larger_early_block_may_hold_the_peak() -> None:
    many = profile()
    first = dataclasses.replace(many.blocks[0], backward_base_bytes=1000)
    assert checkpointed_peak(dataclasses.replace(many, blocks=(first, *many.blocks[1:]))) == 10 + 90 + 1000


def test_it_never_takes_more_memory_than_keeping_everything_where_inputs_are_saved() -> None:
    for count in (1, 2, 9):
        assert checkpointed_peak(profile(count)) <= keep_everything(profile(count)).predicted.peak_bytes


# Plans that checkpoint some blocks

SLOW = Rates(out_bytes_per_second=1.0, in_bytes_per_second=1.0)


def able(found: Profile) -> Profile:
    blocks = (dataclasses.replace(block, checkpointable=True) for block in found.blocks)
    return dataclasses.replace(found, blocks=tuple(blocks))


def dear(*, recompute_seconds: float = 5.0) -> Profile:
    """Return blocks with a forward of 1 s and recipes of 5 s, over a link that hides nothing."""
    units = (dataclasses.replace(unit("input", 10), block_input=True), unit("other", 90, recompute_seconds))
    return able(alike(8, units, SLOW, beside=7))


@pytest.mark.parametrize("count", [1, 4])
def test_checkpointing_every_block_is_simulated_as_it_is_worked_out(count: int) -> None:
    found = simulate(able(profile(count)), checkpointed(able(profile(count)), count, Action.KEEP))
    assert found.peak_bytes == checkpointed_peak(profile(count))
    assert found.peak_at == ("backward", f"layers.{count - 1}")
    assert found.overhead_seconds == pytest.approx(profile(count).forward_seconds)
    assert (found.kept_bytes, found.recomputed_bytes) == (10 * count, 90 * count)


def test_what_a_block_is_called_with_and_does_not_save_is_kept_all_the_same() -> None:
    given = called_with(10, able(alike(2, (unit("other", 90),), FAST, beside=7)))
    found = simulate(given, checkpointed(given, 2, Action.KEEP))
    assert found.levels_bytes[:3] == (10, 20, 20) and found.levels_bytes[3:] == (20 + 90, 10 + 90)


def test_the_first_blocks_are_checkpointed_and_only_those_that_may_be() -> None:
    found = able(profile(4))
    first = dataclasses.replace(found.blocks[0], checkpointable=False)
    chosen = checkpointed(dataclasses.replace(found, blocks=(first, *found.blocks[1:])), 2, Action.OFFLOAD)
    keep, whole = (Action.KEEP, Action.KEEP), (Action.OFFLOAD, Action.CHECKPOINT)
    assert chosen == (keep, whole, whole, keep)


def test_blocks_whose_recipes_cost_more_than_a_second_forward_are_checkpointed_within_a_budget() -> None:
    found = fit(dear(), 450)
    assert found.predicted.peak_bytes <= 450
    whole = sum(Action.CHECKPOINT in actions for actions in found.assignment)
    assert 0 < whole < 8
    assert found.predicted.overhead_seconds == pytest.approx(whole)
    assert found.bound_seconds <= found.predicted.overhead_seconds
    assert found.predicted.overhead_seconds < dear().forward_seconds


def test_the_bound_of_a_plan_without_checkpoints_is_one_of_those_with_them_too() -> None:
    recipes = Search(dear()).simulated([(Action.KEEP, Action.RECOMPUTE)] * 8)
    assert recipes.predicted.overhead_seconds == pytest.approx(8 * 5.0)
    second_forwards = Search(dear()).simulated(checkpointed(dear(), 8, Action.KEEP))
    assert recipes.bound_seconds == pytest.approx(second_forwards.bound_seconds, rel=0.02)
    assert 0 < recipes.bound_seconds <= second_forwards.predicted.overhead_seconds


def test_and_within_a_slowdown() -> None:
    found = shrink(dear(), 0.1)  # of 24 s: two blocks
    assert sum(Action.CHECKPOINT in actions for actions in found.assignment) == 2
    assert not any(Action.CHECKPOINT in actions for actions in shrink(dear(), 0.01).assignment)


def test_cheap_recipes_are_not_replaced_by_a_checkpoint() -> None:
    for found in (fit(dear(recompute_seconds=0.01), 450), shrink(dear(recompute_seconds=0.01), 0.1)):
        assert not any(Action.CHECKPOINT in actions for actions in found.assignment)


def test_the_smallest_peak_may_be_checkpointings() -> None:
    units = (dataclasses.replace(unit("input", 10), block_input=True), unit("other", 90, movable=False))
    only = able(alike(8, units, SLOW, beside=7))
    peak_bytes = checkpointed_peak(only)
    assert Search(only).smallest.predicted.peak_bytes <= peak_bytes
    assert fit(only, peak_bytes).predicted.peak_bytes <= peak_bytes
