"""The inputs of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ebbtide.engine.storages import plain_tensors

CAST = "ToCopyBackward0"
"""Name of the node that makes a tensor of another type, or on another device."""

if TYPE_CHECKING:

    class AccumulateGrad(torch.autograd.graph.Node):
        """The node of a leaf, which is its ``variable``. Other nodes may have such an attribute: see ``name_of``."""

        variable: torch.Tensor
else:
    AccumulateGrad = torch._C._functions.AccumulateGrad


class BlockInputs:
    """The tensors that a block is called with.

    Held while the block runs, so that the ids of their storages and nodes stay valid.

    Args:
        tensors: All of them, including those in lists and keyword arguments.

    Attributes:
        nbytes: Bytes of the storages of those that need a gradient; of a wrapper, those of all that is inside.
        largest_bytes: Bytes of the storage of the largest floating one.
        storages: Those of the tensors, by id.
        values: Each by the id of the node that made it and the number of the node's output, with its version.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        trained: dict[int, int] = {}
        self.largest_bytes = 0
        for outer in tensors:
            for t in plain_tensors([outer]):
                if t.layout == torch.strided and not t.is_nested:
                    storage = t.untyped_storage()
                    self.storages[id(storage)] = storage
                    if t.is_floating_point():
                        self.largest_bytes = max(self.largest_bytes, storage.nbytes())
                    if outer.requires_grad:  # what is inside a wrapper is made below autograd, and needs none itself
                        trained[id(storage)] = storage.nbytes()
        self.nbytes = sum(trained.values())
        self.values: dict[tuple[int, int], tuple[torch.autograd.graph.Node, torch.Tensor, int]] = {}
        for t in tensors:
            if t.requires_grad and (node := node_of(t)) is not None:
                self.values[id(node), t.output_nr] = node, t, t._version

    def value(self, key: tuple[int, int]) -> torch.Tensor | None:
        """Return the input that is the value of ``(id(node), output_nr)``; None once it was changed in place."""
        _, tensor, version = self.values.get(key, (None, None, 0))
        return tensor if tensor is not None and tensor._version == version else None

    def casts(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which a cast made, is an input in another dtype."""
        node = tensor.grad_fn
        source, number = (None, 0) if node is None else node.next_functions[0]
        return source is not None and (id(source), number) in self.values

    def forget(self) -> None:
        """Drop the tensors."""
        self.storages, self.values = {}, {}


def node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the node that made a tensor; None: it is a leaf, or a view whose base was changed in place."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # one of several views of a tensor, changed in place: an error only for who uses it
        return None


def name_of(node: torch.autograd.graph.Node | None) -> str:
    """Return the name of the node that made a tensor; of a leaf, ``"leaf"``.

    The type is asked: the node of a custom function is its ``ctx``, on which users set attributes, ``name`` too.
    """
    return "leaf" if node is None else type(node).name(node)
