"""Measuring a tier: the exact rates of a simulated device, a real disk, and missing resources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.base.errors import DiskFullError
from ebbtide.store import DiskTier, HostTier
from ebbtide.store.speed import PIECES, incompressible, measure_speed
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.slots import small_disk

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.mark.parametrize(("out", "into"), [(1e9, 1e9), (2e9, 1e9), (1e8, 4e8), (3e6, 1e9)])
def test_the_rates_of_a_device_are_found_exactly(out: float, into: float) -> None:
    device = FakeDevice(out, into)
    tier = HostTier(device, budget_bytes=1 << 30)
    found = measure_speed(tier, CPU, most_bytes=64 * MIB)
    assert found.out_bytes_per_second == pytest.approx(out)
    assert found.in_bytes_per_second == pytest.approx(into)
    assert device.violations == []
    assert tier.used_bytes == 0
    tier.close()


def test_no_more_memory_is_taken_than_was_allowed() -> None:
    device = FakeDevice(1e12, 1e12)
    tier = HostTier(device, budget_bytes=1 << 30)
    measure_speed(tier, CPU, most_bytes=64 * MIB)
    assert device.host_bytes <= 64 * MIB + 2 * MIB
    assert device.peak_bytes <= 64 * MIB
    tier.close()


def test_a_fast_disk_is_measured_over_many_pieces(tier: DiskTier) -> None:
    found = measure_speed(tier, CPU, most_bytes=64 * MIB)
    assert found.out_bytes_per_second > 0 and found.in_bytes_per_second > 0
    assert tier.counters.out_bytes >= PIECES * MIB and tier.used_bytes == 0


def test_a_disk_that_is_nearly_full_is_measured_with_what_it_takes(disk: Path) -> None:
    tier = small_disk(disk, 3 * MIB)
    found = measure_speed(tier, CPU, most_bytes=16 * MIB)
    assert found.out_bytes_per_second > 0 and tier.used_bytes == 0
    tier.close()


def test_a_disk_without_room_is_an_error(disk: Path) -> None:
    tier = small_disk(disk, 4096)
    with pytest.raises(DiskFullError, match="needed, 4.0 KiB free in"):
        measure_speed(tier, CPU, most_bytes=16 * MIB)
    tier.close()


def test_noise_is_the_same_each_time_and_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    one = incompressible(9 * MIB + 5, CPU)
    assert one.numel() == 9 * MIB + 5 and one.dtype is torch.uint8 and one.is_contiguous()
    assert torch.equal(one, incompressible(9 * MIB + 5, CPU)) and one[: 4 * MIB].unique().numel() == 256
    assert torch.equal(before, torch.get_rng_state())
