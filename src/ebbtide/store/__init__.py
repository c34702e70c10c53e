"""The store: the disk tier, the host tier, and the devices they serve."""

from __future__ import annotations

import logging
import os

import torch

from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.units import format_size
from ebbtide.store.arena import shared_bytes
from ebbtide.store.device import capture_query
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from ebbtide.store.location import check_directory
from ebbtide.store.share import fair_share_bytes
from ebbtide.store.spill import SpillTier, stage_of

__all__ = ["DiskTier", "HostTier", "SpillTier", "capture_query", "open_tier"]

_LOG = logging.getLogger("ebbtide.store")
_TARGETS = ("auto", "host", "disk")


def open_tier(
    target: str = "auto",
    *,
    disk_path: str | os.PathLike[str] | None = None,
    host_budget_bytes: int | None = None,
    synchronous: bool = False,
    home: torch.device | None = None,
) -> DiskTier | SpillTier:
    """Open the tier for offloaded bytes.

    Args:
        target: ``"host"``; ``"disk"``; ``"auto"``: host with an accelerator, disk without.
        disk_path: Directory for the disk target, and for the bytes that the host target cannot hold; ``None``: a usual
            one.
        host_budget_bytes: Most bytes of host memory; ``None``: a fair share, which all such tiers of the process
            have together.
        synchronous: Host target: copy in order with compute.
        home: Host target: the device of the model; ``None``: the current one.

    Raises:
        ConfigError: No such target.
        TargetError: The target does not exist on this machine.
        DiskError: The directory is unusable.
    """
    if target not in _TARGETS:
        raise ConfigError(
            f"target is {target!r}", expected="'auto', 'host' or 'disk'", hint=nearest(str(target), _TARGETS)
        )
    accelerated = torch.accelerator.is_available()
    if target == "auto":
        target = "host" if accelerated else "disk"
    if target == "host":
        from ebbtide.store.accelerator import AcceleratorDevice  # imported only if needed

        if disk_path is not None:
            disk_path = check_directory(disk_path)
        budget, least_bytes = host_budget_bytes, None
        if budget is None:
            budget = max(1, fair_share_bytes() + shared_bytes())  # what the others hold is not free any more
            least_bytes = stage_of(budget)
        _LOG.info("host memory for offloaded tensors: %s at most", format_size(budget))
        device = AcceleratorDevice(home)
        host = HostTier(device, budget_bytes=budget, synchronous=synchronous, least_bytes=least_bytes)
        return SpillTier(host, lambda: DiskTier(disk_path), budget_bytes=budget)
    if synchronous:
        _LOG.warning("synchronous has no effect here: offloaded bytes go to disk")
    if accelerated:
        _LOG.warning("target='disk' with an accelerator offloads only tensors in RAM; see target='host'")
    return DiskTier(disk_path)
