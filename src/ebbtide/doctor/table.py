"""The facts as a table: fact, value, and its meaning for training."""

from __future__ import annotations

from ebbtide.base.units import format_size
from ebbtide.doctor.facts import Facts
from ebbtide.report.table import ABSENT, Table

Row = tuple[str, str, str]


def table(facts: Facts) -> Table:
    """Make the table of a machine's facts."""
    rows = [*_device_rows(facts), *_measured_rows(facts), *_store_rows(facts), *_host_rows(facts)]
    return Table(columns=("what", "value", "meaning"), rows=tuple(rows))


def _device_rows(facts: Facts) -> list[Row]:
    device, oldest = facts.device, facts.torch_oldest
    cpu = not device.accelerated
    rows = [
        ("torch", facts.torch, f"tested from {oldest} on" if oldest else "the tested versions are unknown"),
        (
            "device",
            "cpu" if cpu else f"{device.count} x {device.name}",
            "RAM is the memory to save" if cpu else "its memory is the memory to save; one device per rank",
        ),
        (
            "memory",
            format_size(device.memory_bytes),
            f"{format_size(device.free_bytes)} free" + (", less a margin" if cpu else ""),
        ),
    ]
    bus = facts.bus
    if bus is not None and bus.width is not None:
        most = bus.most_width or bus.width
        speed = "" if bus.speed is None else f", {bus.speed:g} GT/s"
        full = bus.width >= most and (bus.speed or 0.0) >= (bus.most_speed or 0.0)
        rows.append(("PCIe link", f"x{bus.width}{speed}", "the device's best" if full else "the device supports more"))
    return rows


def _measured_rows(facts: Facts) -> list[Row]:
    machine = facts.machine
    if machine is None:
        return [("rates", ABSENT, "not measured: see the findings")]
    out, into = machine.out_bytes_per_second, machine.in_bytes_per_second
    balance = machine.flop_per_second * (1 / out + 1 / into)
    return [
        (
            "matrix products",
            _flop(machine.flop_per_second),
            f"half precision; {_flop(machine.flop32_per_second)} float32",
        ),
        ("attention", _flop(machine.attention_flop_per_second), "fused and causal, if the device has it"),
        ("copies of memory", _rate(machine.memory_bytes_per_second), "the rate of element-wise recomputes"),
        ("copy-out", _rate(out), f"1 GiB of activations leaves in {_seconds(1024**3 / out)}"),
        ("copy-in", _rate(into), f"and is back in {_seconds(1024**3 / into)}"),
        ("copying a byte", f"{balance:,.0f} FLOP", "tensors that take fewer per byte are faster to recompute"),
    ]


def _store_rows(facts: Facts) -> list[Row]:
    disk = facts.disk
    kind = disk.filesystem or "file system not known"
    rows: list[Row] = [
        (
            "offloaded bytes wait",
            "on disk" if facts.target == "disk" else "in host memory",
            "with disk behind it" if facts.target == "host" and disk.refused is None else f"target {facts.target}",
        )
    ]
    if disk.path is None:
        return [*rows, ("disk", ABSENT, "none of the usual directories is usable")]
    rows.append(("disk", disk.path, f"{kind}, {_direct(disk.direct)}"))
    if disk.free_bytes is not None:
        rows.append(("space on disk", format_size(disk.free_bytes), "for offloaded bytes"))
    return rows


def _direct(direct: bool | None) -> str:
    if direct is None:
        return "cannot serve"
    return "direct I/O" if direct else "through the page cache"


def _host_rows(facts: Facts) -> list[Row]:
    host, cpu = facts.host, not facts.device.accelerated
    available = "" if host.available_bytes is None else f"{format_size(host.available_bytes)} not in use"
    rows: list[Row] = [
        ("host memory", format_size(host.memory_bytes), available or ABSENT),
        ("control group", *_group(facts)),
        ("a rank's share", format_size(host.share_bytes), _share(facts)),
        ("swap", *_swap(facts)),
    ]
    if facts.machine is not None and not cpu:
        rate = _rate(facts.machine.host_bytes_per_second)
        rows.append(("copies of host memory", rate, "shared by all links of the node"))
    if facts.device.pinned is not None:
        what = "copies overlap compute" if facts.device.asynchronous else "copies stall compute"
        rows.append(("pinned memory", "yes" if facts.device.pinned else "no", what))
    locked = "no limit" if host.locked_bytes is None else format_size(host.locked_bytes)
    counted = (
        "CUDA's pinned memory is not counted" if facts.device.kind == "cuda" else "a driver may count pinned memory"
    )
    rows.append(("locked memory", locked, "not needed on a CPU" if cpu else counted))
    if host.nodes:
        rows.append(("memory nodes", str(len(host.nodes)), _node(facts)))
    if host.huge_pages is not None:
        rows.append(("huge pages", host.huge_pages, "torch requests them with THP_MEM_ALLOC_ENABLE=1"))
    if cpu:
        rows.append(("freed memory", *_freed(facts)))
    return rows


def _group(facts: Facts) -> tuple[str, str]:
    host = facts.host
    if host.limit_bytes >= host.memory_bytes:
        return "no limit", "all of the machine's memory may be used"
    return format_size(host.limit_bytes), "a process above it is killed"


def _swap(facts: Facts) -> tuple[str, str]:
    host = facts.host
    if not host.swap_bytes:
        return "none", "a process that does not fit is killed"
    return format_size(host.swap_bytes), f"{format_size(host.swap_used_bytes)} in use"


def _share(facts: Facts) -> str:
    ranks = "one rank" if facts.ranks == 1 else f"each of {facts.ranks} ranks"
    use = "may hold of offloaded bytes" if facts.device.accelerated else "could have"
    return f"what {ranks} {use}, less a margin"


def _node(facts: Facts) -> str:
    node = facts.bus.node if facts.bus is not None else None
    if len(facts.host.nodes) < 2:
        return "all memory is equally near"
    return "the device's node is unknown" if node is None else f"the device is attached to node {node}"


def _freed(facts: Facts) -> tuple[str, str]:
    """Describe whether freed memory is returned, on a CPU. See ``store/allocator.py``."""
    if "malloc" in facts.environment.get("LD_PRELOAD", ""):
        return "another allocator", "LD_PRELOAD names it: it decides when memory is returned"
    threshold = facts.environment.get("MALLOC_MMAP_THRESHOLD_")
    if threshold is not None:
        return "leaves at once", f"MALLOC_MMAP_THRESHOLD_={threshold}"
    if facts.host.libc is None:
        return ABSENT, "not glibc"
    return "serves the next step", "leaves the process after each backward where a memory budget is set"


def _flop(rate: float) -> str:
    if rate < 1e11:
        return f"{rate / 1e9:.1f} GFLOP/s"
    return f"{rate / 1e12:,.2f} TFLOP/s" if rate < 1e13 else f"{rate / 1e12:,.0f} TFLOP/s"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s" if rate < 1e10 else f"{rate / 1e9:,.0f} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
