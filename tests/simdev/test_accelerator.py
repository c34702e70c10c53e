"""Differences between accelerators, and settings of user scripts, shown on the simulated device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ebbtide
from benchmarks import first_contact
from benchmarks.results_folder import write_result
from benchmarks.suites import link, overhead
from ebbtide.config import Target
from ebbtide.store import open_tier
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.host import HostTier
from ebbtide.store.speed import incompressible, measure_speed
from tests.gpu.test_first_light import _batch, _model, _same, _step
from tests.simdev.device import configured, counters

DEVICE = torch.device("privateuseone", 0)  # its name even where it cannot be built
MIB = 1 << 20


@pytest.fixture
def untimed() -> Iterator[None]:
    with configured(timed_events=0):
        yield


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("policy", ["offload", "auto"])
def test_training_on_a_device_whose_events_keep_no_time(policy: str) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    plain = _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle:
        for _ in range(6):
            before = handle.stats().total_copy_in_bytes
            assert _same(plain, _step(model, x))
        stats = handle.stats()
        assert stats.total_stall_seconds == 0 and handle.explain()
        assert policy == "auto" or stats.total_copy_in_bytes > before


@pytest.mark.usefixtures("untimed")
def test_rates_of_a_device_whose_events_keep_no_time() -> None:
    tier = HostTier(AcceleratorDevice())
    with configured(copy_bytes_per_s=10**9):
        found = measure_speed(tier, DEVICE, most_bytes=64 * MIB)
    tier.close()
    for rate in (found.out_bytes_per_second, found.in_bytes_per_second):
        assert 0 < rate <= 1e9  # the host waited at least as long as the copy took


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the device without pinned memory: neither torch's own, nor any that its runtime registers."""
    monkeypatch.delattr(torch.get_device_module(DEVICE), "cudart")
    monkeypatch.setattr(AcceleratorDevice, "_can_pin", staticmethod(lambda: False))


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_training_on_a_device_without_pinned_memory(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    plain, before = _step(model, x), counters()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle:
        for _ in range(6):
            assert _same(plain, _step(model, x))
        stats = handle.stats()
    assert stats.total_copy_out_bytes > 0 and stats.store["host_pinned_bytes"] == stats.live_tickets == 0
    assert counters().get("registrations") == before.get("registrations")
    assert len([r for r in caplog.records if "copies to host memory are synchronous" in r.getMessage()]) == 1


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_host_memory_is_host_memory_whatever_the_default_device() -> None:
    device = AcceleratorDevice()
    assert device._can_pin() and device.capabilities.pinned_host
    assert device.allocate_host(4096, pinned=False).device.type == "cpu"
    device._registrar = None  # as on a device that pins through torch's allocator
    assert device.allocate_host(4096, pinned=True).is_pinned()
    assert torch.equal(incompressible(1000, DEVICE).cpu(), incompressible(1000, torch.device("cpu")))


@pytest.mark.usefixtures("default_device")
def test_training_under_a_default_device() -> None:
    model, x = _model(width=64, depth=3).to(DEVICE), _batch(width=64, tokens=64).to(DEVICE)
    plain = _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window="1B") as handle:
        for _ in range(3):
            assert _same(plain, _step(model, x))
        assert handle.stats().total_copy_in_bytes > 0


def test_the_overhead_suite_moves_bytes_in_every_pass() -> None:
    way = overhead.variants()["offload"]
    x = torch.linspace(0.1, 1.0, 4096, device=DEVICE).view(overhead.SHAPE)
    for _ in range(3):
        before = way.copied_bytes()
        way.run(x)
        assert way.copied_bytes() - before >= overhead.SAVED * x.nbytes - overhead.WINDOW_BYTES > 0


def test_a_forward_before_the_model_is_moved_says_nothing_about_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    stack = _model(width=64, depth=3).cpu()
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), stack), _batch(width=64, tokens=64).cpu()
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        before = handle.blocks
        model(x).sum().backward()
        assert handle.blocks == before and handle.stats().coverage_percent is None
        model.to(DEVICE)
        model(x.to(DEVICE)).sum().backward()
        assert (handle.stats().coverage_percent or 0) > 50
    assert not [r for r in caplog.records if "of what autograd saves" in r.getMessage()]


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_a_step_that_is_captured_runs_as_without_ebbtide(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    plain = _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle:
        for _ in range(2):
            assert _same(plain, _step(model, x))
        before = counters()
        with configured(capturing=1):  # an event that the host queries or waits for raises
            captured = [_step(model, x) for _ in range(2)]
        after = counters()
        assert all(_same(plain, found) for found in captured)
        for name in ("bytes_out", "bytes_in", "registrations"):
            assert after[name] == before[name]
        assert len([r for r in caplog.records if "capture of a device graph" in r.getMessage()]) == 1
        assert _same(plain, _step(model, x)) and handle.stats().live_tickets == 0
    assert counters()["bytes_in"] > after["bytes_in"] or policy == "auto"


def test_a_context_first_entered_in_a_capture_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ebbtide.api._idle_engines", {})
    x, before = _batch(width=64, tokens=64).requires_grad_(), counters()
    with configured(capturing=1), ebbtide.offload_saved_tensors(min_bytes=0) as captured:
        x.exp()
    assert counters().get("registrations") == before.get("registrations") and captured.stats().packs == 0
    assert [r.getMessage() for r in caplog.records] == ["nothing is offloaded inside the capture of a device graph"]
    with ebbtide.offload_saved_tensors(min_bytes=0) as offloaded:
        loss = x.exp().sum()
    loss.backward()
    assert offloaded._latest is not None and not cast("Any", offloaded._latest.tier).host.synchronous
    assert offloaded.stats().packs > 0


def test_each_context_offloads_as_much_as_the_first_did_but_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one block: what is held back for backward would be all of it."""
    monkeypatch.setattr("ebbtide.api._idle_engines", {})
    model, x = torch.nn.Sequential(*(torch.nn.GELU() for _ in range(20))), torch.randn(1 << 20, device=DEVICE)
    shares: list[float] = []
    for _ in range(3):
        with ebbtide.offload_saved_tensors() as offloaded:
            loss = model(x.requires_grad_()).sum()
        loss.backward()
        stats = offloaded.stats()
        shares.append(stats.offloaded_bytes / stats.unique_bytes)
    assert shares[0] == 1 and all(share > 0.75 for share in shares)


@pytest.mark.parametrize(
    ("device", "target", "warned"), [("cpu", "auto", True), (DEVICE, "auto", False), ("cpu", "disk", False)]
)
def test_a_model_on_the_cpu_of_a_machine_with_a_device_is_named(
    device: torch.device | str, target: Target, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ebbtide.enable_activation_offloading(_model(width=64, depth=3).to(device), target=target).close()
    lines = [r.getMessage() for r in caplog.records if "the model is on the CPU" in r.getMessage()]
    assert len(lines) == warned and all("hint: " in line and "offloaded" in line for line in lines)


def test_keep_names_what_is_not_counted_and_no_store(caplog: pytest.LogCaptureFixture) -> None:
    ebbtide.enable_activation_offloading(_model(width=64, depth=3).to("cpu"), policy="keep").close()
    (line,) = [r.getMessage() for r in caplog.records if "the model is on the CPU" in r.getMessage()]
    assert "only tensors on that are counted; hint: " in line and "offloaded" not in line and "target" not in line


def test_the_budget_of_host_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """If memory is small at the start, so is the budget, and the rest goes to disk."""
    with caplog.at_level("INFO", logger="ebbtide.store"):
        open_tier("host", host_budget_bytes=64 * MIB).close()
    assert [r.getMessage() for r in caplog.records if "host memory" in r.getMessage()] == [
        "host memory for offloaded tensors: 64.0 MiB at most"
    ]


def test_first_contact() -> None:
    with configured(copy_delay_us=2000):
        found = list(first_contact.answers(copied_bytes=8 * MIB))
    assert len(found) > 12 and [answer for *answer, right in found if not right] == []


def test_the_link_suite_times_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--small", "--tokens", "64", "--pairs", "2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["link", *given])
    link.main()
    found = json.loads((tmp_path / "run.json").read_text())["runs_bytes_per_second"]
    assert len(found["tier_out"]) == len(found["tier_in"]) == 2 and min(found["tier_out"] + found["tier_in"]) > 0


def test_results_of_the_simulated_device_say_so(tmp_path: Path) -> None:
    write_result(tmp_path, {"suite": "none"}, "# A suite\n\nFigures.\n")
    title, _, said, *rest = (tmp_path / "README.md").read_text().splitlines()
    assert (title, rest) == ("# A suite", ["", "Figures."]) and said.startswith("**Simulated**")
    assert json.loads((tmp_path / "run.json").read_text())["simulated"] is True
