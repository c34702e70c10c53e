"""Embedded positions in batches that are padded on the left.

[Note: positions of a padded batch]
TRL scores a batch without position ids. A model that embeds positions (GPT-2, GPT-Neo, StarCoder 1, XGLM) then counts
from the padding, although its completions were generated with positions that count from the first token. A rotary
model's attention depends on differences alone, and is left as TRL calls it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def count_from_tokens(called: torch.nn.Module, model: Any) -> None:
    """Give a model that embeds positions those of its tokens. See [Note: positions of a padded batch].

    Args:
        called: What the trainer calls: the model, or what wraps it.
        model: The model of transformers.
    """
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    if not rotary and "position_ids" in inspect.signature(type(model).forward).parameters:
        called.register_forward_pre_hook(_with_positions, with_kwargs=True)


def _with_positions(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the positions where the trainer scores a padded batch; ``generate`` has its own."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("fused_lm_head") and mask is not None and "position_ids" not in kwargs:
        kwargs = {**kwargs, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    return args, kwargs
