"""A block's forward and what it was called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, _get_node_type, tree_structure

_LEAF = tree_structure(None)


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
        leaves: list[Any] = []
        return leaves, _flatten((self.args, self.kwargs), leaves)

    def run(self) -> Any:
        """Call the forward."""
        return self.forward(*self.args, **self.kwargs)


def _flatten(tree: Any, leaves: list[Any]) -> TreeSpec:
    """Flatten as torch's ``tree_flatten``: that one leaves a cycle of objects to the garbage collector at each call.

    Checked with torch 2.11 and 2.13.
    """
    kind: Any = _get_node_type(tree)
    node = SUPPORTED_NODES.get(kind)
    if node is None:
        leaves.append(tree)
        return _LEAF
    children, context = node.flatten_fn(tree)
    specs: list[TreeSpec] = []
    for child in children:
        specs.append(_flatten(child, leaves))
    return TreeSpec(kind, context, specs)
