"""Every finding: facts that trigger it, and facts that nearly do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ebbtide.doctor.facts import Facts
from ebbtide.doctor.findings import RULES, findings
from tests.unit.doctor.made_up import GIB, SERVER, SMALL, changed

MIB = 1024**2

Case = tuple[Facts, dict[str, Any], dict[str, Any], str]

CASES: dict[str, Case] = {
    # code: (machine, changes that trigger it, changes that do not, part of the text)
    "EBB001": (SMALL, {"torch": "2.10.1+cpu"}, {"torch": "2.11.0rc1"}, "torch 2.10.1+cpu is older than 2.11"),
    "EBB002": (
        SMALL,
        {"target": "host", "machine": None, "unmeasured": "no device", "advice": "do this"},
        {"machine": None, "unmeasured": "x", "disk__refused": "x"},
        "could not be measured: no device",
    ),
    "EBB003": (SERVER, {"device__bfloat16": False}, {"device__bfloat16": True}, "NVIDIA H200 has no native bfloat16"),
    "EBB004": (
        SERVER,
        {"device__free_bytes": 100 * GIB},
        {"device__free_bytes": 130 * GIB},
        "39.0 GiB of the device's 139.0 GiB",
    ),
    "EBB005": (SERVER, {"target": "disk"}, {"target": "host"}, "tensors in RAM only"),
    "EBB006": (SERVER, {"ranks": 9}, {"ranks": 8}, "is 9, but 8 devices"),
    "EBB007": (SMALL, {"host__load": 1.9}, {"host__load": 0.9}, "1.9 threads ran or waited on 2 CPUs"),
    "EBB010": (SMALL, {"disk__filesystem": "tmpfs"}, {"disk__filesystem": "xfs"}, "/var/tmp is on tmpfs, which is"),
    "EBB011": (
        SMALL,
        {"disk__refused": "disk path '/x' is not writable"},
        {"disk__refused": "it lies in RAM", "disk__filesystem": "tmpfs"},
        "disk path '/x' is not writable",
    ),
    "EBB012": (
        SERVER,
        {"disk__refused": "none serves"},
        {"disk__refused": "none serves", "disk__requested": True},
        "there is no disk behind host memory (none serves)",
    ),
    "EBB013": (SMALL, {"disk__free_bytes": 900 * MIB}, {"disk__free_bytes": GIB}, "900.0 MiB are free in /var/tmp"),
    "EBB014": (SMALL, {"disk__free_bytes": 22 * GIB}, {"disk__free_bytes": 23 * GIB}, "less than the 23.0 GiB of"),
    "EBB015": (SMALL, {"disk__filesystem": "nfs4"}, {"disk__filesystem": "btrfs"}, "on nfs4"),
    "EBB016": (SMALL, {"disk__filesystem": "overlay"}, {"disk__filesystem": ""}, "a container's own layer"),
    "EBB017": (SMALL, {"disk__direct": False}, {"disk__direct": None}, "direct I/O is refused in /var/tmp"),
    "EBB018": (
        SMALL,
        {"machine__in_bytes_per_second": 150 * 1024.0**2},
        {"machine__in_bytes_per_second": 250e6},
        "the disk moves 150.0 MiB/s",
    ),
    "EBB020": (
        SERVER,
        {"host__limit_bytes": 32 * GIB},
        {"host__limit_bytes": 2048 * GIB},
        "a control group allows 32.0 GiB of the machine's 2.0 TiB",
    ),
    "EBB021": (SERVER, {"host__share_bytes": 5 * MIB}, {"host__share_bytes": GIB}, "5.0 MiB of host memory are free"),
    "EBB022": (SMALL, {"host__share_bytes": 5 * MIB}, {"host__share_bytes": GIB}, "5.0 MiB of memory are free"),
    "EBB023": (
        SMALL,
        {"host__swap_bytes": 8 * GIB, "host__swap_used_bytes": 2 * GIB},
        {"host__swap_bytes": 8 * GIB, "host__swap_used_bytes": MIB},
        "2.0 GiB are swapped out",
    ),
    "EBB024": (
        SERVER,
        {"device__pinned": False},
        {"device__pinned": True},
        "cannot be pinned (a process may lock 8.0 MiB): each copy",
    ),
    "EBB025": (
        SERVER,
        {"device__asynchronous": False},
        {"device__asynchronous": False, "device__pinned": False},
        "copies are synchronous on NVIDIA H200",
    ),
    "EBB030": (SERVER, {"bus__width": 8}, {"bus__width": 16}, "8 of 16 lanes"),
    "EBB031": (SERVER, {"bus__speed": 2.5}, {"bus__speed": None}, "2.5 of 32 GT/s"),
    "EBB032": (
        SERVER,
        {"machine__out_bytes_per_second": 3.2e9},
        {"machine__out_bytes_per_second": 6.1e9},
        "the link moves 3.2 GB/s",
    ),
    "EBB034": (
        SERVER,
        {"host__cpus": frozenset(range(96))},
        {"host__cpus": frozenset(range(3))},
        "memory node 0",
    ),
    "EBB035": (
        SERVER,
        {"machine__host_bytes_per_second": 200e9},
        {"machine__host_bytes_per_second": 441e9},
        "host memory moves 200 GB/s and 8 links 440 GB/s",
    ),
    "EBB040": (
        SMALL,
        {"environment": {"FSDP_OFFLOAD_PARAMS": "true", "NVTE_CPU_OFFLOAD_V1": "1"}},
        {"environment": {"FSDP_OFFLOAD_PARAMS": "false", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}},
        "FSDP_OFFLOAD_PARAMS, NVTE_CPU_OFFLOAD_V1 set",
    ),
    "EBB041": (
        SERVER,
        {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        {"environment": {"CUDA_LAUNCH_BLOCKING": "0"}},
        "CUDA_LAUNCH_BLOCKING set",
    ),
    "EBB042": (
        SERVER,
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}},
        {"environment": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}},
        "not set: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
}

NOT_HERE = {
    # facts that a rule ignores, although its number is present
    "EBB003 beside": (SMALL, {}),
    "EBB004 on a CPU": (SMALL, {"device__free_bytes": GIB}),
    "EBB006 on a CPU": (SMALL, {"ranks": 4}),
    "EBB007 in a part of the machine": (SERVER, {"host__cpus": frozenset({0}), "host__load": 40.0}),
    "EBB010 not wanted": (SERVER, {"disk__filesystem": "tmpfs"}),
    "EBB013 not wanted": (SERVER, {"disk__free_bytes": 1}),
    "EBB017 not wanted": (SERVER, {"disk__direct": False}),
    "EBB018 unmeasured": (SMALL, {"machine": None}),
    "EBB030 unknown": (SERVER, {"bus__width": None, "bus__speed": None, "bus__node": None}),
    "EBB034 one node": (SERVER, {"host__nodes": {0: frozenset({0})}, "host__cpus": frozenset({5}), "host__load": 0.0}),
    "EBB041 on a CPU": (SMALL, {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}),
    "EBB042 with ROCm's name": (SERVER, {"environment": {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}}),
    "EBB042 on a CPU": (SMALL, {"environment": {}}),
}


def codes(facts: Facts) -> list[str]:
    return [finding.code for finding in findings(facts)]


@pytest.mark.parametrize("machine", [SERVER, SMALL], ids=["server", "small"])
def test_a_machine_that_is_well_has_no_findings(machine: Facts) -> None:
    assert findings(machine) == ()


@pytest.mark.parametrize("code", CASES)
def test_a_finding_appears_and_says_what_to_do(code: str) -> None:
    machine, changes, _, words = CASES[code]
    found = {finding.code: finding for finding in findings(changed(machine, **changes))}
    assert code in found, found
    assert words in found[code].what
    assert found[code].hint and "\n" not in found[code].what + found[code].hint
    assert not found[code].what.endswith(".")


def test_a_busy_machine_without_memory_nodes_is_found_by_its_own_cpus() -> None:
    assert codes(changed(SMALL, host__nodes={}, host__load=1.9)) == ["EBB007"]
    assert codes(changed(SMALL, host__nodes={}, host__cpus=frozenset(), host__load=1.9)) == []


@pytest.mark.parametrize("code", CASES)
def test_a_finding_does_not_appear(code: str) -> None:
    machine, _, changes, _ = CASES[code]
    assert code not in codes(changed(machine, **changes))


@pytest.mark.parametrize("name", NOT_HERE)
def test_rules_keep_to_where_they_matter(name: str) -> None:
    machine, changes = NOT_HERE[name]
    assert codes(changed(machine, **changes)) == []


def test_every_rule_has_its_cases_and_its_own_code() -> None:
    assert [rule.code for rule in RULES] == sorted({rule.code for rule in RULES}) == list(CASES)
    assert all(re.fullmatch(r"EBB\d{3}", rule.code) for rule in RULES)


def test_a_cause_is_reported_once() -> None:
    broken = {"machine": None, "unmeasured": "disk path '/x' lies on tmpfs", "disk__refused": "likewise"}
    assert codes(changed(SMALL, **broken, disk__filesystem="tmpfs")) == ["EBB010"]
    assert codes(changed(SMALL, **broken)) == ["EBB011"]
    assert codes(changed(SMALL, **broken, disk__free_bytes=0)) == ["EBB013"]


def test_problems_come_first() -> None:
    facts = changed(SERVER, device__bfloat16=False, device__pinned=False, ranks=9, bus__width=4)
    assert codes(facts) == ["EBB006", "EBB024", "EBB003", "EBB030"]


def test_a_path_that_was_asked_for_matters_with_the_host_target_too() -> None:
    assert codes(changed(SERVER, disk__requested=True, disk__filesystem="tmpfs")) == ["EBB010"]
    assert codes(changed(SERVER, disk__requested=True, disk__refused="it is missing")) == ["EBB011"]
