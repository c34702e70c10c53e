"""What a trace says of a device's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.device_time import device_time, summarized


def kernel(name: str, stream: int, begin: float, microseconds: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds, "args": {"stream": stream}}


def test_the_busiest_stream_has_kernels_and_gaps() -> None:
    found = summarized(
        [
            kernel("product", 7, 100.0, 50.0),
            kernel("norm", 7, 210.0, 10.0),
            kernel("product", 7, 150.0, 40.0),  # events are in any order; this one follows at once
            kernel("cast", 9, 0.0, 30.0),
            {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 0.0, "dur": 500.0, "args": {"stream": 11}},
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 900.0},
        ]
    )
    assert found is not None
    assert found.kernels == 3
    assert found.busy_seconds == pytest.approx(100e-6)
    assert found.gap_seconds == pytest.approx(20e-6)
    assert [name for _, name in found.largest_gaps] == ["norm", "product"]
    assert found.other_seconds == pytest.approx(30e-6)
    assert found.copy_seconds == {"Memcpy DtoH": pytest.approx(500e-6)}
    assert found.names == [("product", 2, pytest.approx(90e-6)), ("norm", 1, pytest.approx(10e-6))]


def test_a_trace_without_kernels_says_nothing() -> None:
    assert summarized([{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0}]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_other_devices_are_not_traced() -> None:
    called: list[int] = []
    assert device_time(lambda: called.append(1)) is None and not called
