"""Read what hooks packed into the saved tensors of a node, without unpacking it.

[Note: unreadable slots]
``SavedTensor.data`` came with torch 2.10. Before, what a slot holds cannot be read without running the unpack hook,
which would copy a tensor in. Recipes then take their operands only from where these came from in the graph: a rule that
must read a slot (an index, a mask, the weight of a norm) builds none, and its tensor is offloaded. The coverage of the
blocks is not measured. Checked with torch 2.8 to 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

SINCE = "2.10"
"""The first torch with ``SavedTensor.data``."""

_saved_tensor: Any = torch._C._autograd.SavedTensor  # pyright: ignore[reportAttributeAccessIssue]
_readable = hasattr(_saved_tensor, "data")


class UnreadableSlot(Exception):
    """A rule needs the content of a slot, which this torch does not show. See [Note: unreadable slots]."""


def readable() -> bool:
    """Whether this torch shows what slots hold."""
    return _readable


def packed_in(saved: Any) -> Any:
    """Return what was packed into a ``SavedTensor``.

    Raises:
        UnreadableSlot: This torch does not show it.
    """
    if not _readable:
        raise UnreadableSlot
    return saved.data
