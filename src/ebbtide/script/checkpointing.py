"""The mode ``checkpointing`` for a script of unknown make: the model's own switch for it, else around its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebbtide.wrap import find_blocks
from ebbtide.wrap.forward import StandIn

_OWN = {
    "gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "enable_gradient_checkpointing": {},
}
"""Methods of models that switch their own checkpointing on, of transformers (and PEFT) and of diffusers."""


def checkpoint_model(model: nn.Module) -> str:
    """Checkpoint the blocks of a model from its next forward on.

    A model of transformers or diffusers has a switch of its own, which also sets aside what a second forward must not
    do twice, such as filling a cache. Any other model's blocks, those that ebbtide would offload, run under
    ``torch.utils.checkpoint`` (non-reentrant).

    Returns:
        How, in words.
    """
    if checkpoints_itself(model):
        return "the script's own checkpoints"
    for module in model.modules():
        for name, options in _OWN.items():
            switch = getattr(module, name, None)
            if callable(switch):
                switch(**options)
                return f"{type(module).__name__}.{name}()"
    blocks = find_blocks(model)
    for module, _ in blocks:
        StandIn(module, _checkpointed)
    return f"torch.utils.checkpoint around {len(blocks)} blocks"


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether the script has switched the checkpointing of a model of transformers or diffusers on."""
    return any(getattr(module, "is_gradient_checkpointing", False) is True for module in model.modules())


def _checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
