"""The mode ``checkpointing`` for any script: the model's own switch, else checkpoints around its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebbtide.wrap import find_blocks
from ebbtide.wrap.forward import StandIn

_OWN = {
    "activation_checkpointing_enable": {"activation_checkpointing_kwargs": {"use_reentrant": False}},
    "gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "enable_gradient_checkpointing": {},
}
"""Methods that enable a model's own checkpointing: in transformers (and PEFT), in its older versions, in diffusers."""

_IS_ON = ("is_activation_checkpointing", "is_gradient_checkpointing")
"""Properties that tell whether it is enabled, preferred first: transformers warns of the second, its older name."""


def checkpoint_model(model: nn.Module) -> str:
    """Checkpoint the blocks of a model from its next forward on.

    Models of transformers and diffusers have their own switch, which also disables side effects that a second forward
    must not repeat, such as filling a cache. For other models, the blocks that ebbtide would offload run under
    ``torch.utils.checkpoint`` (non-reentrant).

    Returns:
        The method, in words.
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
    """Whether the script has enabled checkpointing of a transformers or diffusers model."""
    for module in model.modules():
        name = next(
            (name for name in _IS_ON if hasattr(type(module), name)), None
        )  # asked of the class: no property runs
        if name is not None and getattr(module, name) is True:
            return True
    return False


def _checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
