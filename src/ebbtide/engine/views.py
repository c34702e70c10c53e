"""Whether a tensor is a view that torch itself made, or one that a custom function returned."""

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


def passed_on(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, or shows, an input that a custom function returned as its output.

    Such a function may have written it without a new version, and the next one writes another part: torchdiffeq fills
    the stages of a step so. Functions of torch itself, as those of FSDP2, do not.
    """
    view, base = tensor.grad_fn, tensor._base
    made = None if base is None else base.grad_fn
    while base is not None and view is not None and view is not made:
        if isinstance(view, FunctionCtx):
            return not type(view)._forward_cls.__module__.startswith("torch.")  # pyright: ignore
        if not view.name()[-1:].isdigit():
            return False
        view = view.next_functions[0][0] if view.next_functions else None
    return False
