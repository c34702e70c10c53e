"""Whether a tensor shows the value of a node: a view of it that torch itself made."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx


def shows(tensor: torch.Tensor, node: Any) -> bool:
    """Whether a tensor is derived from the value of a node by torch's own views only.

    A custom function that returns its input returns a view of it, too, and may have changed it (a reduction among ranks
    counts no version): the recipe of its input is not its own.
    """
    if node is None:
        return False
    view = tensor.grad_fn
    while view is not None and view is not node:
        if isinstance(view, FunctionCtx) or not view.name()[-1:].isdigit():  # ViewBackward0, but not ReduceBackward
            return False
        view = view.next_functions[0][0] if view.next_functions else None
    return view is not None
