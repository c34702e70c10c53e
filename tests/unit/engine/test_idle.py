"""Idle engines: those of host memory stay, those of a disk last as long as somebody else holds them."""

from __future__ import annotations

from ebbtide.engine.idle import IdleEngines
from tests.helpers.engines import open_engine


def test_an_engine_of_host_memory_is_kept() -> None:
    idle = IdleEngines()
    with open_engine() as engine:
        idle.add(engine)
        number = engine.number
        del engine
    found = idle.take()
    assert found is not None and found.number == number and idle.take() is None


def test_an_engine_on_disk_is_found_while_others_hold_it() -> None:
    idle = IdleEngines()
    with open_engine(tier="disk") as first, open_engine(tier="disk") as second:
        idle.add(first)
        idle.add(second)
        assert idle.take() is second and idle.take() is first and idle.take() is None


def test_dead_engines_are_forgotten() -> None:
    idle = IdleEngines()
    for _ in range(5):
        with open_engine(tier="disk") as engine:
            idle.add(engine)
            del engine
        with open_engine(tier="disk") as engine:
            assert idle.take() is None and not idle._found
            idle.add(engine)
            del engine
    assert len(idle._found) == 1
