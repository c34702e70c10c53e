"""The sources of a tensor's elements: parts of a checkpoint's tensors, joined.

[Note: layouts]
A parameter is often one tensor of the checkpoint, but libraries also fuse and stack tensors (experts, q/k/v) while
they load. Such conversions only move elements. A ``SourceLayout`` is a placeholder tensor: stacked, concatenated,
split and transposed by torch's own functions, it records which box of which tensor goes where. So a library's
conversion runs once on layouts, and afterwards any slice of its result is read without making the rest. Operations
that a layout cannot represent raise ``NotFollowedError``, and the caller converts whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


class NotFollowedError(Exception):
    """An operation that layouts do not represent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it begins and how far it goes, in each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor."""
        return cls(start=(0,) * len(shape), size=tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)

    def meet(self, other: Box) -> Box | None:
        """Return what two boxes of one tensor share, or ``None``."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Box(start=start, size=size) if all(n > 0 for n in size) else None

    def parts(self, most: int) -> Iterator[Box]:
        """Yield boxes that together are this one, each of at most ``most`` elements."""
        if self.numel <= most:
            yield self
            return
        dim = next(d for d, n in enumerate(self.size) if n > 1)
        step = max(most * self.size[dim] // self.numel, 1)
        for begin in range(0, self.size[dim], step):
            yield from self.narrow(dim, begin, min(step, self.size[dim] - begin)).parts(most)

    def narrow(self, dim: int, begin: int, length: int) -> Box:
        """Return the part that has ``length`` from ``begin`` on in one dimension."""
        start, size = list(self.start), list(self.size)
        start[dim] += begin
        size[dim] = length
        return Box(start=tuple(start), size=tuple(size))

    def of(self, tensor: torch.Tensor, *, origin: Sequence[int] | None = None) -> torch.Tensor:
        """Return the view of a tensor that this box is; ``origin`` is where the tensor itself begins."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start - (origin[dim] if origin else 0), size)
        return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a tensor of the checkpoint, and the view that takes its elements."""

    key: str
    box: Box
    into: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A box of the whole, the tensor it comes from, its begin there, and its dimension for each of the whole's."""

    box: Box
    key: str
    start: tuple[int, ...]
    axes: tuple[int | None, ...]  # None: a dimension of size 1 that the source does not have


class SourceLayout:
    """A tensor described by the sources of its elements. See [Note: layouts].

    Args:
        shape: Its shape.
        parts: What it is made of; together they cover it once.
        dtype: Of the tensors it comes from.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[_Part], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self._parts = tuple(parts)

    @classmethod
    def of(cls, key: str, shape: Sequence[int], dtype: torch.dtype) -> SourceLayout:
        """Return the layout of a tensor of the checkpoint itself."""
        box = Box.full(shape)
        return cls(shape, [_Part(box=box, key=key, start=box.start, axes=tuple(range(len(shape))))], dtype)

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors it comes from."""
        return tuple(dict.fromkeys(part.key for part in self._parts))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def pieces(self, box: Box, into: torch.Tensor) -> Iterator[Piece]:
        """Yield what to read for a box of this tensor, into a view of the box's size."""
        for part in self._within(box):
            view = part.box.of(into)
            # Dimensions of size 1 come and go without moving an element, so the view can take the source's own.
            size, stride = [1] * len(part.start), [1] * len(part.start)
            for dim, axis in enumerate(part.axes):
                if axis is not None:
                    size[axis], stride[axis] = view.shape[dim], view.stride(dim)
            yield Piece(key=part.key, box=Box(start=part.start, size=tuple(size)), into=view.as_strided(size, stride))

    def _within(self, box: Box) -> Iterator[_Part]:
        """Yield the parts of a box of this tensor, with their boxes in it."""
        for part in self._parts:
            if (shared := part.box.meet(box)) is None:
                continue
            source = list(part.start)
            for dim, axis in enumerate(part.axes):
                if axis is not None:
                    source[axis] += shared.start[dim] - part.box.start[dim]
            start = tuple(s - b for s, b in zip(shared.start, box.start, strict=True))
            yield replace(part, box=Box(start=start, size=shared.size), start=tuple(source))

    # What conversions do to tensors.

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def contiguous(self) -> SourceLayout:
        """Return itself: there is no memory whose order could matter."""
        return self

    def transpose(self, dim0: int, dim1: int) -> SourceLayout:
        """Swap two dimensions."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self._rearranged(order)

    def unsqueeze(self, dim: int) -> SourceLayout:
        """Add a dimension of size 1."""
        dim = dim % (self.ndim + 1)
        parts = [
            replace(
                p,
                box=Box(start=_with(p.box.start, dim, 0), size=_with(p.box.size, dim, 1)),
                axes=(*p.axes[:dim], None, *p.axes[dim:]),
            )
            for p in self._parts
        ]
        return SourceLayout(_with(tuple(self.shape), dim, 1), parts, self.dtype)

    def squeeze(self, dim: int) -> SourceLayout:
        """Drop a dimension of size 1."""
        dim = dim % self.ndim
        return self if self.shape[dim] != 1 else self._rearranged([d for d in range(self.ndim) if d != dim])

    def narrow(self, dim: int, start: int, length: int) -> SourceLayout:
        """Keep ``length`` from ``start`` on in one dimension."""
        kept = Box.full(self.shape).narrow(dim % self.ndim, start, length)
        return SourceLayout(kept.size, list(self._within(kept)), self.dtype)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[SourceLayout, ...]:
        """Cut along a dimension into parts of these sizes."""
        total = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
        if sum(sizes) != total:
            raise NotFollowedError(f"{total} split into {list(sizes)}")
        return tuple(self.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[SourceLayout, ...]:
        """Cut along a dimension into equal parts; the last may be smaller."""
        return self.split(-(-self.shape[dim] // chunks), dim)

    def _rearranged(self, order: Sequence[int]) -> SourceLayout:
        parts = [
            replace(
                p,
                box=Box(start=tuple(p.box.start[d] for d in order), size=tuple(p.box.size[d] for d in order)),
                axes=tuple(p.axes[d] for d in order),
            )
            for p in self._parts
        ]
        return SourceLayout([self.shape[d] for d in order], parts, self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what torch's function of this name does, or say that it is not followed."""
        if func not in _FOLLOWED:
            raise NotFollowedError(getattr(func, "__name__", str(func)))
        return _FOLLOWED[func](*args, **(kwargs or {}))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:])


def _cat(tensors: Sequence[SourceLayout], dim: int = 0) -> SourceLayout:
    parts: list[_Part] = []
    first, length = tensors[0], 0
    dim = dim % first.ndim
    for one in tensors:
        sizes = [(a, b) for d, (a, b) in enumerate(zip(first.shape, one.shape, strict=True)) if d != dim]
        if any(a != b for a, b in sizes) or one.dtype != first.dtype:
            raise NotFollowedError(f"{tuple(first.shape)} next to {tuple(one.shape)}")
        for p in one._parts:
            start = tuple(s + (length if d == dim else 0) for d, s in enumerate(p.box.start))
            parts.append(replace(p, box=replace(p.box, start=start)))
        length += one.shape[dim]
    return SourceLayout([length if d == dim else n for d, n in enumerate(first.shape)], parts, first.dtype)


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: lambda tensors, dim=0: _cat([one.unsqueeze(dim) for one in tensors], dim),
    torch.chunk: SourceLayout.chunk,
    torch.split: SourceLayout.split,
    torch.transpose: SourceLayout.transpose,
    torch.squeeze: SourceLayout.squeeze,
    torch.unsqueeze: SourceLayout.unsqueeze,
}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion that layouts cannot follow: it needs complete tensors.

    Args:
        keys: The tensors of the checkpoint, as the conversion takes them.
        shapes: What it makes, by name.
        convert: From the tensors by key to the results by name.
    """

    keys: tuple[str, ...]
    shapes: Mapping[str, torch.Size]
    convert: Any


Source = SourceLayout | Conversion
