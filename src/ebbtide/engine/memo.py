"""What was found out about the tensor saved at one position of a module, for the next tensor that is saved there.

[Note: memo]
A training step saves the same tensors as the one before. What follows from a tensor's description alone (its type,
layout, memory, and the node that made it) is found out once for each position: the number of the tensor among those
that a module of a block saves. The next tensor at that position is compared with the memo, field by field. Only if
every field is equal is the memo used, so that a changed length, graph or routing costs time and changes nothing. What
may change without a trace in the description is checked each time: whether the memory is a weight's, whether the
storage was saved before, at which site it is, and which recipe there is. The plan is called again if it, the recipe's
work, or the bytes that are kept may have changed its answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ebbtide.base.actions import Action, Candidate, Plan
from ebbtide.engine.inputs import CAST, name_of
from ebbtide.engine.layout import Layout


class Decision(NamedTuple):
    """What a plan decided for a storage, and under which conditions it decides so again.

    Attributes:
        plan: The plan.
        limit_bytes: See ``StandingPlan.stands_until``.
        without_recipe: It does not depend on a recipe.
        flops: The recipe's; None: there was none.
        action: The decision.
    """

    plan: Plan
    limit_bytes: int
    without_recipe: bool
    flops: float | None
    action: Action


class Memo:
    """A description, and what follows from it. See [Note: memo].

    Args:
        tensor: The saved tensor.
        empty: A tensor of no bytes on its device.

    Attributes:
        layout: Its layout.
        base_layout: The layout of what it is a view of, if of anything; else its own.
        candidate: What a plan decides on when the storage is new; None: that does not follow from the description.
        decision: What it decided the last time, if that stands.
        nbytes: Size of its storage.
        is_cast: It, or what it is a view of, was cast from another type.
        empty: A tensor of no bytes on its device.
    """

    __slots__ = (
        "_device", "_is_view", "_node", "base_layout", "candidate", "decision", "empty", "is_cast", "layout", "nbytes",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, empty: torch.Tensor) -> None:
        base = tensor._base
        self.layout = Layout.of(tensor)
        self._device, self._is_view = tensor.device, base is not None
        self._node = name_of((tensor if base is None else base).grad_fn)
        self.base_layout = self.layout if base is None else Layout.of(base)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.is_cast = self._node == CAST
        self.empty = empty
        self.candidate: Candidate | None = None
        self.decision: Decision | None = None

    def matching(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor of this memo's size if it describes it; None if it describes another.

        Args:
            tensor: Neither nested nor of a symbolic size.
        """
        layout = self.layout
        if (
            type(tensor) is not torch.Tensor
            or tensor.dtype is not layout.dtype
            or tensor.layout is not torch.strided
            or tensor.stride() != layout.stride
            or tensor.storage_offset() != layout.offset
            or tensor.device != self._device
            or tensor._version
            or tensor.is_neg()
            or tensor.__dict__
        ):
            return None
        storage, made = tensor.untyped_storage(), tensor
        if (base := tensor._base) is not None:
            owner = self.base_layout
            if (
                type(base) is not torch.Tensor
                or base.layout is not torch.strided
                or base.is_nested
                or base._has_symbolic_sizes_strides
                or base.untyped_storage() is not storage
                or base.dtype is not owner.dtype
                or (base.size(), base.stride(), base.storage_offset()) != (owner.size, owner.stride, owner.offset)
            ):
                return None
            made = base
        elif self._is_view:
            return None
        node = made.grad_fn
        name = "leaf" if node is None else type(node).name(node)  # as ``name_of``, without the call
        return storage if name == self._node and storage.nbytes() == self.nbytes else None


def memo_of(tensor: torch.Tensor, empty: torch.Tensor) -> Memo | None:
    """Return a ``Memo`` of a saved tensor; None for a kind that is always analysed."""
    storage, base = tensor.untyped_storage(), tensor._base
    plain = type(tensor) is torch.Tensor and not tensor.dtype.is_complex and not tensor._version
    if not plain or tensor.is_neg():
        return None
    if base is not None and not _is_base(base, storage):
        return None
    return Memo(tensor, empty)


def _is_base(base: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether what a tensor is a view of is a plain tensor over the same storage."""
    plain = type(base) is torch.Tensor and base.layout is torch.strided and not base.is_nested
    return plain and not base._has_symbolic_sizes_strides and base.untyped_storage() is storage
