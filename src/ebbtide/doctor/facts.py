"""Facts about a machine as plain values; the system's files are read below a root.

``None``: not known, or absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide.base.errors import DiskError
from ebbtide.planner.machines import Machine
from ebbtide.store.aligned import BackingFile
from ebbtide.store.location import check_directory, default_directory, filesystem_of
from ebbtide.store.share import fair_share_bytes, fields_of, memory_limit_bytes

OFFLOADERS = (
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "FSDP_OFFLOAD_PARAMS",
    "NVTE_CPU_OFFLOAD_V1",
    "UNSLOTH_GC_OFFLOAD_BACKEND",
    "UNSLOTH_GC_PREFETCH",
)
BLOCKING = (
    "ASCEND_LAUNCH_BLOCKING",
    "CUDA_LAUNCH_BLOCKING",
    "HIP_LAUNCH_BLOCKING",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
ALLOCATORS = {
    "cuda": ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "npu": ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"),
}
"""Device kind → variables of its allocator, last the one that each torch reads: that for CUDA does not get the settings
of ``PYTORCH_ALLOC_CONF`` in torch 2.9.1 (pytorch/pytorch issue 183387)."""

OF_NPU = {"TASK_QUEUE_ENABLE": "2", "COMBINED_ENABLE": "1", "CPU_AFFINITY_CONF": "1", "TORCH_HCCL_ZERO_COPY": "1"}
"""Variables of torch_npu that trainers for Ascend recommend, with the usual value."""

_OTHERS = {"LD_PRELOAD", "LOCAL_WORLD_SIZE", "MALLOC_MMAP_THRESHOLD_"}
VARIABLES = tuple(sorted(_OTHERS.union(OFFLOADERS, BLOCKING, OF_NPU, *ALLOCATORS.values())))
"""The only environment variables that are read, shown or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The accelerator, or without one the CPU.

    Attributes:
        kind: ``"cpu"``, ``"cuda"`` and so on.
        name: The vendor's name.
        count: The number of devices.
        memory_bytes: Memory of one device.
        free_bytes: Free part of it.
        bfloat16: Whether it computes in bfloat16 natively.
        pinned: Whether host memory can be pinned for it; ``None`` on a CPU.
        asynchronous: Whether copies overlap compute; ``None`` on a CPU.
        address: On the PCI bus, such as ``"0000:17:00.0"``.
    """

    kind: str
    name: str
    count: int
    memory_bytes: int
    free_bytes: int
    bfloat16: bool
    pinned: bool | None
    asynchronous: bool | None
    address: str | None

    @property
    def accelerated(self) -> bool:
        """Whether it is an accelerator."""
        return self.kind != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """A device's link to the PCI bus.

    Attributes:
        width: Current lanes.
        most_width: Lanes of the device.
        speed: Current gigatransfers per second and lane; lower while the device is idle.
        most_speed: The device's maximum.
        node: Its memory node; ``None``: the only one, or unknown.
    """

    width: int | None = None
    most_width: int | None = None
    speed: float | None = None
    most_speed: float | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The directory of the disk tier.

    Attributes:
        path: The directory; ``None``: none of the usual ones is usable.
        requested: Whether the user named it.
        filesystem: Its type, ``""`` if not known.
        free_bytes: Space available to this user.
        direct: Whether it supports direct I/O.
        refused: Why it is unusable.
    """

    path: str | None
    requested: bool
    filesystem: str
    free_bytes: int | None
    direct: bool | None
    refused: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host memory, and the system's limits on a process.

    Attributes:
        memory_bytes: Memory of the machine.
        limit_bytes: The smallest memory limit of this process's control groups, or the machine's memory.
        available_bytes: Unused memory of the machine.
        share_bytes: Limit of one rank's offloaded bytes.
        swap_bytes: Swap space.
        swap_used_bytes: Used part of it.
        locked_bytes: Limit of locked memory per process; ``None``: unlimited.
        nodes: Memory node → its CPUs.
        cpus: CPUs this process may run on; empty if not known.
        huge_pages: ``"always"``, ``"madvise"`` or ``"never"``.
        libc: The C library, such as ``"glibc 2.36"``; ``None``: another one.
        load: The machine's load average over the last minute.
    """

    memory_bytes: int
    limit_bytes: int
    available_bytes: int | None
    share_bytes: int
    swap_bytes: int
    swap_used_bytes: int
    locked_bytes: int | None
    nodes: Mapping[int, frozenset[int]]
    cpus: frozenset[int]
    huge_pages: str | None
    libc: str | None
    load: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The input of all rules.

    Attributes:
        torch: Version of torch.
        torch_oldest: Oldest tested version; ``None``: not known.
        target: Target of offloaded bytes, ``"host"`` or ``"disk"``.
        device: The device whose memory is to be saved.
        bus: Its PCI link; ``None`` on a CPU.
        disk: Directory of the disk tier.
        host: Host memory and limits.
        ranks: Ranks of this node, from ``LOCAL_WORLD_SIZE``.
        environment: Those of ``VARIABLES`` that are set.
        machine: Measured rates; ``None``: measuring failed.
        unmeasured: Why measuring failed.
        advice: The hint of that error.
    """

    torch: str
    torch_oldest: str | None
    target: str
    device: DeviceFacts
    bus: PcieLink | None
    disk: Disk
    host: Host
    ranks: int
    environment: Mapping[str, str]
    machine: Machine | None = None
    unmeasured: str | None = None
    advice: str | None = None


def look_at_host(*, ranks: int, root: Path = Path("/")) -> Host:
    """Read the system's facts about host memory and process limits.

    Args:
        ranks: Ranks that share this node.
        root: The folder of ``proc`` and ``sys``.
    """
    memory = fields_of(root / "proc/meminfo", unit=1024)
    locked = re.search(r"Max locked memory\s+(\d+)\s", _text(root / "proc/self/limits") or "")
    limit = memory_limit_bytes(root=root)
    cpus = re.search(r"Cpus_allowed_list:\s*(\S+)", _text(root / "proc/self/status") or "")
    swap = memory.get("SwapTotal:", 0)
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", huge)
    return Host(
        memory_bytes=memory.get("MemTotal:") or limit,
        limit_bytes=limit,
        available_bytes=memory.get("MemAvailable:"),
        share_bytes=fair_share_bytes(root=root, ranks=ranks),
        swap_bytes=swap,
        swap_used_bytes=swap - min(swap, memory.get("SwapFree:", 0)),
        locked_bytes=int(locked[1]) if locked else None,
        nodes=_nodes(root / "sys/devices/system/node"),
        cpus=_cpus(cpus[1] if cpus else ""),
        huge_pages=chosen[1] if chosen else None,
        libc=_libc(),
        load=_number(root / "proc/loadavg"),
    )


def look_at_disk(disk_path: str | None, *, root: Path = Path("/")) -> Disk:
    """Find the directory of the disk tier, and test whether a file can be created there; errors are facts, too.

    Args:
        disk_path: The requested directory; ``None``: a usual one.
        root: The folder of ``proc``.
    """
    directory, direct, refused = None if disk_path is None else Path(os.path.expanduser(disk_path)), None, None
    try:
        directory = default_directory() if directory is None else check_directory(directory)
        file = BackingFile(directory)
        direct = file.direct
        file.close()
    except DiskError as error:
        refused = error.found
    exists = directory is not None and os.path.isdir(directory)
    return Disk(
        path=None if directory is None else str(directory),
        requested=disk_path is not None,
        filesystem=filesystem_of(directory, mountinfo=root / "proc/self/mountinfo") if directory and exists else "",
        free_bytes=_free_bytes(directory) if directory and exists else None,
        direct=direct,
        refused=refused,
    )


def look_at_bus(address: str | None, *, root: Path = Path("/")) -> PcieLink:
    """Read the facts about a device's PCI link.

    Args:
        address: Such as ``"0000:17:00.0"``; ``None``: neither it nor any fact is known.
        root: The folder of ``sys``.
    """
    if address is None:
        return PcieLink()
    folder = root / "sys/bus/pci/devices" / address
    node = _number(folder / "numa_node")
    return PcieLink(
        width=_lanes(folder / "current_link_width"),
        most_width=_lanes(folder / "max_link_width"),
        speed=_number(folder / "current_link_speed") or None,
        most_speed=_number(folder / "max_link_speed") or None,
        node=None if node is None or node < 0 else int(node),
    )


def look_at_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``VARIABLES`` that are set and not empty."""
    return {name: environment[name] for name in VARIABLES if environment.get(name, "").strip()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> float | None:
    """Return the number at the start of a file, such as 32.0 of ``"32.0 GT/s PCIe"``."""
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", _text(path) or "")
    return float(found[1]) if found else None


def _lanes(path: Path) -> int | None:
    """Return a link's width; 0 and 255 mean down or unknown."""
    found = _number(path)
    return int(found) if found is not None and 0 < found <= 32 else None


def _cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as ``"0-3,8"``."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.strip().isdecimal():
            found.update(range(int(first), int(last if last.strip().isdecimal() else first) + 1))
    return frozenset(found)


def _nodes(folder: Path) -> dict[int, frozenset[int]]:
    found = {int(path.name[4:]): path for path in folder.glob("node[0-9]*") if path.name[4:].isdecimal()}
    return {node: _cpus((_text(path / "cpulist") or "").strip()) for node, path in sorted(found.items())}


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError, AttributeError):  # no glibc
        return None


def _free_bytes(directory: Path) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # /sys and /proc are no disks
