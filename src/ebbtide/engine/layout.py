"""The layout of a tensor in its storage, and the same view over other bytes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch

from ebbtide.engine.modes import outside_modes

ALIGNED_BYTES = 512
"""Alignment of the memory that device allocators return, in bytes."""
_CHECKSUM_BYTES = 1 << 20
"""Bytes summed at a time: each takes about 40 bytes meanwhile, and a device may be nearly full."""

KNOWN_LAYOUTS = 8192
"""Layouts remembered: steps of equal shapes meet the same few hundred again and again."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Size, stride, offset (in elements) and dtype of a tensor in its storage, and what follows from them.

    Attributes:
        logical_bytes: Elements times element size: the bytes of a copy without aliases.
        first: First byte that the view can reach in its storage.
        last: The byte after the last.
        dense: The elements lie one after the other in some order of the dimensions, without gaps or overlaps.
        contiguous: In the order of the dimensions.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    logical_bytes: int = field(init=False, compare=False)
    first: int = field(init=False, compare=False)
    last: int = field(init=False, compare=False)
    dense: bool = field(init=False, compare=False)
    contiguous: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        width = self.dtype.itemsize
        count = math.prod(self.size)
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1 if count else 0
        derived = {
            "logical_bytes": count * width,
            "first": self.offset * width,
            "last": (self.offset + reach) * width,
            "dense": _dense(self.size, self.stride),
            "contiguous": _contiguous(self.size, self.stride),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Return the layout of ``tensor``."""
        return _layout(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def covers(self, storage_bytes: int) -> bool:
        """Whether the view is dense and is exactly its storage of ``storage_bytes`` bytes."""
        return self.dense and not self.offset and self.logical_bytes == storage_bytes

    def over(self, content: torch.Tensor, first_byte: int) -> torch.Tensor:
        """Return this view over ``content``, whose first byte is byte ``first_byte`` of the old storage."""
        view = content.new_empty(0, dtype=self.dtype)
        shift = int(content.storage_offset()) * content.itemsize - first_byte  # the source lies in a larger storage
        offset = self.offset + shift // self.dtype.itemsize if shift else self.offset
        return view.set_(content.untyped_storage(), offset, self.size, self.stride)


@functools.lru_cache(KNOWN_LAYOUTS)
def _layout(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Layout:
    return Layout(dtype, tuple(size), stride, int(offset))


def _dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True


def _contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def byte_view(storage: torch.UntypedStorage, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
    """Return bytes ``first`` to ``last`` of a storage as a one-dimensional ``uint8`` tensor.

    Args:
        storage: The storage.
        first: The first byte.
        last: The byte after the last.
        like: A tensor of the same kind, on the same device: a storage without bytes would say that it is on meta.
    """
    return like.new_empty(0, dtype=torch.uint8).set_(storage, first, (last - first,), (1,))


def content_bytes(content: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the ``nbytes`` bytes that begin where ``content`` begins as a one-dimensional ``uint8`` tensor."""
    first = int(content.storage_offset()) * content.itemsize
    return byte_view(content.untyped_storage(), first, first + nbytes, content)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of ``tensor`` as a one-dimensional ``uint8`` tensor."""
    storage = tensor.untyped_storage()
    return byte_view(storage, 0, storage.nbytes(), tensor)


def with_layout(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return ``value`` in a storage of its own that ``layout`` covers completely; no copy if it already lies so."""
    if value.stride() == layout.stride and value.untyped_storage().nbytes() == layout.logical_bytes:
        return value
    fresh = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=value.device)
    return fresh.copy_(value)


def has_layout(tensor: torch.Tensor) -> bool:
    """Whether a tensor's layout is plain numbers. The parts of jagged tensors may have a symbolic size."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor._has_symbolic_sizes_strides


def region(layout: Layout, storage_bytes: int, taken_bytes: int) -> tuple[int, int]:
    """Return the bytes to move for a view: the storage, or only the view's extent where that is little of it.

    A part is copied back to aligned memory, so it begins equally aligned in its storage: libraries choose kernels by
    alignment.

    Args:
        layout: The view.
        storage_bytes: Size of its storage.
        taken_bytes: Bytes of other parts that have entries of their own. All parts together stay under half of the
            storage: many overlapping windows would cross the link more often than the storage does.
    """
    first, last = layout.first, layout.last
    first -= first % ALIGNED_BYTES
    apart = 2 * (taken_bytes + last - first) < storage_bytes
    return (first, last) if apart else (0, storage_bytes)


def checksum(data: torch.Tensor) -> tuple[int, int]:
    """Return two sums over a ``uint8`` tensor's bytes, one of them weighted by position; for ``verify=True``."""
    return outside_modes(_checksum, data)


def _checksum(data: torch.Tensor) -> tuple[int, int]:
    sums, first = torch.zeros(2, dtype=torch.int64, device=data.device), 0
    for piece in data.split(_CHECKSUM_BYTES):
        values = piece.to(torch.int64)
        weights = torch.arange(first, first + values.numel(), device=values.device) % 65_521 + 1
        sums += torch.stack([values.sum(), (values * weights).sum()])
        first += values.numel()
    return int(sums[0]), int(sums[1])
