"""The state of optimizers, which a simulated step has in its base."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_BLOCKWISE = 1 + 4 / 256
"""Of a number of state in 8 bits: itself, and its share of a float32 scale for 256 numbers."""

_IN_TYPE: Mapping[str, float] = {"adamw": 2.0, "sgd": 0.0, "sgd_momentum": 1.0}
"""Numbers of state for each trained weight, of the weight's own type."""


def state_ratio(optim: str, model: nn.Module) -> float:
    """Return the bytes of an optimizer's state per byte of trained weights.

    Args:
        optim: As ``PlanConfig.optim`` names it.
        model: Its trained parameters decide; on meta or not.
    """
    if optim in _IN_TYPE:
        return _IN_TYPE[optim]
    trained = [p for p in model.parameters() if p.requires_grad]
    if optim == "adamw_8bit":
        state = sum(2 * _BLOCKWISE * p.numel() for p in trained)
    else:  # Adafactor without momentum: float32 means over the rows and the columns of a matrix
        state = sum(
            4.0 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.ndim > 1 else p.numel()) for p in trained
        )
    return state / max(sum(p.numel() * p.itemsize for p in trained), 1)
