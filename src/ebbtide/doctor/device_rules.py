"""Rules about the device, its link, and environment variables.

Each returns a finding and a hint, or ``None``.
"""

from __future__ import annotations

from ebbtide.base.checks import FALSE, NOTHING
from ebbtide.base.extras import is_older
from ebbtide.base.units import format_size
from ebbtide.doctor.facts import ALLOCATORS, BLOCKING, OF_NPU, OFFLOADERS, Facts
from ebbtide.doctor.rules import Advice, rule

_SLOW_LINK = 6e9
_FREE_SHARE, _BUSY_SHARE = 0.9, 0.5

_EXPANDABLE = "expandable_segments:true"
_OFF = (*FALSE, *NOTHING)


@rule("EBB001", "problem", "torch is older than the tested versions")
def _old_torch(facts: Facts) -> Advice | None:
    if facts.torch_oldest is None or not is_older(facts.torch, facts.torch_oldest):
        return None
    return (
        f"torch {facts.torch} is older than {facts.torch_oldest}, the oldest tested version",
        f"pip install --upgrade 'torch>={facts.torch_oldest}'; docs/reference/versions.md lists the tested versions",
    )


@rule("EBB003", "note", "the device has no native bfloat16")
def _no_bfloat16(facts: Facts) -> Advice | None:
    if facts.device.bfloat16:
        return None
    return (
        f"{facts.device.name} has no native bfloat16",
        "train in float16 or float32; bfloat16 is emulated there, slowly, if at all",
    )


@rule("EBB004", "note", "other processes use a tenth of the device's memory")
def _device_in_use(facts: Facts) -> Advice | None:
    device = facts.device
    if not device.accelerated or device.free_bytes >= _FREE_SHARE * device.memory_bytes:
        return None
    taken = format_size(device.memory_bytes - device.free_bytes)
    return (
        f"{taken} of the device's {format_size(device.memory_bytes)} are used by other processes",
        "stop other work on the device; a memory budget counts from the free memory",
    )


@rule("EBB005", "note", "disk target with an accelerator")
def _disk_with_device(facts: Facts) -> Advice | None:
    if facts.target != "disk" or not facts.device.accelerated:
        return None
    return (
        "the disk target offloads tensors in RAM only, and this machine has an accelerator",
        "--target host (the default here); bytes beyond host memory spill to disk",
    )


@rule("EBB006", "problem", "more ranks on the node than devices")
def _more_ranks(facts: Facts) -> Advice | None:
    if not facts.device.accelerated or facts.ranks <= facts.device.count:
        return None
    return (
        f"LOCAL_WORLD_SIZE is {facts.ranks}, but {facts.device.count} devices are visible",
        "start one rank per device, or check whether CUDA_VISIBLE_DEVICES hides some",
    )


@rule("EBB007", "note", "other work runs on the CPUs")
def _busy(facts: Facts) -> Advice | None:
    host = facts.host
    load, cpus = host.load, sum(len(cpus) for cpus in host.nodes.values()) or len(host.cpus)
    if load is None or not cpus or load < _BUSY_SHARE * cpus:
        return None
    return (
        f"{load:.1f} threads ran or waited on {cpus} CPUs of the machine in the last minute: "
        "the measured rates are too low",
        "repeat on an idle machine, above all for a machine file",
    )


@rule("EBB030", "note", "the PCIe link has fewer lanes than the device")
def _fewer_lanes(facts: Facts) -> Advice | None:
    bus = facts.bus
    if bus is None or bus.width is None or bus.most_width is None or bus.width >= bus.most_width:
        return None
    return (
        f"the device's link has {bus.width} of {bus.most_width} lanes",
        "put the device into a slot with all lanes, or check the riser, the seat and the BIOS",
    )


@rule("EBB031", "note", "the PCIe link is slower than the device")
def _slower_lanes(facts: Facts) -> Advice | None:
    bus = facts.bus
    if bus is None or bus.speed is None or bus.most_speed is None or bus.speed >= bus.most_speed:
        return None
    return (
        f"the device's link runs at {bus.speed:g} of {bus.most_speed:g} GT/s",
        "an idle device lowers it: repeat under load; otherwise the slot or the BIOS limits it",
    )


@rule("EBB032", "note", "the link moves less than 6 GB/s")
def _slow_link(facts: Facts) -> Advice | None:
    if facts.target != "host" or facts.machine is None:
        return None
    rate = min(facts.machine.out_bytes_per_second, facts.machine.in_bytes_per_second)
    if rate >= _SLOW_LINK:
        return None
    return (
        f"the link moves {rate / 1e9:.1f} GB/s, less than four lanes of PCIe 4 do",
        "check the width and speed of the link, and whether other processes copy; offload less: policy minimal or auto",
    )


@rule("EBB034", "note", "the process is not bound to the device's node")
def _far_node(facts: Facts) -> Advice | None:
    node = facts.bus.node if facts.bus is not None else None
    if node is None or len(facts.host.nodes) < 2 or not facts.host.cpus:
        return None
    near = facts.host.nodes.get(node, frozenset())
    if not near or facts.host.cpus <= near:
        return None
    return (
        f"the device is attached to memory node {node}, and this process may run on another: pinned memory may be far",
        f"start each rank on its device's node: numactl --cpunodebind={node} --membind={node} ...",
    )


@rule("EBB035", "note", "host memory cannot feed all links")
def _thin_host(facts: Facts) -> Advice | None:
    machine, ranks = facts.machine, max(facts.ranks, facts.device.count)
    if facts.target != "host" or machine is None or ranks < 2:
        return None
    wanted = ranks * max(machine.out_bytes_per_second, machine.in_bytes_per_second)
    if machine.host_bytes_per_second >= wanted:
        return None
    return (
        f"host memory moves {machine.host_bytes_per_second / 1e9:.0f} GB/s and {ranks} links {wanted / 1e9:.0f} GB/s: "
        "when all copy at once, each gets less than was measured",
        "plans use a rank's share; bind ranks to the memory node of their device",
    )


@rule("EBB040", "note", "variables of other offloaders")
def _other_offloaders(facts: Facts) -> Advice | None:
    found = [name for name in OFFLOADERS if facts.environment.get(name, "0").strip().lower() not in _OFF]
    if not found:
        return None
    return (
        f"{', '.join(found)} set: another tool offloads or checkpoints too",
        "unset tools that move or checkpoint activations: one offloader per model; those for weights, optimizer state "
        "share the link",
    )


@rule("EBB041", "note", "variables that serialize copies and compute")
def _blocking(facts: Facts) -> Advice | None:
    found = [name for name in BLOCKING if facts.environment.get(name, "0").strip().lower() not in _OFF]
    if not found or not facts.device.accelerated:
        return None
    return (
        f"{', '.join(found)} set: nothing overlaps, and copies stall compute",
        "unset it; it is for debugging",
    )


@rule("EBB042", "note", "usual variables of the allocator or of torch_npu are not set")
def _unset(facts: Facts) -> Advice | None:
    names = ALLOCATORS.get(facts.device.kind)
    if names is None:
        return None
    configured = ",".join(facts.environment.get(name, "") for name in names).replace(" ", "").lower()
    missing = [] if _EXPANDABLE in configured else [f"{names[-1]}=expandable_segments:True"]
    if facts.device.kind == "npu":
        missing += [f"{name}={value}" for name, value in OF_NPU.items() if name not in facts.environment]
    if not missing:
        return None
    return (
        f"not set: {', '.join(missing)}",
        "expandable segments leave fewer gaps in device memory; docs/guides/from-ms-swift-and-verl.md, Environment, "
        "says what each does. ebbtide sets none of them",
    )
