"""The tensors of files that ``torch.save`` wrote, by their places: slices of them are read as those of other files.

[Note: no pickled file is mapped]
``torch.load`` can map a file, and a mapped file that is cut kills the process that reads it. Under fake tensors it
reads no data, and notes where each storage lies in the file. A tensor whose elements do not follow each other there,
row by row, is read whole whenever a part of it is needed.
Source: https://github.com/pytorch/pytorch/pull/147787, in torch 2.7; checked with torch 2.13.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.base.errors import DataError, first_line
from ebbtide.load.header import CheckpointEntry, state_of
from ebbtide.load.layout import Box, Piece
from ebbtide.load.reader import SliceReader


class ScatteredTensors(Mapping[str, torch.Tensor]):
    """Tensors that do not lie in their files row by row; each is read whole when it is looked up.

    The last one stays in memory: a rank that reads for others looks it up again for each message.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[CheckpointEntry, torch.Tensor]] = {}
        """A run of elements in a file, and the tensor without data that is a view of it."""
        self._latest: dict[str, torch.Tensor] = {}

    def add(self, key: str, run: CheckpointEntry, view: torch.Tensor) -> None:
        """Add a tensor: the elements from its first to its last, and how it views them."""
        self._found[key] = run, view

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._latest:
            return self._latest[key]
        self._latest.clear()
        run, view = self._found[key]
        values = torch.empty(run.shape, dtype=run.dtype)
        with SliceReader({key: run}) as reader:
            reader.read([Piece(key=key, box=Box.full(run.shape), into=values)])
        values = values.as_strided(view.shape, view.stride())
        values = values.conj() if view.is_conj() else values
        self._latest[key] = values.neg() if view.is_neg() else values
        return self._latest[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def tensors_of(file: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the contents of a file without data, and what changes if the file is written.

    Raises:
        DataError: It cannot be read, or holds more than tensors and plain containers.
    """
    try:
        with file.open("rb") as opened, FakeTensorMode():
            state = state_of(opened.fileno())
            found: Any = torch.load(opened, map_location="cpu", weights_only=True)
        if not zipfile.is_zipfile(file):
            raise ValueError("it is in the format of torch before 1.6")
    except Exception as error:
        raise DataError(
            f"{str(file)!r} cannot be read ({first_line(error):.160})",
            expected="a file written by torch.save, with tensors and plain containers only",
            hint="convert it to safetensors where it came from",
        ) from error
    return found.get("state_dict", found) if isinstance(found, dict) else {"": found}, state


def place_tensor(
    key: str, tensor: torch.Tensor, file: Path, state: tuple[int, ...], scattered: ScatteredTensors
) -> CheckpointEntry:
    """Return where a tensor without data lies in its file; if not row by row, add it to ``scattered``.

    Raises:
        DataError: It has no data there, or a sparse layout.
    """
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    begin: int | None = getattr(storage, "_checkpoint_offset", None)
    if begin is None:
        raise DataError(
            f"{str(file)!r} has no data for {key!r}",
            expected="dense tensors with data",
            hint="convert it to safetensors where it came from",
        )
    shape, dtype = tuple(tensor.shape), tensor.dtype
    offset_bytes = begin + int(tensor.storage_offset()) * dtype.itemsize
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return CheckpointEntry(shape=shape, dtype=dtype, file=str(file), offset_bytes=offset_bytes, state=state)
    length = 1 + sum((n - 1) * step for n, step in zip(shape, tensor.stride(), strict=True))
    run = CheckpointEntry(shape=(length,), dtype=dtype, file=str(file), offset_bytes=offset_bytes, state=state)
    scattered.add(key, run, tensor)
    return CheckpointEntry(shape=shape, dtype=dtype)
