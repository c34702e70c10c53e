"""What a checkpointed block would save, from what a block of its kind saved."""

from __future__ import annotations

import pytest

from ebbtide.engine.stats import Tally


@pytest.mark.parametrize(
    ("seen_bytes", "input_bytes", "expected"),
    [
        pytest.param(10, 20, 200, id="in proportion"),
        pytest.param(0, 20, 300, id="after a block without inputs that need gradients"),
        pytest.param(10, 0, 300, id="of a first block whose inputs need none, as after frozen embeddings"),
    ],
)
def test_a_checkpointed_block_would_save_what_its_kind_saves(seen_bytes: int, input_bytes: int, expected: int) -> None:
    seen, run = Tally(), Tally()
    seen.unique, seen.input_bytes, seen.largest_input_bytes = 100, seen_bytes, 20
    run.input_bytes, run.largest_input_bytes = input_bytes, 60
    assert seen.unique_for(run) == expected
