"""Rules about the store: disk, host memory, and the system's limits on both.

Each returns a finding and a hint, or ``None``.
"""

from __future__ import annotations

from ebbtide.base.units import format_size
from ebbtide.doctor.facts import Facts
from ebbtide.store.location import RAM_FILESYSTEMS

Advice = tuple[str, str]
"""The observation and the remedy."""

NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "afs"}
)
LAYERED_FILESYSTEMS = frozenset({"overlay", "aufs", "fuse-overlayfs"})

_GIB = 1024**3
_LEAST_DISK_BYTES = _GIB
_LEAST_SHARE_BYTES = _GIB
_LEAST_FILES = 1024
_SLOW_DISK = 200e6
_SWAPPED_BYTES = _GIB // 4


def accelerated(facts: Facts) -> bool:
    """Whether there is an accelerator."""
    return facts.device.kind != "cpu"


def wants_disk(facts: Facts) -> bool:
    """Whether the disk must be usable: it is the target, or the user named it."""
    return facts.target == "disk" or facts.disk.requested


def in_ram(facts: Facts) -> Advice | None:
    """EBB010: the disk path is in RAM."""
    if not wants_disk(facts) or facts.disk.filesystem not in RAM_FILESYSTEMS:
        return None
    return (
        f"{facts.disk.path} is on {facts.disk.filesystem}, which is RAM: offloading there frees nothing",
        "choose a directory on a local disk with --disk_path",
    )


def no_disk(facts: Facts) -> Advice | None:
    """EBB011: the disk path is unusable."""
    known = in_ram(facts) or full_disk(facts)
    if not wants_disk(facts) or facts.disk.refused is None or known is not None:
        return None
    return facts.disk.refused, "choose a writable directory on a local disk with --disk_path"


def nothing_behind(facts: Facts) -> Advice | None:
    """EBB012: no disk behind host memory."""
    if wants_disk(facts) or facts.disk.refused is None:
        return None
    return (
        f"there is no disk behind host memory ({facts.disk.refused})",
        "name one with --disk_path; otherwise bytes beyond a rank's share of host memory stay on the device",
    )


def full_disk(facts: Facts) -> Advice | None:
    """EBB013: less than 1 GiB free on the disk."""
    free = facts.disk.free_bytes
    if not wants_disk(facts) or free is None or free >= _LEAST_DISK_BYTES or in_ram(facts) is not None:
        return None
    return (
        f"{format_size(free)} are free in {facts.disk.path}",
        "free some space there, or choose a larger disk with --disk_path",
    )


def small_disk(facts: Facts) -> Advice | None:
    """EBB014: less free on the disk than the machine's memory."""
    free, scarce = facts.disk.free_bytes, facts.device.memory_bytes
    if facts.target != "disk" or free is None or not _LEAST_DISK_BYTES <= free < scarce or in_ram(facts) is not None:
        return None
    return (
        f"{format_size(free)} are free in {facts.disk.path}, less than the {format_size(scarce)} of memory",
        "enough for a step that offloads less than that; otherwise choose a larger disk with --disk_path",
    )


def network_disk(facts: Facts) -> Advice | None:
    """EBB015: the disk path is on a network."""
    kind = facts.disk.filesystem
    if not wants_disk(facts) or not (kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")):
        return None
    return (
        f"{facts.disk.path} is on {kind}, across a network or another program",
        "choose a directory on a local disk with --disk_path: others share this one, and its rate varies",
    )


def layered_disk(facts: Facts) -> Advice | None:
    """EBB016: the disk path is in a container's layer."""
    if not wants_disk(facts) or facts.disk.filesystem not in LAYERED_FILESYSTEMS:
        return None
    return (
        f"{facts.disk.path} is on {facts.disk.filesystem}, a container's own layer",
        "mount a local disk into the container and name it with --disk_path: a layer has little space",
    )


def buffered(facts: Facts) -> Advice | None:
    """EBB017: direct I/O is refused."""
    if not wants_disk(facts) or facts.disk.direct is not False:
        return None
    return (
        f"direct I/O is refused in {facts.disk.path}: offloaded bytes pass through the page cache, which takes RAM and "
        "cycles, and the measured rates are the cache's",
        "choose a directory on a local ext4 or xfs disk with --disk_path",
    )


def slow_disk(facts: Facts) -> Advice | None:
    """EBB018: the disk moves less than 200 MB/s."""
    if facts.target != "disk" or facts.machine is None:
        return None
    rate = min(facts.machine.out_bytes_per_second, facts.machine.in_bytes_per_second)
    if rate >= _SLOW_DISK:
        return None
    return (
        f"the disk moves {format_size(rate)}/s: a step waits for its copies",
        "name a faster disk with --disk_path, or recompute more: policy minimal, or both flags of `ebbtide sft`",
    )


def grouped(facts: Facts) -> Advice | None:
    """EBB020: a control group limits memory below the machine's."""
    host = facts.host
    if host.limit_bytes >= host.memory_bytes:
        return None
    return (
        f"a control group allows {format_size(host.limit_bytes)} of the machine's {format_size(host.memory_bytes)}",
        "a process above it is killed; ebbtide stays below it, and a larger container offloads more",
    )


def little_share(facts: Facts) -> Advice | None:
    """EBB021: less than 1 GiB of host memory for a rank."""
    if not accelerated(facts) or facts.target != "host" or facts.host.share_bytes >= _LEAST_SHARE_BYTES:
        return None
    return (
        f"{format_size(facts.host.share_bytes)} of host memory are free for a rank's offloaded bytes",
        "end other users of host memory, run fewer ranks on the node, or raise the container's limit",
    )


def little_memory(facts: Facts) -> Advice | None:
    """EBB022: less than 1 GiB of memory free, on a CPU."""
    if accelerated(facts) or facts.host.share_bytes >= _LEAST_SHARE_BYTES:
        return None
    return (
        f"{format_size(facts.host.share_bytes)} of memory are free here, without a margin",
        "end other users of memory, or raise the container's limit",
    )


def swapping(facts: Facts) -> Advice | None:
    """EBB023: the system swaps."""
    if facts.host.swap_used_bytes < _SWAPPED_BYTES:
        return None
    return (
        f"{format_size(facts.host.swap_used_bytes)} are swapped out",
        "end other users of memory: a system that swaps moves the same bytes again",
    )


def not_pinned(facts: Facts) -> Advice | None:
    """EBB024: host memory cannot be pinned."""
    if facts.device.pinned is not False:
        return None
    limit = facts.host.locked_bytes
    locked = "" if limit is None else f" (a process may lock {format_size(limit)})"
    return (
        f"host memory cannot be pinned{locked}: each copy stalls compute",
        "raise `ulimit -l`, or the container's memlock limit, if the device's driver counts pinned memory against it",
    )


def halting(facts: Facts) -> Advice | None:
    """EBB025: the device's copies are synchronous."""
    if facts.device.asynchronous is not False or facts.device.pinned is False:
        return None
    return (
        f"copies are synchronous on {facts.device.name}: each one stalls compute",
        "recompute more and offload less: policy minimal, or both flags of `ebbtide sft`",
    )


def few_files(facts: Facts) -> Advice | None:
    """EBB026: fewer than 1024 open files."""
    if facts.host.open_files is None or facts.host.open_files >= _LEAST_FILES:
        return None
    return (
        f"a process may have {facts.host.open_files} files open",
        f"`ulimit -n {_LEAST_FILES}` or more: checkpoints in many files and data loaders need them",
    )


def other_libc(facts: Facts) -> Advice | None:
    """EBB027: the C library is not glibc, on a CPU."""
    if accelerated(facts) or facts.host.libc is not None:
        return None
    return (
        "the C library is not glibc: its allocator decides whether freed memory is returned",
        "watch resident memory; if it does not fall, preload jemalloc or use a system with glibc",
    )
