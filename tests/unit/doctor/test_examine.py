"""The complete examination of a machine with made-up rates, and its failures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.base.errors import DiskFullError, TargetError
from ebbtide.doctor import examine as the_function
from ebbtide.doctor.facts import VARIABLES
from ebbtide.doctor.findings import findings
from ebbtide.store.speed import Speed
from tests.unit.doctor.made_up import SERVER, SMALL, changed

no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, its measurements made up."""
    import importlib

    module = importlib.import_module("ebbtide.doctor.examine")
    monkeypatch.setattr(
        module,
        "measured_speed",
        lambda target, path: Speed(out_bytes_per_second=1e9, in_bytes_per_second=2e9),
    )
    monkeypatch.setattr(module, "machine_with", lambda speed: SMALL.machine)
    return module


@no_accelerator
def test_this_machine(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = the_function()
    assert found.facts.machine is SMALL.machine
    assert (found.facts.target, found.facts.ranks, found.facts.bus) == ("disk", 2, None)
    assert found.facts.environment == {"LOCAL_WORLD_SIZE": "2"}
    assert found.findings == findings(found.facts)


@no_accelerator
def test_a_path_that_cannot_serve_is_a_finding_and_not_measured(
    room: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(room, "measured_speed")
    found = the_function(disk_path=str(tmp_path / "none"))
    assert not found.healthy and [x.code for x in found.findings if x.severity == "problem"] == ["EBB011"]
    assert found.facts.machine is None


@no_accelerator
def test_a_missing_target_is_a_finding() -> None:
    found = the_function("host")
    (problem,) = (finding for finding in found.findings if finding.severity == "problem")
    assert problem.code == "EBB002" and "target='host' needs an accelerator, and none was found" in problem.what
    assert problem.hint == "without a GPU, RAM is the memory to save, so activations are offloaded to disk"


@pytest.mark.parametrize("error", [DiskFullError("no room", hint="make some"), TargetError("no memory", hint="x")])
def test_a_failed_measurement_is_reported(room: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def fail(target: str, path: str | None) -> Speed:
        raise error

    monkeypatch.setattr(room, "measured_speed", fail)
    found = room.measure(changed(SMALL, machine=None))
    assert (found.unmeasured, found.advice, found.machine) == (error.found, error.hint, None)


def test_a_broken_disk_does_not_keep_the_link_from_being_measured(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    speed = Speed(out_bytes_per_second=1e9, in_bytes_per_second=2e9)
    monkeypatch.setattr(room, "measured_speed", lambda target, path: asked.append((target, path)) or speed)
    facts = changed(SERVER, machine=None, disk__requested=True, disk__path="/x")
    room.measure(changed(facts, disk__refused="it is missing"))
    room.measure(facts)
    assert asked == [("host", None), ("host", "/x")]


def test_the_link_is_read_again_when_the_device_has_worked(room: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    assert room.measure(changed(SERVER, bus__speed=2.5), root=tmp_path).bus.speed == 32.0


@no_accelerator
def test_warnings_of_the_store_are_findings_here(room: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ebbtide.store")
    the_function("host")
    assert caplog.records == [] and logger.disabled is False
