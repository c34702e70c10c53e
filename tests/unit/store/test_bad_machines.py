"""Machines that run out of resources during training: it continues if possible, and warns once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ebbtide.store.host import HostTier
from tests.helpers.engines import assert_nothing_left, compare, drain, leaf, observe, open_engine
from tests.helpers.fakedevice import FakeDevice, FakeStream
from tests.helpers.handles import enable_over
from tests.helpers.models import build
from tests.helpers.oracle import differences


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def chain(leaves: Any) -> list[torch.Tensor]:
    y = leaves["x"]
    for _ in range(6):
        y = torch.tanh(y @ leaves["w"]).exp().sin()
    return [y]


LEAVES = {"x": leaf(6, 8), "w": leaf(8, 8, parameter=True)}
SAVED = 6 * 8 * 4  # bytes of each saved tensor


def test_a_device_without_room_for_the_window_brings_in_less(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(1e9, 1e9, device_limit_bytes=4 * SAVED)
    expected = observe(chain, LEAVES)
    with open_engine("offload", window_bytes=10 * SAVED, device=device) as engine:
        engine._copy_out._expected_bytes = 1 << 60  # nothing is held back: everything is copied in
        for _ in range(3):
            engine._copy_out._expected_bytes = 1 << 60
            assert compare(expected, observe(chain, LEAVES, engine)) == []
            assert_nothing_left(engine)
        assert device.violations == [] and device.peak_bytes <= 4 * SAVED
        assert engine._window.in_bytes < 10 * SAVED
    assert len(said(caplog)) == 1 and said(caplog)[0].startswith("the device has no room for a window of")


def test_a_device_without_room_for_one_tensor_stops_and_says_where() -> None:
    device = FakeDevice(1e9, 1e9, device_limit_bytes=SAVED - 1)
    tiny = build("mlp")
    plain = tiny.step()
    tier = HostTier(device)
    with enable_over(tier, tiny.model, policy="offload", min_bytes=0, window=1) as handle:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
            tiny.step()
        notes = "".join(caught.value.__notes__)
        assert "while restoring Mlp/" in notes and "of block 'layers." in notes
        del caught
        drain()
        assert_nothing_left(handle._engine)
        device._device_limit_bytes = None
        assert differences(plain, tiny.step()) == []
    tier.close()


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_memory_that_cannot_be_pinned_is_pageable(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("mlp")
    plain = tiny.step()
    tier = HostTier(FakeDevice(1e6, 1e6, pinned_limit_bytes=0))
    with enable_over(tier, tiny.model, policy=policy, min_bytes=0, window="1KiB") as handle:
        for _ in range(3):
            assert differences(plain, tiny.step()) == []
        store = handle.stats().store
        assert store["host_pinned_bytes"] == 0 < store["host_held_bytes"]
        assert " of host memory, 0 B of it pinned, in " in handle.explain()
    assert len(said(caplog)) == 1 and "cannot pin host memory (fake host: no more can be pinned)" in said(caplog)[0]
    tier.close()


class OfOneType(FakeDevice):
    """Stand-in for one of two kinds of devices: float64 tensors are on the other."""

    def owns(self, tensor: torch.Tensor) -> bool:
        return super().owns(tensor) and tensor.dtype != torch.float64


def test_tensors_of_another_device_stay_where_they_are() -> None:
    def program(leaves: Any) -> list[torch.Tensor]:
        here, there = leaves["x"] * 2, leaves["y"] * 2
        for _ in range(3):
            here, there = torch.tanh(here).exp(), torch.tanh(there).exp()
        return [here + there.to(here.dtype)]

    leaves = {"x": leaf(6, 8), "y": leaf(6, 8, dtype=torch.float64)}
    expected = observe(program, leaves)
    device = OfOneType(1e6, 1e6)
    with open_engine("offload", window_bytes=1, device=device) as engine:
        for _ in range(2):
            assert compare(expected, observe(program, leaves, engine)) == []
            assert_nothing_left(engine)
        stats = engine.stats()
        assert stats.offloaded_bytes == stats.saved_bytes == 6 * SAVED  # of its own device
        assert device.out_bytes == 2 * 6 * SAVED and device.violations == []


class Breaks(FakeDevice):
    """Raises at the ``when``-th copy; 0 only counts."""

    when = count = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        self.count += 1
        if self.count == self.when:
            raise RuntimeError("planted: the copy failed")
        super().copy(target, source, stream)


def test_a_copy_that_fails_names_the_tensor_and_the_next_step_is_right() -> None:
    tiny = build("mlp")
    plain, device = tiny.step(), Breaks(1e6, 1e6)
    tier = HostTier(device)
    with enable_over(tier, tiny.model, policy="offload", min_bytes=0, window="1KiB") as handle:
        for _ in range(2):
            tiny.step()
        device.count = 0
        tiny.step()
        copies = device.count
        assert copies > 10
        for when in range(1, copies + 1, 3):
            device.count, device.when = 0, when
            with pytest.raises(RuntimeError, match="planted: the copy failed") as caught:
                tiny.step()
            notes = "".join(caught.value.__notes__)
            assert "while copying out" in notes or "while prefetching" in notes or "while restoring" in notes, notes
            assert "Mlp/" in notes
            del caught
            device.when = 0
            drain()
            assert_nothing_left(handle._engine)
            assert differences(plain, tiny.step()) == []
    tier.close()
