"""Places in the file never overlap or leak, and always merge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.store.extents import PLACE_ALIGN_BYTES, Extents, round_up

ACTIONS = st.lists(st.one_of(st.integers(1, 40_000), st.integers(-50, -1)), max_size=120)


@given(ACTIONS)
def test_places(actions: list[int]) -> None:
    extents, live = Extents(), dict[int, int]()
    for action in actions:
        if action > 0:
            place = extents.reserve(action)
            if place is None:
                before = extents.size_bytes
                need = round_up(action) - extents.free_end_bytes
                extents.grow(need)
                place = extents.reserve(action)
                assert place == before + need - round_up(action)
            assert place % PLACE_ALIGN_BYTES == 0 and place + action <= extents.size_bytes
            assert all(place + round_up(action) <= p or p + round_up(n) <= place for p, n in live.items())
            live[place] = action
        elif live:
            place = sorted(live)[action % len(live)]
            extents.release(place, live.pop(place))
        assert extents.used_bytes == sum(map(round_up, live.values()))
        assert extents.free_bytes == sum(length for _, length in extents._free)
    for place, nbytes in live.items():
        extents.release(place, nbytes)
    assert extents.used_bytes == 0
    assert [offset for offset, _ in extents._free] == ([0] if extents.size_bytes else [])
    assert extents.free_end_bytes == extents.size_bytes


def test_a_place_freed_twice_is_refused() -> None:
    extents = Extents()
    extents.grow(3 * PLACE_ALIGN_BYTES)
    place = extents.reserve(10)
    assert place == 0
    extents.release(place, 10)
    with pytest.raises(ValueError, match="overlaps"):
        extents.release(place, 10)
