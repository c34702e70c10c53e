"""Measuring this machine: sizes that follow its speed and memory, and dtypes that it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ebbtide.base.errors import DataError, DiskError, TargetError
from ebbtide.planner.machines import MACHINES, machine_named
from ebbtide.profiling import hardware as here
from ebbtide.store.location import filesystem_of
from ebbtide.store.speed import Speed

CPU = torch.device("cpu")
SPEED = Speed(out_bytes_per_second=2e9, in_bytes_per_second=1e9)


class Clock:
    """Stand-in for the duration of work: a time per unit of the size that was prepared last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.size, self.kind, self.spent = 0, torch.float32, 0.0
        self._seconds = seconds
        monkeypatch.setattr(here, "_seconds", self._time)

    def prepare(self, size: int, kind: torch.dtype) -> here.Work:
        self.size, self.kind = size, kind
        return lambda: None

    def _time(self, device: torch.device, work: here.Work) -> float:
        work()
        self.spent += self._seconds(self.size)
        return self._seconds(self.size)


def rate(clock: Clock, sizes: list[int], prepare: Callable[[int, torch.dtype], here.Work] | None = None) -> float:
    dtypes = (torch.bfloat16, torch.float16)
    return here._rate(CPU, dtypes, sizes, lambda side: 2.0 * side**3, prepare or clock.prepare)


@pytest.mark.parametrize("per_second", [1e8, 5e9, 1e11, 1e15])
def test_work_grows_until_it_can_be_timed_and_no_further(monkeypatch: pytest.MonkeyPatch, per_second: float) -> None:
    clock = Clock(monkeypatch, lambda side: 2.0 * side**3 / per_second)
    assert rate(clock, here._sizes(128, 2048)) == pytest.approx(per_second)
    assert clock.spent < 1.0


def test_a_busy_machine_is_not_taken_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda side: max(0.02, 2.0 * side**3 / 1e12))  # threads wait for each other
    assert rate(clock, here._sizes(128, 2048)) > 0.8 * 2.0 * 1024**3 / 0.02
    assert clock.spent < 1.5


def test_a_first_call_that_loads_libraries_does_not_end_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [2.0]
    clock = Clock(monkeypatch, lambda side: (first.pop() if first else 0.0) + 2.0 * side**3 / 7e14)
    monkeypatch.setattr(here, "_seconds", lambda device, work: clock._seconds(clock.size))
    rate(clock, here._sizes(1024, 8192))
    assert clock.size > 4096


def test_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 0.05, 0.01, 0.2])
    monkeypatch.setattr(here, "_seconds", lambda device, work: next(times))
    assert here._rate(CPU, (torch.float32,), [1], lambda size: 1.0, lambda size, kind: lambda: None) == 20.0


def test_a_kind_of_number_that_is_not_there_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda side: 1.0)

    def prepare(size: int, kind: torch.dtype) -> here.Work:
        if kind is torch.bfloat16:
            raise TypeError("no bfloat16 here")
        return clock.prepare(size, kind)

    assert rate(clock, [10], prepare) == 2000.0
    assert clock.kind is torch.float16


def test_memory_that_ends_leaves_the_size_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda side: 0.001)

    def prepare(size: int, kind: torch.dtype) -> here.Work:
        if size > 20:
            raise torch.OutOfMemoryError("no more")
        return clock.prepare(size, kind)

    assert rate(clock, [10, 20, 40], prepare) == pytest.approx(2.0 * 20**3 / 0.001)


def test_a_device_that_computes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(size: int, kind: torch.dtype) -> here.Work:
        raise RuntimeError("nothing works")

    with pytest.raises(TargetError, match=r"(?s)cpu cannot be measured \(nothing works\); expected .*hint: stop other"):
        rate(Clock(monkeypatch, lambda side: 1.0), [10], prepare)


def test_sizes_rise_by_half_and_never_pass_the_last() -> None:
    assert here._sizes(128, 512) == [128, 192, 256, 384, 512]
    assert here._fitting([1024, 2048], 100) == [1024]
    assert here._fitting([1024, 2048, 4096], 3000) == [1024, 2048]


def test_little_memory_is_not_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "fair_share_bytes", lambda **_: 0)
    assert here._spare_bytes(CPU) == 64 << 20
    sizes: list[int] = []
    monkeypatch.setattr(here, "_rate", lambda device, dtypes, found, amount, prepare: sizes.extend(found) or 1.0)
    here._copies(CPU)
    here._products(CPU, (torch.float32,))
    here._attention(CPU)
    assert max(sizes[:4]) * 2 <= 64 << 20  # both ends of a copy
    assert max(sizes[4:]) <= 2048


def test_this_machine_can_be_written_and_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(here, "measured_speed", lambda target, disk_path: SPEED)
    before = torch.get_rng_state()
    machine = here.measured_machine()
    assert torch.equal(before, torch.get_rng_state())
    assert (machine.out_bytes_per_second, machine.in_bytes_per_second) == (2e9, 1e9)
    machine.save(tmp_path / "machine.json")
    assert machine_named(tmp_path / "machine.json") == machine


def test_a_machine_file_may_have_the_field_that_said_that_the_store_is_a_disk_by_its_old_name(tmp_path: Path) -> None:
    path, fields = tmp_path / "machine.json", asdict(MACHINES["h200"])
    del fields["stores_on_disk"]
    path.write_text(json.dumps(fields | {"can_cancel": True}))
    assert machine_named(path) == replace(MACHINES["h200"], stores_on_disk=True)
    path.write_text(json.dumps(fields | {"can_cancel": True, "stores_on_disk": False}))
    with pytest.raises(DataError, match="can_cancel"):
        machine_named(path)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_where_bytes_wait_on_this_machine(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    speed = here.measured_speed("disk", str(tmp_path))
    assert speed.out_bytes_per_second > 0 and speed.in_bytes_per_second > 0
    with pytest.raises(DiskError, match="does not exist"):
        here.measured_speed("auto", str(tmp_path / "none"))
    with pytest.raises(TargetError, match="target='host' needs an accelerator"):
        here.measured_speed("host", None)
