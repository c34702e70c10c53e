"""The window follows the blocks of the plan that is in force."""

from __future__ import annotations

import ebbtide
from ebbtide.schedule.window import LEAST_WINDOW, Window
from tests.helpers.models import build


def test_it_is_as_large_as_the_largest_block_until_another_plan_is_in_force() -> None:
    window = Window(None)
    for nbytes in (5 * LEAST_WINDOW, LEAST_WINDOW):
        window.saw_block(nbytes)
    assert (window.out_bytes, window.in_bytes) == (10 * LEAST_WINDOW, 5 * LEAST_WINDOW)
    window.forget_blocks()
    assert window.in_bytes == LEAST_WINDOW
    window.saw_block(2 * LEAST_WINDOW)
    assert (window.out_bytes, window.in_bytes) == (4 * LEAST_WINDOW, 2 * LEAST_WINDOW)


def test_a_plan_that_keeps_everything_leaves_no_window_of_the_warm_up() -> None:
    tiny = build("mlp")
    with ebbtide.enable_activation_offloading(tiny.model, policy=ebbtide.Auto(max_slowdown=0.0), min_bytes=0) as handle:
        tiny.step()
        assert handle._engine._window._block_bytes > 0
        for _ in range(4):
            tiny.step()
        assert handle.stats().offloaded_bytes == 0 and handle._engine._window._block_bytes == 0
