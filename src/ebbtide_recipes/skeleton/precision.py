"""The type of a model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig


def dtype_name(config: RecipeConfig) -> str:
    """Return the type of loaded weights: ``auto`` is float32 on a CPU and in mixed precision, else bfloat16."""
    import torch

    if config.torch_dtype != "auto":
        return config.torch_dtype
    mixed = config.bf16 or config.fp16
    return "bfloat16" if torch.accelerator.is_available() and not mixed else "float32"
