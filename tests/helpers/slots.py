"""Copy out one source: the calls of a tier take several; and a tier on a small disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import CapError
from ebbtide.store.disk import DiskTier


def copy_out(tier: Any, source: torch.Tensor) -> Any:
    """Begin to copy out one source and return its slot; raise the error if a cap refuses it."""
    (slot,) = tier.copy_out_all([source])
    if isinstance(slot, CapError):
        raise slot
    return slot


def small_disk(path: Path | str, nbytes: int) -> DiskTier:
    """Return a disk tier on a disk that has ``nbytes`` for its file."""
    tier: Any = DiskTier(path)
    room = tier._room
    room._file.disk_free_bytes = lambda: max(0, nbytes - room.size_bytes)
    return tier
