"""Reading a machine from made-up files of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.doctor import facts
from ebbtide.doctor.facts import PcieLink, look_at_bus, look_at_disk, look_at_environment, look_at_host
from ebbtide.store.location import filesystem_of
from ebbtide.store.share import ranks_of
from tests.unit.store.test_share import machine, write

GIB = 1 << 30
MEMORY = "MemTotal: 67108864 kB\nMemAvailable: 52428800 kB\nSwapTotal: 2097152 kB\nSwapFree: 1048576 kB\n"
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max open files            1024                 524288               files     \n"
    "Max locked memory         8388608              unlimited            bytes     \n"
    "Max address space         unlimited            unlimited            bytes     \n"
)


def server(root: Path) -> Path:
    nodes = "sys/devices/system/node"
    files: dict[str, str | int] = {
        "proc/meminfo": MEMORY,
        "proc/self/limits": LIMITS,
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-2,5\nMems_allowed_list:\t0-1\n",
        "proc/self/cgroup": "0::/pod\n",
        "proc/loadavg": "1.25 0.80 0.60 2/345 6789\n",
        "sys/fs/cgroup/pod/memory.max": 16 * GIB,
        "sys/fs/cgroup/pod/memory.current": GIB,
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        f"{nodes}/node0/cpulist": "0-3\n",
        f"{nodes}/node1/cpulist": "4-7\n",
        f"{nodes}/possible": "0-1\n",
    }
    return write(root, files)


def test_host_memory_and_limits(tmp_path: Path) -> None:
    found = look_at_host(ranks=3, root=server(tmp_path))
    assert (found.memory_bytes, found.limit_bytes, found.available_bytes) == (64 * GIB, 16 * GIB, 50 * GIB)
    assert found.share_bytes == (16 - 1 - 1) * GIB // 3
    assert (found.swap_bytes, found.swap_used_bytes) == (2 * GIB, GIB)
    assert found.locked_bytes == 8 << 20
    assert found.nodes == {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    assert found.cpus == {0, 1, 2, 5}
    assert (found.huge_pages, found.load) == ("madvise", 1.25)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    found = look_at_host(ranks=1, root=tmp_path)
    assert found.memory_bytes == found.limit_bytes > 0
    assert (found.locked_bytes, found.huge_pages, found.available_bytes) == (None, None, None)
    assert (found.nodes, found.cpus, found.swap_bytes, found.load) == ({}, frozenset(), 0, None)


def test_no_limit_is_none(tmp_path: Path) -> None:
    files = {"proc/self/limits": LIMITS.replace("8388608  ", "unlimited"), "proc/self/cgroup": "0::/\n"}
    found = look_at_host(ranks=1, root=write(tmp_path, {**machine(64, 60), **files}))
    assert found.locked_bytes is None
    assert found.limit_bytes == found.memory_bytes


def test_a_link(tmp_path: Path) -> None:
    folder = "sys/bus/pci/devices/0000:17:00.0"
    root = write(
        tmp_path,
        {
            f"{folder}/current_link_width": "8\n",
            f"{folder}/max_link_width": "16\n",
            f"{folder}/current_link_speed": "16.0 GT/s PCIe\n",
            f"{folder}/max_link_speed": "32.0 GT/s PCIe\n",
            f"{folder}/numa_node": "1\n",
        },
    )
    assert look_at_bus("0000:17:00.0", root=root) == PcieLink(
        width=8, most_width=16, speed=16.0, most_speed=32.0, node=1
    )
    assert look_at_bus("0000:18:00.0", root=root) == look_at_bus(None, root=root) == PcieLink()
    write(root, {f"{folder}/numa_node": "-1\n", f"{folder}/current_link_width": "255\n"})
    write(root, {f"{folder}/current_link_speed": "Unknown\n"})
    assert look_at_bus("0000:17:00.0", root=root) == PcieLink(most_width=16, most_speed=32.0)


def test_a_disk_that_serves(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    found = look_at_disk(str(tmp_path), root=write(tmp_path, {"proc/self/mountinfo": "1 2 3 / / rw - zfs pool rw\n"}))
    assert (found.path, found.requested, found.filesystem, found.refused) == (str(tmp_path), True, "zfs", None)
    assert found.direct is not None and found.free_bytes is not None and found.free_bytes > 0
    assert look_at_disk(None).requested is False


def test_a_disk_that_does_not(tmp_path: Path) -> None:
    missing = look_at_disk(str(tmp_path / "none"))
    assert (missing.filesystem, missing.free_bytes, missing.direct) == ("", None, None)
    assert missing.refused is not None and "does not exist" in missing.refused
    assert look_at_disk("/proc").free_bytes is None, "it is not full: it has no blocks"
    (tmp_path / "file").touch()
    assert "is not a directory" in str(look_at_disk(str(tmp_path / "file")).refused)


def test_the_home_of_a_user_who_is_not_known() -> None:
    assert "is in a home directory that is not known" in str(look_at_disk("~nobody-of-this-name/x").refused)


def test_no_usual_directory_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise facts.DiskError("no directory for offloaded bytes: x", hint="y")

    monkeypatch.setattr(facts, "default_directory", none)
    found = look_at_disk(None)
    assert found.path is None and found.refused == "no directory for offloaded bytes: x"


def test_only_known_variables_are_shown() -> None:
    given = {"HOME": "/x", "CUDA_LAUNCH_BLOCKING": "1", "LD_PRELOAD": " ", "SECRET": "y"}
    assert look_at_environment(given) == {"CUDA_LAUNCH_BLOCKING": "1"}


@pytest.mark.parametrize(("said", "ranks"), [("4", 4), ("", 1), ("many", 1), ("0", 1)])
def test_ranks(said: str, ranks: int) -> None:
    assert ranks_of({"LOCAL_WORLD_SIZE": said}) == ranks
    assert ranks_of({}) == 1


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("none", set())])
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert facts._cpus(text) == cpus
