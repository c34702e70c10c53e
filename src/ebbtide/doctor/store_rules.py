"""Rules about the store: disk, host memory, and the system's limits on both.

Each returns a finding and a hint, or ``None``.
"""

from __future__ import annotations

from ebbtide.base.units import format_size
from ebbtide.doctor.facts import Facts
from ebbtide.doctor.rules import Advice, rule
from ebbtide.store.location import RAM_FILESYSTEMS

NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "afs"}
)
LAYERED_FILESYSTEMS = frozenset({"overlay", "aufs", "fuse-overlayfs"})

_GIB = 1024**3
_LEAST_DISK_BYTES = _GIB
_LEAST_SHARE_BYTES = _GIB
_SLOW_DISK = 200e6
_SWAPPED_BYTES = _GIB // 4


def _wants_disk(facts: Facts) -> bool:
    """Whether the disk must be usable: it is the target, or the user named it."""
    return facts.target == "disk" or facts.disk.requested


@rule("EBB002", "problem", "the machine could not be measured")
def _unmeasured(facts: Facts) -> Advice | None:
    explained = facts.target == "disk" and any(check(facts) is not None for check in (_in_ram, _no_disk, _full_disk))
    if facts.unmeasured is None or explained:
        return None
    return f"this machine could not be measured: {facts.unmeasured}", facts.advice or "see the other findings"


@rule("EBB010", "problem", "the disk path is in RAM")
def _in_ram(facts: Facts) -> Advice | None:
    if not _wants_disk(facts) or facts.disk.filesystem not in RAM_FILESYSTEMS:
        return None
    return (
        f"{facts.disk.path} is on {facts.disk.filesystem}, which is RAM: offloading there frees nothing",
        "choose a directory on a local disk with --disk_path",
    )


@rule("EBB011", "problem", "the disk path is unusable")
def _no_disk(facts: Facts) -> Advice | None:
    known = _in_ram(facts) or _full_disk(facts)
    if not _wants_disk(facts) or facts.disk.refused is None or known is not None:
        return None
    return facts.disk.refused, "choose a writable directory on a local disk with --disk_path"


@rule("EBB012", "note", "no disk behind host memory")
def _nothing_behind(facts: Facts) -> Advice | None:
    if _wants_disk(facts) or facts.disk.refused is None:
        return None
    return (
        f"there is no disk behind host memory ({facts.disk.refused})",
        "name one with --disk_path; otherwise bytes beyond a rank's share of host memory stay on the device",
    )


@rule("EBB013", "problem", "less than 1 GiB free on the disk")
def _full_disk(facts: Facts) -> Advice | None:
    free = facts.disk.free_bytes
    if not _wants_disk(facts) or free is None or free >= _LEAST_DISK_BYTES or _in_ram(facts) is not None:
        return None
    return (
        f"{format_size(free)} are free in {facts.disk.path}",
        "free some space there, or choose a larger disk with --disk_path",
    )


@rule("EBB014", "note", "less free on the disk than the machine's memory")
def _small_disk(facts: Facts) -> Advice | None:
    free, scarce = facts.disk.free_bytes, facts.device.memory_bytes
    if facts.target != "disk" or free is None or not _LEAST_DISK_BYTES <= free < scarce or _in_ram(facts) is not None:
        return None
    return (
        f"{format_size(free)} are free in {facts.disk.path}, less than the {format_size(scarce)} of memory",
        "enough for a step that offloads less than that; otherwise choose a larger disk with --disk_path",
    )


@rule("EBB015", "note", "the disk path is on a network")
def _network_disk(facts: Facts) -> Advice | None:
    kind = facts.disk.filesystem
    if not _wants_disk(facts) or not (kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")):
        return None
    return (
        f"{facts.disk.path} is on {kind}, across a network or another program",
        "choose a directory on a local disk with --disk_path: others share this one, and its rate varies",
    )


@rule("EBB016", "note", "the disk path is in a container's layer")
def _layered_disk(facts: Facts) -> Advice | None:
    if not _wants_disk(facts) or facts.disk.filesystem not in LAYERED_FILESYSTEMS:
        return None
    return (
        f"{facts.disk.path} is on {facts.disk.filesystem}, a container's own layer",
        "mount a local disk into the container and name it with --disk_path: a layer has little space",
    )


@rule("EBB017", "note", "direct I/O is refused")
def _buffered(facts: Facts) -> Advice | None:
    if not _wants_disk(facts) or facts.disk.direct is not False:
        return None
    return (
        f"direct I/O is refused in {facts.disk.path}: offloaded bytes pass through the page cache, which takes RAM and "
        "cycles, and the measured rates are the cache's",
        "choose a directory on a local ext4 or xfs disk with --disk_path",
    )


@rule("EBB018", "note", "the disk moves less than 200 MB/s")
def _slow_disk(facts: Facts) -> Advice | None:
    if facts.target != "disk" or facts.machine is None:
        return None
    rate = min(facts.machine.out_bytes_per_second, facts.machine.in_bytes_per_second)
    if rate >= _SLOW_DISK:
        return None
    return (
        f"the disk moves {format_size(rate)}/s: a step waits for its copies",
        "name a faster disk with --disk_path, or recompute more: policy minimal, or both flags of `ebbtide sft`",
    )


@rule("EBB020", "note", "a control group limits memory below the machine's")
def _grouped(facts: Facts) -> Advice | None:
    host = facts.host
    if host.limit_bytes >= host.memory_bytes:
        return None
    return (
        f"a control group allows {format_size(host.limit_bytes)} of the machine's {format_size(host.memory_bytes)}",
        "a process above it is killed; ebbtide stays below it, and a larger container offloads more",
    )


@rule("EBB021", "problem", "less than 1 GiB of host memory for a rank")
def _little_share(facts: Facts) -> Advice | None:
    if not facts.device.accelerated or facts.target != "host" or facts.host.share_bytes >= _LEAST_SHARE_BYTES:
        return None
    return (
        f"{format_size(facts.host.share_bytes)} of host memory are free for a rank's offloaded bytes",
        "stop other processes that use host memory, run fewer ranks on the node, or raise the container's limit",
    )


@rule("EBB022", "note", "less than 1 GiB of memory free, on a CPU")
def _little_memory(facts: Facts) -> Advice | None:
    if facts.device.accelerated or facts.host.share_bytes >= _LEAST_SHARE_BYTES:
        return None
    return (
        f"{format_size(facts.host.share_bytes)} of memory are free here, without a margin",
        "stop other processes that use memory, or raise the container's limit",
    )


@rule("EBB023", "note", "the system swaps")
def _swapping(facts: Facts) -> Advice | None:
    if facts.host.swap_used_bytes < _SWAPPED_BYTES:
        return None
    return (
        f"{format_size(facts.host.swap_used_bytes)} are swapped out",
        "stop other processes that use memory: a system that swaps moves the same bytes again",
    )


@rule("EBB024", "problem", "host memory cannot be pinned")
def _not_pinned(facts: Facts) -> Advice | None:
    if facts.device.pinned is not False:
        return None
    limit = facts.host.locked_bytes
    locked = "" if limit is None else f" (a process may lock {format_size(limit)})"
    return (
        f"host memory cannot be pinned{locked}: each copy stalls compute",
        "raise `ulimit -l`, or the container's memlock limit, if the device's driver counts pinned memory against it",
    )


@rule("EBB025", "note", "the device's copies are synchronous")
def _halting(facts: Facts) -> Advice | None:
    if facts.device.asynchronous is not False or facts.device.pinned is False:
        return None
    return (
        f"copies are synchronous on {facts.device.name}: each one stalls compute",
        "recompute more and offload less: policy minimal, or both flags of `ebbtide sft`",
    )
