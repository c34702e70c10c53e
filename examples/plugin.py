"""A filter for `--tensor_filter examples/plugin.py` (ms-swift: `--external_plugins`)."""

from __future__ import annotations

import torch


def tensor_filter(tensor: torch.Tensor) -> bool:
    """Return whether a saved tensor may be offloaded: here any of more than a thousand numbers."""
    return tensor.numel() > 1000
