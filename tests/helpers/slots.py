"""Copy out one source: the calls of a tier take several."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.base.errors import CapError


def copy_out(tier: Any, source: torch.Tensor) -> Any:
    """Begin to copy out one source and return its slot; raise the error if a cap refuses it."""
    (slot,) = tier.copy_out_all([source])
    if isinstance(slot, CapError):
        raise slot
    return slot
