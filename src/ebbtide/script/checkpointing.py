"""The mode ``checkpointing`` for any script: the model's own switch, else checkpoints around its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebbtide.wrap import find_blocks
from ebbtide.wrap.forward import StandIn, called_attribute

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
    must not repeat, such as filling a cache. Outside of these, the blocks that ebbtide would offload run under
    ``torch.utils.checkpoint`` (non-reentrant).

    Returns:
        The method, in words.
    """
    if checkpoints_itself(model):
        return "the script's own checkpoints"
    switched = list(_switched(model))
    theirs = {part for module, _ in switched for part in module.modules()}
    blocks = [module for module, _ in find_blocks(model) if theirs.isdisjoint(module.modules())]
    for module in blocks:
        name = called_attribute(module)
        if getattr(module.__dict__.get(name), "_call", None) is not _checkpointed:  # as of a model that shares it
            StandIn(module, _checkpointed, name, compiles=True)
    around = [f"torch.utils.checkpoint around {len(blocks)} blocks"] if blocks else []
    return " and ".join([*(how for _, how in switched), *around])


def _switched(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Enable the outermost modules' own checkpointing; yield them, each with its method."""
    for name, options in _OWN.items():
        switch = getattr(module, name, None)
        if callable(switch):
            try:
                switch(**options)
            except (TypeError, ValueError):  # some models of transformers refuse, and other methods take no options
                continue
            yield module, f"{type(module).__name__}.{name}()"
            return
    for child in module.children():
        yield from _switched(child)


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether the script has enabled checkpointing of a transformers or diffusers model."""
    for module in model.modules():
        name = next(
            (name for name in _IS_ON if hasattr(type(module), name)), None
        )  # read from the class: no property runs
        if name is not None and getattr(module, name) is True:
            return True
    return False


def _checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
