"""The table: every row of two machines, and the cells of unknown values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ebbtide.doctor.table import table
from tests.unit.doctor.made_up import GIB, SERVER, SMALL, changed

FUSED = "fused and causal, if the device has it"


def rows(facts: Any) -> dict[str, tuple[str, str]]:
    return {what: (value, meaning) for what, value, meaning in table(facts).rows}


def test_a_small_machine() -> None:
    assert json.loads(json.dumps(table(SMALL).rows)) == [
        ["torch", "2.13.0+cpu", "tested from 2.11 on"],
        ["device", "cpu", "RAM is the memory to save"],
        ["memory", "23.0 GiB", "20.0 GiB free, less a margin"],
        ["matrix products", "0.80 TFLOP/s", "half precision; 0.20 TFLOP/s float32"],
        ["attention", "0.25 TFLOP/s", "fused and causal, if the device has it"],
        ["copies of memory", "22 GB/s", "the rate of element-wise recomputes"],
        ["copy-out", "1.25 GB/s", "1 GiB of activations leaves in 859 ms"],
        ["copy-in", "1.25 GB/s", "and is back in 859 ms"],
        ["copying a byte", "1,280 FLOP", "tensors that take fewer per byte are faster to recompute"],
        ["offloaded bytes wait", "on disk", "target disk"],
        ["disk", "/var/tmp", "ext4, direct I/O"],
        ["space on disk", "900.0 GiB", "for offloaded bytes"],
        ["host memory", "23.0 GiB", "21.0 GiB not in use"],
        ["control group", "no limit", "all of the machine's memory may be used"],
        ["a rank's share", "20.0 GiB", "what one rank could have, less a margin"],
        ["swap", "none", "a process that does not fit is killed"],
        ["locked memory", "8.0 MiB", "not needed on a CPU"],
        ["memory nodes", "1", "all memory is equally near"],
        ["huge pages", "madvise", "torch requests them with THP_MEM_ALLOC_ENABLE=1"],
        ["freed memory", "serves the next step", "leaves the process after each backward where a memory budget is set"],
    ]


def test_a_server() -> None:
    found = rows(SERVER)
    assert found["device"] == ("8 x NVIDIA H200", "its memory is the memory to save; one device per rank")
    assert found["PCIe link"] == ("x16, 32 GT/s", "the device's best")
    assert found["offloaded bytes wait"] == ("in host memory", "with disk behind it")
    assert found["pinned memory"] == ("yes", "copies overlap compute")
    assert found["memory nodes"] == ("2", "the device is attached to node 0")
    assert found["copies of host memory"] == ("921 GB/s", "shared by all links of the node")
    assert "freed memory" not in found


def test_what_is_not_known_is_a_dash() -> None:
    found = rows(changed(SMALL, machine=None, disk__path=None, host__available_bytes=None))
    assert found["rates"] == ("–", "not measured: see the findings")
    assert found["disk"] == ("–", "none of the usual directories is usable")
    assert found["host memory"][1] == "–"
    assert "copy-out" not in found


@pytest.mark.parametrize(
    ("changes", "row", "value"),
    [
        ({"bus__width": 8}, "PCIe link", ("x8, 32 GT/s", "the device supports more")),
        ({"host__limit_bytes": 8 * GIB}, "control group", ("8.0 GiB", "a process above it is killed")),
        ({"host__swap_bytes": GIB}, "swap", ("1.0 GiB", "0 B in use")),
        ({"host__locked_bytes": None}, "locked memory", ("no limit", "CUDA's pinned memory is not counted")),
        ({"device__kind": "xpu"}, "locked memory", ("8.0 MiB", "a driver may count pinned memory")),
        (
            {"ranks": 4},
            "a rank's share",
            ("1.9 TiB", "what each of 4 ranks may hold of offloaded bytes, less a margin"),
        ),
        ({"bus__node": None}, "memory nodes", ("2", "the device's node is unknown")),
        ({"machine__attention_flop_per_second": 9.5e10}, "attention", ("95.0 GFLOP/s", FUSED)),
        ({"machine__attention_flop_per_second": 616e12}, "attention", ("616 TFLOP/s", FUSED)),
        ({"disk__direct": False}, "disk", ("/var/tmp", "ext4, through the page cache")),
        ({"disk__direct": None, "disk__filesystem": ""}, "disk", ("/var/tmp", "file system not known, cannot serve")),
    ],
)
def test_other_values(changes: dict[str, Any], row: str, value: tuple[str, str]) -> None:
    assert rows(changed(SERVER, **changes))[row] == value


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"environment": {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}}, "another allocator"),
        ({"environment": {"MALLOC_MMAP_THRESHOLD_": "1048576"}}, "leaves at once"),
        ({"host__libc": None}, "–"),
    ],
)
def test_freed_memory(changes: dict[str, Any], value: str) -> None:
    assert rows(changed(SMALL, **changes))["freed memory"][0] == value
