"""The type of a model's weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from ebbtide_recipes.skeleton.config import RecipeConfig

LOGGER = logging.getLogger("ebbtide.recipes")

_LEAST_RATE = 1e-4
"""AdamW's step is about the learning rate, and a weight of 0.02 in bfloat16 has neighbours 1.2e-4 away."""
_LEAST_RATE_OF_NORMS = 4e-3
"""The same for their weights, which are about 1."""
_COPIES = ("ln_tuning_layers", "modules_to_save")
"""What PEFT trains besides adapters: copies in the base's type, of norms and of named modules."""


def dtype_name(config: RecipeConfig, *, frozen: bool | None = None) -> str:
    """Return the type of loaded weights: ``auto`` is float32 on a CPU and in mixed precision, else bfloat16.

    In mixed precision with ``--bf16`` only trained weights need float32, and PEFT keeps adapters in it.

    Args:
        config: The recipe's config.
        frozen: Whether the weights are not trained; default: whether only adapters are.
    """
    import torch

    if config.torch_dtype != "auto":
        return config.torch_dtype
    frozen = config.trains_adapters if frozen is None else frozen
    mixed = config.fp16 or (config.bf16 and not frozen)
    return "bfloat16" if torch.accelerator.is_available() and not mixed else "float32"


def warn_of_lost_steps(config: RecipeConfig, model: nn.Module) -> None:
    """Log what becomes of small steps on weights in bfloat16, which have eight bits; adapters are in float32."""
    rate, least = config.peak_learning_rate, _LEAST_RATE
    in_float32 = config.fsdp_strategy != "none" and (config.bf16 or config.fp16)  # as accelerate shards them
    if config.trains_adapters:
        trained = [n for n, p in model.named_parameters() if p.requires_grad and str(p.dtype) == "torch.bfloat16"]
        copies = {kind for kind in _COPIES for name in trained if f".{kind}." in name}
        if not copies:
            return
        least = _LEAST_RATE_OF_NORMS if copies == {"ln_tuning_layers"} else _LEAST_RATE
    elif dtype_name(config) != "bfloat16":
        return
    if not in_float32 and rate < least:
        LOGGER.warning(
            "weights and steps are bfloat16: at a learning rate of %g most steps round to nothing; "
            "hint: --torch_dtype auto --bf16 true keeps weights in float32 and computes in bfloat16",
            rate,
        )
