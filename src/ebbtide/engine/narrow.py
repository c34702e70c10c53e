"""Store tensors that were cast up in their original type: bf16 cast up for a norm crosses the link as bf16.

[Note: narrow]
The bytes in the narrow type are those of the tensor that was cast up, as it is when it is saved. They do not stand for
what it was cast from, though the graph says so: somebody may have written into it after the cast, without a version, as
a reduction among ranks does. If that is saved too, it is stored itself.
"""

from __future__ import annotations

import sys

import torch

from ebbtide.engine.inputs import CAST, AccumulateGrad
from ebbtide.engine.tickets import Entry
from ebbtide.engine.views import shows

NARROWER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}
"""Types whose values a wider type holds exactly: a tensor cast up from one is stored in it."""


def narrowed(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the type that it was cast up from, bitwise: a cast could change NaNs."""
    value = base.detach()
    if dtype is not torch.bfloat16 or sys.byteorder != "little":
        with torch.no_grad():
            return value.to(dtype)
    value = value.to(torch.float32)
    halves = value.as_strided((value.numel(),), (1,)).view(dtype)[1::2]  # as the elements lie in memory
    return halves.clone(memory_format=torch.contiguous_format).as_strided(value.shape, value.stride())


def narrower(entry: Entry, tensor: torch.Tensor, base: torch.Tensor) -> torch.dtype | None:
    """Return the type that a tensor was cast up from, if that type holds all its values; else None.

    Args:
        entry: The tensor's.
        tensor: The tensor that was saved.
        base: What it is a view of, or it itself: dense, and alone in its storage.
    """
    node = base.grad_fn
    if node is None or type(node).name(node) != CAST or base._version:
        return None
    if not entry.base_layout.covers(entry.nbytes) or not (base is tensor or shows(tensor, node)):
        return None
    source, number = node.next_functions[0]
    if source is None or type(source) is AccumulateGrad:
        return None
    dtype = source._input_metadata[number].dtype
    return dtype if dtype in NARROWER.get(base.dtype, ()) else None
