from __future__ import annotations

from typing import Any

import pytest

from ebbtide.base.events import BUS, Bus

Heard = list[tuple[str, dict[str, Any]]]


def test_every_listener_hears_every_event_in_order() -> None:
    bus, one, other = Bus(), Heard(), Heard()
    bus.subscribe(lambda kind, fields: one.append((kind, fields)))
    bus.emit("begin", step=1)
    bus.subscribe(lambda kind, fields: other.append((kind, fields)))
    bus.emit("end", step=1, seconds=0.5)
    assert one == [("begin", {"step": 1}), ("end", {"step": 1, "seconds": 0.5})]
    assert other == [("end", {"step": 1, "seconds": 0.5})]


def test_active_says_whether_anybody_listens() -> None:
    bus = Bus()
    assert not bus.active
    removers = [bus.subscribe(lambda kind, fields: None) for _ in range(2)]
    removers[0]()
    assert bus.active
    removers[1]()
    assert not bus.active


def test_removing_twice_removes_nobody_else() -> None:
    bus, heard = Bus(), Heard()
    remove = bus.subscribe(lambda kind, fields: heard.append(("removed", {})))
    bus.subscribe(lambda kind, fields: heard.append((kind, fields)))
    remove()
    remove()
    bus.emit("step")
    assert heard == [("step", {})]


def test_a_listener_may_leave_while_it_is_being_told() -> None:
    bus, heard = Bus(), Heard()
    remove = bus.subscribe(lambda kind, fields: remove())
    bus.subscribe(lambda kind, fields: heard.append((kind, fields)))
    bus.emit("a")
    bus.emit("b")
    assert [kind for kind, _ in heard] == ["a", "b"]


def test_what_a_listener_raises_reaches_the_emitter() -> None:
    bus = Bus()

    def broken(kind: str, fields: dict[str, Any]) -> None:
        raise OSError("disk full")

    bus.subscribe(broken)
    with pytest.raises(OSError, match="disk full"):
        bus.emit("step")


def test_the_process_has_one_bus_of_its_own() -> None:
    assert isinstance(BUS, Bus)
