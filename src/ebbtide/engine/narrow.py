"""Store tensors that were cast up in their original type: bf16 cast up for a norm crosses the link as bf16."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ebbtide.engine.build import Builder
from ebbtide.engine.tickets import Entry

if TYPE_CHECKING:
    from torch.autograd.graph import Node


NARROWER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}
"""Types whose values a wider type holds exactly: a tensor cast up from one is stored as it was."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Where a tensor was cast up from.

    Attributes:
        node: The autograd node of the value that was cast up.
        output_nr: Which of its outputs.
        dtype: Its type.
        nbytes: What the tensor takes in that type.
    """

    node: Node
    output_nr: int
    dtype: torch.dtype
    nbytes: int


def narrowed(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the type that it was cast up from, to the bit: a cast would change numbers that are none."""
    value = base.detach()
    halves = dtype is torch.bfloat16 and value.dtype is torch.float32 and value.is_contiguous()
    if halves and sys.byteorder == "little":
        in_a_row = value.as_strided((value.numel(),), (1,))  # a dimension of one element may have any stride
        return in_a_row.view(dtype)[1::2].clone(memory_format=torch.contiguous_format).view(value.shape)
    with torch.no_grad():
        return value.to(dtype)


def narrower(builder: Builder | None, entry: Entry, base: torch.Tensor) -> Narrow | None:
    """Return where a tensor was cast up from, if that type holds all its values; else None.

    Args:
        builder: Of the block's forward; None: it is over.
        entry: The tensor's.
        base: The tensor.
    """
    node = base.grad_fn
    if builder is None or node is None or node.name() != "ToCopyBackward0" or base._version:
        return None
    if not entry.base_layout.covers(entry.nbytes):
        return None
    source, number = node.next_functions[0]
    if source is None or getattr(source, "variable", None) is not None:
        return None
    dtype = source._input_metadata[number].dtype
    if dtype not in NARROWER.get(base.dtype, ()):
        return None
    return Narrow(source, number, dtype, base.numel() * dtype.itemsize)
