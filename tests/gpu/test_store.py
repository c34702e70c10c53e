"""The host tier on a real device: bitwise behind late kernels, pinned once, released, and beyond its budget.

Skipped, with the reason, where there is no accelerator.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.store import SpillTier, open_tier
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.host import HostTier
from ebbtide.store.location import filesystem_of
from ebbtide.store.pinned import pinned_memory
from ebbtide.store.spill import SpillSlot
from tests.gpu.test_first_light import _batch, _model, _same, _step
from tests.helpers.accelerator import delay, memory_limited_to, needs_limit, needs_sleep
from tests.helpers.handles import enable_over
from tests.helpers.slots import copy_out

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZES = [MIB + 64, 3 * MIB + 1, 100_001, 65_536, 7 * MIB, 70_000]


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = HostTier(AcceleratorDevice(), budget_bytes=1 << 30)
    yield tier
    tier.close()


def noise(nbytes: int) -> torch.Tensor:
    where = torch.accelerator.current_accelerator()
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=where)


def resident_bytes(chunks: list[tuple[int, int]]) -> int:
    """Count the resident bytes of these (address, length) pairs; other threads' memory is not counted."""
    page = os.sysconf("SC_PAGE_SIZE")
    present = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for address, nbytes in chunks:
            first, last = -(-address // page), (address + nbytes) // page
            pages.seek(first * 8)
            present += sum(entry >> 63 for entry in memoryview(pages.read((last - first) * 8)).cast("Q"))
    return present * page


def step(tier: Any, sizes: list[int], *, late: bool) -> None:
    """Copy out, drop the sources as the engine does, poison the freed memory, copy in, compare."""
    expected, slots = [], []
    for size in sizes:
        source = noise(size)
        expected.append(source.clone())
        if late:
            delay()
        slots.append(copy_out(tier, source.add_(1)))  # written by a kernel that waits behind the delay
        tier.wait_copied_out([slots[-1]])
        del source
        torch.full((8 * MIB,), 255, dtype=torch.uint8, device=expected[-1].device)
    for slot in reversed(slots):
        tier.prefetch([slot])
    for slot, source in zip(reversed(slots), reversed(expected), strict=True):
        if late:
            delay()
        taken = slot.take()
        assert torch.equal(taken, source + 1)
        slot.free()
        del taken
        torch.full((8 * MIB,), 255, dtype=torch.uint8, device=source.device)
    tier.trim()


@needs_sleep
def test_a_source_outlives_its_slot_until_its_copy_is_done(tier: HostTier) -> None:
    """The allocator must not hand out memory that a copy still reads, even if the copy is not needed."""
    step(tier, [8 * MIB], late=False)  # makes streams and host memory
    out, _ = tier.copies._side_streams(noise(1).device)
    source = noise(8 * MIB)
    address = source.data_ptr()
    with out:
        delay()
    slot = copy_out(tier, source)
    del source
    slot.free()
    del slot
    assert tier.used_bytes == 0
    taken = [torch.full((8 * MIB,), 255, dtype=torch.uint8, device=out.device) for _ in range(4)]
    assert address not in [t.data_ptr() for t in taken]
    del taken
    torch.accelerator.synchronize()
    assert tier.used_bytes == 0  # any call of the tier releases it
    taken = [torch.empty(8 * MIB, dtype=torch.uint8, device=out.device) for _ in range(6)]
    assert address in [t.data_ptr() for t in taken]


@needs_sleep
def test_an_unread_prefetch_is_dropped_and_repeated(tier: HostTier) -> None:
    source = noise(4 * MIB)
    slot = copy_out(tier, source)
    before = torch.accelerator.memory_allocated()
    for _ in range(3):
        tier.prefetch([slot])
        delay()
        slot.discard()
        torch.full((4 * MIB,), 255, dtype=torch.uint8, device=source.device)
    assert torch.accelerator.memory_allocated() == before
    assert torch.equal(slot.take(), source)


def test_stalls_are_reported_by_block() -> None:
    """With a window of one byte compute waits for every copy: each block's forward and backward has its stall."""
    model, x = _model(), _batch()
    plain = _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", window="1B") as handle:
        for _ in range(3):
            assert _same(plain, _step(model, x))
        torch.accelerator.synchronize()
        stats = handle.stats()
        assert set(stats.stalls) == {f"{where} {i}" for where in ("forward", "backward") for i in range(len(model))}
        assert stats.total_stall_seconds > 0 and min(stats.stalls.values()) >= 0
        assert stats.total_stall_seconds == pytest.approx(sum(stats.stalls.values()))
        assert stats.store["host_pinned_bytes"] == stats.store["host_held_bytes"] > 0
        assert "stall: " in handle.explain()


def test_the_end_of_a_pass_is_not_copied_once_its_length_is_known() -> None:
    model, x = _model(), _batch()
    with ebbtide.enable_activation_offloading(model, policy="offload", window="64MiB") as handle:
        copied = []
        for _ in range(3):
            before = handle.stats().total_copy_out_bytes
            _step(model, x)
            copied.append(handle.stats().total_copy_out_bytes - before)
        assert copied[0] > copied[1] == copied[2] >= copied[0] - 64 * MIB


@needs_limit
def test_a_device_without_room_for_the_window_goes_on() -> None:
    model, x = _model(), _batch()
    plain = _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", window="64MiB") as handle:
        for _ in range(2):
            _step(model, x)
        model.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        loss = model(x).square().mean()
        torch.accelerator.synchronize()
        try:
            with memory_limited_to(torch.accelerator.memory_reserved() + 96 * MIB):
                loss.backward()
        except torch.OutOfMemoryError:
            pytest.skip("one block's backward does not fit into what was left: nothing is shown")
        assert _same(plain[1:], [p.grad for p in model.parameters()])
        assert handle.stats().live_tickets == 0


SANITIZED = """
import torch
import ebbtide
from tests.gpu.test_first_light import _batch, _model, _same, _step
model, x = _model(width=256, depth=4), _batch(width=256, tokens=1024)
plain = _step(model, x)
with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window="2MiB") as handle:
    for _ in range(3):
        assert _same(plain, _step(model, x))
    assert handle.stats().total_copy_in_bytes > 0
print("no race")
"""


@pytest.mark.needs_cuda
def test_torchs_own_sanitizer_finds_no_race() -> None:
    environment = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    found = subprocess.run(
        [sys.executable, "-c", SANITIZED], capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[2], timeout=240, check=False,
    )  # fmt: skip
    assert found.returncode == 0 and "no race" in found.stdout, found.stderr[-3000:]


@needs_sleep
def test_bytes_are_right_when_kernels_are_late(tier: HostTier) -> None:
    for _ in range(3):
        step(tier, SIZES * 4, late=True)
    assert tier.used_bytes == 0


def test_nothing_is_pinned_after_the_first_step_and_little_is_wasted(tier: HostTier) -> None:
    step(tier, SIZES * 8, late=False)
    first = tier.gauges()
    for _ in range(4):
        step(tier, SIZES * 8, late=False)
    assert tier.gauges() == first and first["host_pinned_bytes"] == first["host_held_bytes"]
    assert first["host_held_bytes"] <= 1.03 * first["host_most_used_bytes"]


def test_training_pins_nothing_after_its_second_step() -> None:
    model, x = _model(), _batch()
    plain, chunks = _step(model, x), []
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        place: Any = handle._engine.tier
        for _ in range(6):
            assert _same(plain, _step(model, x))
            chunks.append(place.gauges()["host_chunks"])
    assert chunks[0] > 0 and len(set(chunks[1:])) == 1


def test_host_memory_goes_back_when_the_tier_is_closed() -> None:
    tier: Any = HostTier(AcceleratorDevice())
    step(tier, SIZES * 20, late=False)
    held = tier.gauges()["host_held_bytes"]
    chunks = [(chunk.memory.data_ptr(), chunk.memory.numel()) for chunk in tier._arena._chunks]
    assert sum(nbytes for _, nbytes in chunks) == held > 100 * MIB
    assert resident_bytes(chunks) > held * 0.9
    tier.close()
    gc.collect()
    assert resident_bytes(chunks) < held * 0.1


def test_what_the_budget_does_not_hold_goes_to_disk(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    model, x = _model(), _batch()
    plain = _step(model, x)
    place = open_tier("host", host_budget_bytes=48 * MIB, disk_path=tmp_path)
    assert isinstance(place, SpillTier)
    with enable_over(place, model, policy="offload", min_bytes=0, window="16MiB") as handle:
        for _ in range(3):
            assert _same(plain, _step(model, x))
        assert handle.stats().live_tickets == handle.stats().store_bytes == 0
        assert place.gauges()["disk_written_bytes"] > 0
        assert place.gauges()["host_held_bytes"] <= 48 * MIB
    place.close()


def test_from_disk_to_the_device(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    place = open_tier("host", host_budget_bytes=32 * MIB, disk_path=tmp_path)
    sources = [noise(2 * MIB + 5) for _ in range(40)]
    slots = [copy_out(place, source) for source in sources]
    assert sum(isinstance(slot, SpillSlot) and slot.pieces[0].stage is None for slot in slots) > 10
    for slot, source in zip(reversed(slots), reversed(sources), strict=True):
        assert torch.equal(slot.take(), source)
        slot.free()
    assert place.used_bytes == 0
    place.close()


class Refused:
    """Pins nothing."""

    def register(self, address: int, nbytes: int) -> int:
        return 2

    def unregister(self, address: int) -> int:
        raise AssertionError("nothing was pinned")


def test_pageable_memory_where_pinning_is_refused(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = tier.device
    if device._registrar is None:
        pytest.skip("this device pins through torch's own allocator")
    monkeypatch.setattr(device, "_registrar", Refused())
    step(tier, SIZES, late=False)
    assert tier.gauges()["host_pinned_bytes"] == 0 < tier.gauges()["host_held_bytes"]


def test_a_refused_registration_leaves_no_error_behind(tier: HostTier) -> None:
    registrar: Any = tier.device._registrar  # type: ignore[attr-defined]
    if registrar is None:
        pytest.skip("this device pins through torch's own allocator")
    memory = pinned_memory(4 * MIB, registrar)
    assert memory.is_pinned()
    assert registrar.register(memory.data_ptr(), 4 * MIB) != 0  # it is pinned already
    assert noise(1000).numel() == 1000  # a kernel of other code
    torch.accelerator.synchronize()
    del memory
    gc.collect()
    step(tier, SIZES, late=False)
