"""A fair share of host memory, from the system's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.store import open_tier
from ebbtide.store.meter import room_bytes
from ebbtide.store.share import fair_share_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str | int]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def machine(total_gib: int, free_gib: int) -> dict[str, str | int]:
    return {"proc/meminfo": f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {free_gib << 20} kB\n"}


def test_a_machine_without_groups(tmp_path: Path) -> None:
    root = write(tmp_path, machine(64, 64))
    assert fair_share_bytes(root=root, ranks=1) == 60 * GIB
    assert fair_share_bytes(root=root, ranks=8) == 60 * GIB // 8


def test_never_more_than_a_share_of_what_is_free(tmp_path: Path) -> None:
    root = write(tmp_path, machine(64, 20))
    assert fair_share_bytes(root=root, ranks=4) == 4 * GIB
    assert fair_share_bytes(root=write(tmp_path, machine(64, 1)), ranks=1) == 0


def test_a_rank_plans_with_its_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.meter.free_memory_bytes", lambda: 20 * GIB)
    tier = open_tier("disk")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert room_bytes(tier) == 20 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert room_bytes(tier) == 5 * GIB
    tier.close()


def test_the_tightest_group_of_version_two(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **machine(512, 500),
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": 32 * GIB,
            "sys/fs/cgroup/pod/memory.current": 12 * GIB,
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {4 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max",
            "sys/fs/cgroup/pod/container/memory.current": GIB,
        },
    )
    assert fair_share_bytes(root=root, ranks=1) == (32 - 12 + 4 - 2) * GIB


def test_a_group_of_version_one_that_is_seen_as_the_top(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **machine(512, 500),
            "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 16 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
        },
    )
    assert fair_share_bytes(root=root, ranks=2) == 15 * GIB // 2


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 2 * GIB, "proc/self/cgroup": "0::/\n"}
    assert fair_share_bytes(root=write(tmp_path, {**machine(64, 64), **files}), ranks=1) == 0


@pytest.mark.parametrize(("said", "ranks"), [("4", 4), ("", 1), ("many", 1), ("0", 1)])
def test_ranks_on_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, ranks: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    root = write(tmp_path, machine(64, 64))
    assert fair_share_bytes(root=root) == fair_share_bytes(root=root, ranks=ranks)


def test_no_linux(tmp_path: Path) -> None:
    assert fair_share_bytes(root=tmp_path, ranks=1) > 0


def test_this_machine() -> None:
    assert 0 <= fair_share_bytes(ranks=2) <= fair_share_bytes(ranks=1)
