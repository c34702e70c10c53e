"""The oracle: an engine with no cleverness, and the comparison that tests make with it.

The oracle copies every saved tensor's entire storage, keeps nothing, shares nothing, and puts an equal tensor in
its place. It is obviously right; ebbtide must give the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, eq=False)
class _Copy:
    """A saved tensor: all of its storage, and its place in it."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Oracle(saved_tensors_hooks):
    """``with Oracle() as oracle: loss = ...``; counts its copies.

    Attributes:
        alive: The copies that a graph still has. Some are never freed: an input that an operator saves and that is
            changed in place later is saved by a graph that it is the end of. A backward that frees the graph breaks
            that C++ reference cycle; one that retains it, or fails because of the change, leaves it for good.
    """

    alive: ClassVar[weakref.WeakSet[_Copy]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.packed = self.unpacked = self.packed_bytes = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        self.packed += 1
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
        if not plain or tensor.is_conj() or tensor.is_neg():
            return tensor.detach()
        self.packed_bytes += tensor.untyped_storage().nbytes()
        storage = tensor.detach().untyped_storage().clone()
        copy = _Copy(storage, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        self.alive.add(copy)
        return copy

    def _unpack(self, packed: Any) -> Tensor:
        self.unpacked += 1
        if isinstance(packed, Tensor):
            return packed
        empty = torch.empty(0, dtype=packed.dtype, device=packed.storage.device)
        return empty.set_(packed.storage, packed.offset, packed.size, packed.stride)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything a training step computes, all of which must be bitwise equal."""

    outputs: dict[str, Tensor]
    input_grads: dict[str, Tensor | None]
    param_grads: dict[str, Tensor | None]


def step(
    model: nn.Module, loss: Callable[[], tuple[Tensor, Mapping[str, Tensor]]], inputs: Mapping[str, Any]
) -> Outcome:
    """Run one forward and backward and return everything it computed; gradients are cleared before and after.

    Args:
        model: The model; its parameters' gradients are taken.
        loss: Runs the forward; returns the scalar loss and the outputs to compare.
        inputs: Values of which the floating tensors that require gradients are compared too.
    """
    wanted = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    _clear(model, wanted)
    value, outputs = loss()
    value.backward()
    result = Outcome(
        outputs={"loss": value.detach().clone()} | {k: v.detach().clone() for k, v in outputs.items()},
        input_grads={k: _copy(v.grad) for k, v in wanted.items()},
        param_grads={k: _copy(p.grad) for k, p in model.named_parameters()},
    )
    _clear(model, wanted)
    return result


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Name everything that is not bitwise equal, and by how much; an empty list means equal."""
    found: list[str] = []
    for part in ("outputs", "input_grads", "param_grads"):
        left, right = getattr(one, part), getattr(other, part)
        if left.keys() != right.keys():
            found.append(f"{part}: {sorted(left.keys() ^ right.keys())} on one side only")
        found += [f"{part}.{k}: {how}" for k in left.keys() & right.keys() if (how := _difference(left[k], right[k]))]
    return sorted(found)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits: NaN equals the same NaN, 0.0 differs from -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _difference(one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None:
        return (
            ""
            if one is other
            else f"{'no gradient' if one is None else 'gradient'} against {'none' if other is None else 'one'}"
        )
    if same_bits(one, other):
        return ""
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"
    return f"largest difference {(one.double() - other.double()).abs().max().item():.3g}"


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


def _clear(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    for leaf in (*model.parameters(), *inputs.values()):
        leaf.grad = None
