"""A block's forward and what it was called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_unflatten

Spec = list[Any]
"""How values lie in containers: of each value the spec of its container; None: it is a leaf."""


class Called:
    """One call of a block. Its arguments are flattened once, for several readers."""

    __slots__ = ("args", "forward", "kwargs", "leaves", "spec", "tensors")

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.leaves, self.spec = self.flatten()
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def flatten(self) -> tuple[list[Any], Spec]:
        """Flatten the arguments again: the forward may have changed them."""
        leaves: list[Any] = []
        return leaves, _flatten((self.args, self.kwargs), leaves)

    def run(self) -> Any:
        """Call the forward."""
        return self.forward(*self.args, **self.kwargs)


def _flatten(values: Iterable[Any], leaves: list[Any]) -> Spec:
    """Append the leaves of values, and return how they lie: as torch does, whose every leaf costs several calls."""
    spec: Spec = []
    for value in values:
        kind = type(value)
        if kind is tuple or kind is list:
            spec.append((kind, _flatten(value, leaves)))
        elif kind is dict:
            spec.append((list(value), _flatten(value.values(), leaves)))
        elif (kind in SUPPORTED_NODES or issubclass(kind, tuple)) and kind is not torch.Size:  # torch makes it a tuple
            inside, theirs = tree_flatten(value)
            leaves += inside
            spec.append(theirs)
        else:
            leaves.append(value)
            spec.append(None)
    return spec


def unflatten(leaves: Iterator[Any], spec: Spec) -> list[Any]:
    """Return values that lie in new containers: the arguments and keyword arguments of a call."""
    values: list[Any] = []
    for one in spec:
        if one is None:
            values.append(next(leaves))
        elif isinstance(one, TreeSpec):
            values.append(tree_unflatten(list(islice(leaves, one.num_leaves)), one))
        else:
            kind, inside = one
            held = unflatten(leaves, inside)
            values.append(dict(zip(kind, held, strict=True)) if isinstance(kind, list) else kind(held))
    return values


def is_refused(tensor: torch.Tensor) -> bool:
    """Whether torch refuses every use of a tensor: one of several views, after another was written in place."""
    try:
        tensor.is_leaf  # noqa: B018
    except RuntimeError:
        return True
    return False
