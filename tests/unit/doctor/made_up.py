"""Made-up machines: facts of a healthy server and of a healthy small machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ebbtide.doctor.facts import DeviceFacts, Disk, Facts, Host, PcieLink
from ebbtide.planner.machines import MACHINES, Machine

GIB = 1024**3

SERVER = Facts(
    torch="2.13.0+cu130",
    torch_oldest="2.11",
    target="host",
    device=DeviceFacts(
        kind="cuda", name="NVIDIA H200", count=8, memory_bytes=139 * GIB, free_bytes=138 * GIB, bfloat16=True,
        pinned=True, asynchronous=True, address="0000:17:00.0",
    ),
    bus=PcieLink(width=16, most_width=16, speed=32.0, most_speed=32.0, node=0),
    disk=Disk(path="/var/tmp", requested=False, filesystem="ext4", free_bytes=900 * GIB, direct=True, refused=None),
    host=Host(
        memory_bytes=2048 * GIB, limit_bytes=2048 * GIB, available_bytes=2000 * GIB, share_bytes=1900 * GIB,
        swap_bytes=0, swap_used_bytes=0, locked_bytes=8 << 20,
        nodes={0: frozenset(range(48)), 1: frozenset(range(48, 96))}, cpus=frozenset(range(48)),
        huge_pages="madvise", libc="glibc 2.39", load=0.5,
    ),
    ranks=1,
    environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    machine=MACHINES["h200"],
)  # fmt: skip

SMALL = replace(
    SERVER,
    torch="2.13.0+cpu",
    target="disk",
    device=DeviceFacts(
        kind="cpu", name="cpu", count=1, memory_bytes=23 * GIB, free_bytes=20 * GIB, bfloat16=True, pinned=None,
        asynchronous=None, address=None,
    ),
    bus=None,
    host=replace(
        SERVER.host, memory_bytes=23 * GIB, limit_bytes=23 * GIB, available_bytes=21 * GIB, share_bytes=20 * GIB,
        nodes={0: frozenset({0, 1})}, cpus=frozenset({0, 1}), load=0.1,
    ),
    machine=Machine(
        name="cpu", memory_bytes=23 * GIB, flop_per_second=0.8e12, flop32_per_second=0.2e12,
        attention_flop_per_second=0.25e12, memory_bytes_per_second=22e9, out_bytes_per_second=1.25e9,
        in_bytes_per_second=1.25e9, host_memory_bytes=23 * GIB, host_bytes_per_second=24e9,
    ),
)  # fmt: skip


def changed(facts: Facts, **changes: Any) -> Facts:
    """Return facts with some of them changed; ``device__kind="xpu"`` changes a part's."""
    for name, value in changes.items():
        part, _, field = name.partition("__")
        facts = replace(facts, **{part: replace(getattr(facts, part), **{field: value}) if field else value})
    return facts
