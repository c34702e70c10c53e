"""A rank's default limit of host memory.

It is a fair share of this node's limit, the smallest of the machine's memory and the limits of the process's control
groups; and at most a fair share of the free memory, less a margin: a control group that exceeds its limit is killed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MARGIN_DIVISOR = 16
_LEAST_MARGIN_BYTES, _MOST_MARGIN_BYTES = 256 << 20, 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory shared by processes: its limit and its free part."""

    limit_bytes: int
    free_bytes: int


def fair_share_bytes(*, root: Path = Path("/"), ranks: int | None = None) -> int:
    """Return the most bytes of host memory for this rank's offloaded tensors.

    Args:
        root: The folder of ``proc`` and ``sys``.
        ranks: Ranks on this node; ``None``: ``LOCAL_WORLD_SIZE``, else one.
    """
    ranks = ranks_of(os.environ) if ranks is None else ranks
    return share_of(memory_limit_bytes(root=root), free_memory_bytes(root=root), ranks)


def ranks_of(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this node: ``LOCAL_WORLD_SIZE``, else one."""
    text = environment.get("LOCAL_WORLD_SIZE", "").strip()
    return max(1, int(text)) if text.isdecimal() else 1


def share_of(limit_bytes: int, free_bytes: int, ranks: int) -> int:
    """Return each rank's share of a node's host memory, less a margin that stays free."""
    margin = min(max(limit_bytes // _MARGIN_DIVISOR, _LEAST_MARGIN_BYTES), _MOST_MARGIN_BYTES)
    return max(0, min(limit_bytes, free_bytes) - margin) // max(1, ranks)


def memory_limit_bytes(*, root: Path = Path("/")) -> int:
    """Return this process's limit of host memory: the machine's, or the smallest control group's."""
    return min(x.limit_bytes for x in (_machine(root), *_groups(root)))


def free_memory_bytes(*, root: Path = Path("/")) -> int:
    """Return the free host memory: the machine's, or the rest of the smallest control group's limit."""
    return max(0, min(x.free_bytes for x in (_machine(root), *_groups(root))))


def _machine(root: Path) -> Memory:
    fields = fields_of(root / "proc/meminfo", unit=1024)
    total = fields.get("MemTotal:")
    if total is None:  # not Linux: free memory is unknown; assume half
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(limit_bytes=total, free_bytes=total // 2)
    return Memory(limit_bytes=total, free_bytes=fields.get("MemAvailable:", total // 2))


def _groups(root: Path) -> list[Memory]:
    """Return the limits of the control groups (version 2, or version 1's memory controller) that hold this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Memory] = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container may see its own group as the root, under any path: then only the root exists.
        inner = (top / path.lstrip("/")).resolve()
        for folder in dict.fromkeys((top, inner, *inner.parents)):
            if folder == top or top in folder.parents:
                found += _group(folder, *names)
    return found


def _group(folder: Path, limit_name: str, used_name: str, cache_name: str) -> list[Memory]:
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None:
        return []
    reclaimable = fields_of(folder / "memory.stat").get(cache_name, 0)
    return [Memory(limit_bytes=limit, free_bytes=limit - used + min(reclaimable, used))]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def fields_of(path: Path, *, unit: int = 1) -> dict[str, int]:
    """Return the lines of a file that are a name and a number; none without the file."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}
