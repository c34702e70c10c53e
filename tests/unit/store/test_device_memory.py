"""The device's memory is read from the device's module if ``torch.accelerator`` lacks it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ebbtide.store import meter
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.device import Device, FreeMemory
from ebbtide.store.device_memory import (
    allocator_figures,
    allowed_bytes,
    device_memory,
    free_and_total_bytes,
    peak_bytes,
    take_peak_bytes,
)
from ebbtide.store.meter import DeviceMeter, HostMeter

WHERE = torch.device("cuda", 1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the stand-in for the module of the device, under a ``torch.accelerator`` as in torch 2.8."""
    module = SimpleNamespace(memory_allocated=lambda: 7, mem_get_info=lambda where: (3, 10))
    accelerator = SimpleNamespace(current_accelerator=lambda: WHERE)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(torch, "get_device_module", lambda where: module if where == WHERE else None)
    return module


def test_an_older_torch_has_it_in_the_module_of_the_device(module: SimpleNamespace) -> None:
    assert device_memory() is module
    assert free_and_total_bytes() == free_and_total_bytes(WHERE) == (3, 10)


def test_free_memory_that_no_module_has_is_unknown(module: SimpleNamespace) -> None:
    del module.mem_get_info
    assert free_and_total_bytes() is None and allowed_bytes() is None


@pytest.mark.parametrize(("share", "reserved", "allowed"), [(1.0, 7, 3), (0.8, 7, 1), (0.5, 7, 0), (0.8, 4, 3)])
def test_the_share_of_the_process_limits_what_is_allowed(
    module: SimpleNamespace, share: float, reserved: int, allowed: int
) -> None:
    assert allowed_bytes() == 3  # a device without shares
    module.get_per_process_memory_fraction = lambda where: share
    module.memory_stats = lambda where: {"reserved_bytes.all.current": reserved}
    assert allowed_bytes() == allowed


@pytest.mark.parametrize("active", [0, 6], ids=["cudaMallocAsync", "native"])
def test_allocated_memory_is_not_free_where_active_memory_is_not_counted(module: SimpleNamespace, active: int) -> None:
    figures = {"reserved": 9, "active": active, "allocated": 5}
    stats = {f"{name}_bytes.all.current": nbytes for name, nbytes in figures.items()} | {"num_alloc_retries": 2}
    module.memory_stats = lambda where: stats
    found = AcceleratorDevice.free_memory(cast("AcceleratorDevice", None), WHERE)
    assert found == FreeMemory(free_bytes=3 + 9 - max(active, 5), flushes=2)


def test_a_newer_torch_has_it_for_all_devices(module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 8, raising=False)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda where: (4, 10), raising=False)
    assert device_memory() is torch.accelerator
    assert free_and_total_bytes(WHERE) == (4, 10)


def test_peaks_before_a_reset_are_remembered(module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    peak, now = [900], 100
    module.memory_stats = lambda where: {"allocated_bytes.all.peak": peak[0]}
    module.reset_peak_memory_stats = lambda where: peak.__setitem__(0, now)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1, raising=False)
    monkeypatch.setattr("ebbtide.store.device_memory._highest", {})
    assert take_peak_bytes(WHERE) == 900 and peak == [now]
    assert peak_bytes() == peak_bytes(1) == 900
    assert take_peak_bytes() == now and peak_bytes() == 900


def test_tensors_of_no_accelerator_have_no_peak_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "take_peak_bytes", lambda where: 10)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: True))
    assert DeviceMeter(cast("Device", None)).take_peak_bytes(torch.device("cpu")) is None


def test_figures_are_read_where_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("allocated_bytes", "active_bytes", "reserved_bytes")
    nested = {name: {"all": {"current": n, "peak": 10 * n}} for n, name in enumerate(names, 1)}
    monkeypatch.setattr(torch.accelerator, "memory_stats", None, raising=False)  # which is slow
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True, raising=False)
    read = {1: {**nested, "num_alloc_retries": 7}}.__getitem__
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", read, raising=False)
    assert allocator_figures(WHERE) == (1, 10, 2, 3, 7)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: False)
    assert allocator_figures(WHERE) == (0, 0, 0, 0, 0)


def test_meters_do_not_take_each_others_peaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reading resets the process's peak, for all of them."""
    peak = [100]
    monkeypatch.setattr(meter, "take_peak_bytes", lambda where: peak.pop() if peak else 10)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: True))
    one, other = DeviceMeter(cast("Device", None)), DeviceMeter(cast("Device", None))
    assert [one.take_peak_bytes(WHERE), one.take_peak_bytes(WHERE)] == [100, 10]
    assert [other.take_peak_bytes(WHERE), other.take_peak_bytes(WHERE)] == [100, 10]
    status = tmp_path / "status"
    monkeypatch.setattr(meter, "_STATUS", status)
    monkeypatch.setattr(meter, "_CLEAR", tmp_path / "clear")
    host, another = HostMeter(), HostMeter()
    found: list[int | None] = []
    for now, who in ((100, host), (20, another), (300, another), (20, host), (20, host)):
        status.write_text(f"VmHWM: {now} kB\n")
        found.append(who.take_peak_bytes())
    assert found == [kib * 1024 for kib in (100, 100, 300, 300, 20)]
