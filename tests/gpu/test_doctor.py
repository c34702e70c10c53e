"""The doctor's report on a machine with an accelerator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ebbtide.cli as cli
from ebbtide.doctor.device import look_at_device
from ebbtide.profiling.hardware import device_here

pytestmark = pytest.mark.gpu


def test_the_device_says_what_it_is() -> None:
    found = look_at_device()
    assert found.kind == device_here().type != "cpu"
    assert found.count == torch.accelerator.device_count()
    assert 0 < found.free_bytes <= found.memory_bytes
    assert found.pinned is not None and found.asynchronous is not None
    if found.kind == "cuda":
        assert found.address is not None and Path("/sys/bus/pci/devices", found.address).parent.is_dir()


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["healthy"] else 1)
    assert found["facts"]["target"] == "host" and found["facts"]["unmeasured"] is None
    machine = found["machine"]
    simulated = device_here().type == "simdev"  # its rates are those of a busy machine
    assert machine["flop32_per_second"] > 0
    assert machine["flop_per_second"] > (0 if simulated else machine["flop32_per_second"])
    least = 0 if simulated else 1e9
    assert machine["out_bytes_per_second"] > least and machine["in_bytes_per_second"] > least
