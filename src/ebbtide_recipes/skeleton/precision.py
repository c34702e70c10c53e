"""The type of a model's weights."""

from __future__ import annotations


def dtype_name(choice: str) -> str:
    """Return the type of loaded weights: ``auto`` is float32 on a CPU, bfloat16 on an accelerator."""
    import torch

    if choice != "auto":
        return choice
    return "bfloat16" if torch.accelerator.is_available() else "float32"
