"""A block's forward and what it was called with.

[Note: containers of a call]
A block may be called with a list or dictionary, and write it, such as one of keys that later layers read. The first
forward gets it, the second one a copy as it was at the call: what it writes there nobody reads. That is right where
the container has no other name: a second forward that reached the original, by another argument or by its modules,
would find there what the copy lacks. A dictionary may be a ``UserDict`` of any class if it holds nothing else.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_unflatten

from ebbtide.wrap.roles import slots_of

Spec = list[Any]
"""How values lie in containers: of each value the spec of its container; None: it is a leaf."""


class Called:
    """One call of a block. Its arguments are flattened once, for several readers."""

    __slots__ = ("args", "containers", "forward", "kwargs", "leaves", "spec", "tensors")

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.containers: list[Any] = []  # those among the arguments that can be written
        self.leaves: list[Any] = []
        self.spec = _flatten((args, kwargs), self.leaves, self.containers)
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def flatten(self) -> tuple[list[Any], Spec]:
        """Flatten the arguments again: the forward may have changed them."""
        leaves: list[Any] = []
        return leaves, _flatten((self.args, self.kwargs), leaves, [])

    def run(self) -> Any:
        """Call the forward."""
        return self.forward(*self.args, **self.kwargs)


def _flatten(values: Iterable[Any], leaves: list[Any], containers: list[Any]) -> Spec:
    """Append the leaves of values, and return how they lie: as torch does, whose every leaf costs several calls."""
    spec: Spec = []
    for value in values:
        kind = type(value)
        if kind is tuple:
            spec.append((kind, _flatten(value, leaves, containers)))
        elif kind is list:
            containers.append(value)
            spec.append((kind, _flatten(value, leaves, containers)))
        elif kind is dict:
            containers.append(value)
            spec.append((list(value), _flatten(value.values(), leaves, containers)))
        elif (kind in SUPPORTED_NODES or issubclass(kind, tuple)) and kind is not torch.Size:  # torch makes it a tuple
            inside, theirs = tree_flatten(value)
            containers += [] if issubclass(kind, tuple) else [value]
            leaves += inside
            spec.append(theirs)
        elif issubclass(kind, UserDict) and _only_holds(value):
            containers.append(value.data)
            spec.append(((kind, list(value.data)), _flatten(value.data.values(), leaves, containers)))
        else:
            leaves.append(value)
            spec.append(None)
    return spec


def _only_holds(value: UserDict[Any, Any]) -> bool:
    """Whether a dictionary of any class has nothing but its entries."""
    return [*vars(value)] == ["data"] and type(value.data) is dict and not slots_of(type(value))


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
            if isinstance(kind, type):
                values.append(kind(held))
            elif isinstance(kind, list):
                values.append(dict(zip(kind, held, strict=True)))
            else:
                new = object.__new__(kind[0])
                vars(new)["data"] = dict(zip(kind[1], held, strict=True))
                values.append(new)
    return values


def is_refused(tensor: torch.Tensor) -> bool:
    """Whether torch refuses every use of a tensor: one of several views, after another was written in place."""
    try:
        tensor.is_leaf  # noqa: B018
    except RuntimeError:
        return True
    return False
