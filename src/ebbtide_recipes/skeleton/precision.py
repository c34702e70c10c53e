"""The type of a model's weights."""

from __future__ import annotations


def dtype_name(choice: str, *, mixed: bool) -> str:
    """Return the type of loaded weights.

    Args:
        choice: ``auto`` is float32 on a CPU and in mixed precision, else bfloat16.
        mixed: Arithmetic in bfloat16 or float16 on weights of another type: ``--bf16``, ``--fp16``.
    """
    import torch

    if choice != "auto":
        return choice
    return "bfloat16" if torch.accelerator.is_available() and not mixed else "float32"
