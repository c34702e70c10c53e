"""Passes without dropout in a model that is otherwise in training mode.

[Note: dropout in a rollout]
A policy samples, and its own and the reference's log-probabilities are computed, without dropout: else the old
log-probabilities would be those of a randomly thinned model, and the ratio to them mostly noise. The update, which has
gradients, keeps dropout (``--lora_dropout``). TRL has it in all of these passes. The critic of a video distillation has
none either where it judges the student: its estimate is a target, without gradients; its own update keeps dropout.

The root's own flag stays, because TRL reads from it whether it trains or evaluates: what the root drops itself, and not
through a module of its own, is dropped here too.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_dropout(model: nn.Module) -> Generator[None, None, None]:
    """Set ``training`` to false on all modules but the root, then restore exactly those it was true on."""
    training = [module for module in model.modules() if module is not model and module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
