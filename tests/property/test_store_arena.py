"""Random lives of places: none overlap, all are counted, nothing is wasted, and no copy is forgotten."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.store.arena import PLACE_ALIGN_BYTES, Arena, Place
from ebbtide.store.extents import Extents, round_up
from tests.helpers.fakedevice import FakeDevice

CPU = torch.device("cpu")
LEAST_CHUNK_BYTES = 2 << 20
SIZES = st.one_of(st.integers(1, 300), st.integers(60_000, 1_500_000))
ACTIONS = st.lists(
    st.one_of(st.tuples(st.just("take"), SIZES), st.tuples(st.sampled_from(["give", "lose", "trim"]), st.integers(0))),
    max_size=60,
)


def rounded(places: list[Place]) -> int:
    return sum(round_up(place.nbytes, PLACE_ALIGN_BYTES) for place in places)


def addresses(place: Place) -> list[tuple[int, int]]:
    return [(part.data_ptr(), part.data_ptr() + part.numel()) for part in place.parts]


@given(ACTIONS)
def test_places_are_apart_counted_and_packed(actions: list[tuple[str, int]]) -> None:
    device = FakeDevice(1e9, 1e9)
    arena, places = Arena(device, None), list[Place]()
    most = 0
    for action, number in actions:
        if action == "take":
            place = arena.take(number)
            assert sum(part.numel() for part in place.parts) == place.nbytes == number
            for first, end in addresses(place):
                assert first % PLACE_ALIGN_BYTES == 0
                assert all(end <= f or e <= first for other in places for f, e in addresses(other))
            places.append(place)
            del place
        elif action == "trim":
            arena.trim()
        elif places:
            place = places.pop(number % len(places))
            if action == "give":
                arena.give(place)
            del place
        most = max(most, rounded(places))
        found = arena.gauges()
        assert found["host_used_bytes"] == sum(place.nbytes for place in places) <= found["host_most_used_bytes"]
        assert rounded(places) <= found["host_held_bytes"] == device.host_bytes
        assert found["host_held_bytes"] <= max(most * 1.03, most + LEAST_CHUNK_BYTES) + 4096
    places.clear()
    gc.collect()
    arena.clear()
    assert arena.used_bytes == 0 and device.host_bytes == 0


@given(st.lists(SIZES, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_a_step_like_the_one_before_needs_nothing_new(sizes: list[int], random: object) -> None:
    device = FakeDevice(1e9, 1e9)
    arena, calls = Arena(device, None), 0
    for _ in range(4):
        places = [arena.take(size) for size in sizes]
        random.shuffle(places)  # type: ignore[attr-defined]  # given back in any order
        for place in places:
            arena.give(place)
        arena.trim()
        calls = calls or device.host_calls
        assert device.host_calls == calls


COPIES = st.lists(
    st.tuples(st.sampled_from(["take", "copy", "give", "lose"]), st.integers(0, 5), st.integers(0, 20)), max_size=50
)


@given(COPIES)
def test_the_taker_of_bytes_sees_every_copy_that_runs_in_them(actions: list[tuple[str, int, int]]) -> None:
    device = FakeDevice(1.0, 1.0)  # so slow that no copy finishes
    arena, places = Arena(device, 1024), list[Place]()
    streams = [device.side_stream(CPU, f"s{number}") for number in range(3)]
    running: dict[int, tuple[str, int]] = {}  # line of the arena → stream and number of its last copy

    def lines(place: Place) -> list[int]:
        spans = place.region.spans
        return [line for first, length in spans for line in range(first // 64, (first + length) // 64)]

    for action, number, size in actions:
        if action == "take" and (arena.free_bytes or 0) >= round_up(1 + size * 9, PLACE_ALIGN_BYTES):
            place = arena.take(1 + size * 9)
            told: dict[str, int] = {}
            for event in place.region.guard.events(device):
                for name, count in event.seen.items():
                    told[name] = max(told.get(name, 0), count)
            for stream, count in (running[line] for line in lines(place) if line in running):
                assert told.get(stream, 0) >= count
            places.append(place)
        elif places:
            place = places[number % len(places)]
            if action == "copy":
                stream = streams[size % 3]
                for event in place.region.guard.events(device):
                    device.wait(stream, event)
                place.region.guard.claim(stream)
                count = stream.step()
                running.update(dict.fromkeys(lines(place), (stream.name, count)))
                if size % 2:  # else an interrupt comes before its event is recorded
                    place.region.guard.done(device)
            elif action in ("give", "lose"):
                places.remove(place)
                if action == "give":
                    arena.give(place)
        place = None  # type: ignore[assignment]


@given(st.lists(st.one_of(st.integers(1, 40_000), st.integers(-50, -1)), max_size=80))
def test_what_is_gathered_is_what_is_free(actions: list[int]) -> None:
    extents, live = Extents(64), list[list[tuple[int, int]]]()
    extents.grow(64 * 1000)
    for action in actions:
        if action > 0:
            free = extents.free_bytes
            found = extents.gather(action)
            assert (found is not None) == (free >= round_up(action, 64))
            if found is not None:
                assert sum(length for _, length in found) == round_up(action, 64) == free - extents.free_bytes
                spans = sorted([*(span for spans in live for span in spans), *found])
                assert all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
                live.append(found)
        elif live:
            for first, length in live.pop(action % len(live)):
                extents.release(first, length)
    for first, length in (span for spans in live for span in spans):
        extents.release(first, length)
    assert extents.free_end_bytes == extents.free_bytes == 64 * 1000
    extents.cut(6400)
    assert extents.size_bytes == extents.free_bytes == 6400
    extents.cut(0)
    assert extents.free_bytes == 0
