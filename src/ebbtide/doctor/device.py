"""The facts that torch reports about the device."""

from __future__ import annotations

import contextlib

import torch

from ebbtide.base.errors import TargetError
from ebbtide.doctor.facts import DeviceFacts
from ebbtide.profiling.hardware import device_bytes, device_here, device_name, free_bytes


def look_at_device() -> DeviceFacts:
    """Return torch's facts about the accelerator, or without one about the CPU."""
    device = device_here()
    accelerated = device.type != "cpu"
    pinned, asynchronous = _copying() if accelerated else (None, None)
    return DeviceFacts(
        kind=device.type,
        name=device_name(device),
        count=torch.accelerator.device_count() if accelerated else 1,
        memory_bytes=device_bytes(device),
        free_bytes=free_bytes(device),
        bfloat16=_computes_bfloat16(device),
        pinned=pinned,
        asynchronous=asynchronous,
        address=_address(device) if accelerated else None,
    )


def _copying() -> tuple[bool | None, bool | None]:
    """Return whether host memory can be pinned, and whether copies overlap compute, as the host tier determines it."""
    from ebbtide.store.accelerator import AcceleratorDevice  # imported only if needed

    try:
        found = AcceleratorDevice().capabilities
    except TargetError:
        return None, None
    return found.pinned_host, found.asynchronous_copies


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
        one = torch.ones(2, 2, device=device, dtype=torch.bfloat16)
        return bool((one @ one).isfinite().all())
    return False


def _address(device: torch.device) -> str | None:
    """Return the device's PCI address in the format of the system's files."""
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        found = torch.get_device_module(device).get_device_properties(device)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return None
