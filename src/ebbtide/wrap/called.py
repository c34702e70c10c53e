"""A block's forward and what it was called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten


class Called:
    """One call of a block. Its arguments are flattened once, for several readers.

    Args:
        forward: The block's forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    __slots__ = ("args", "forward", "kwargs", "leaves", "spec", "tensors")

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.leaves, self.spec = self.flatten()
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def flatten(self) -> tuple[list[Any], TreeSpec]:
        """Flatten the arguments again: the forward may have changed them."""
        return tree_flatten((self.args, self.kwargs))

    def run(self) -> Any:
        """Call the forward."""
        return self.forward(*self.args, **self.kwargs)
