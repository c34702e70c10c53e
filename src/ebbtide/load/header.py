"""Headers of safetensors files, read and checked here: slices are read by these offsets, so all are verified.

The format: eight bytes, little-endian, the length of a JSON object; the object; the tensors' bytes. The library that
reads it hands out tensors and slices, not offsets.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ebbtide.base.errors import DataError
from ebbtide.base.units import format_size

MAX_HEADER_BYTES = 100_000_000
"""The limit of the library that writes these files; a larger header is rejected."""
METADATA = "__metadata__"
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """A tensor of a checkpoint: what it is and, in a file, where."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str = ""
    offset_bytes: int = 0
    state: tuple[int, ...] = ()
    """Of the file when its header was read, as ``state_of`` returns it; empty: not known."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def state_of(fd: int) -> tuple[int, ...]:
    """Return what changes if an open file is written, replaced or cut.

    Not what another owner or link changes, and not the inode, which some network file systems change.
    """
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def read_header(path: Path) -> dict[str, CheckpointEntry]:
    """Return the tensors of a safetensors file.

    Raises:
        DataError: It cannot be read, or its header contradicts itself or the file's length.
    """
    try:
        with path.open("rb") as file:
            state = state_of(file.fileno())
            total_bytes = state[0]
            first = file.read(8)
            length_bytes = int.from_bytes(first, "little")
            if len(first) < 8:
                raise _bad(path, f"has {total_bytes} bytes", "eight bytes with the header's length")
            if length_bytes > min(MAX_HEADER_BYTES, total_bytes - 8):
                room = format_size(min(MAX_HEADER_BYTES, max(total_bytes - 8, 0)))
                raise _bad(path, f"claims a header of {format_size(length_bytes)}", f"at most {room}")
            text = file.read(length_bytes)
    except OSError as error:
        raise unreadable(path, error) from error
    return _entries(path, _parsed(path, text), 8 + length_bytes, state)


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the system does not let this user read."""
    return DataError(
        f"{str(path)!r} cannot be read ({error.strerror or error})",
        expected="a safetensors file of the checkpoint",
        hint="check that the checkpoint is complete and readable by this user",
    )


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _bad(path, f"names {twice!r} twice", "each name once")
        return dict(pairs)

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise _bad(path, f"has a header that is no JSON ({error})", "a JSON object") from error
    if not isinstance(found, dict):
        raise _bad(path, f"has a header that is a {type(found).__name__}", "a JSON object")
    return cast("dict[str, Any]", found)


def _entries(
    path: Path, header: Mapping[str, Any], data_bytes: int, state: tuple[int, ...]
) -> dict[str, CheckpointEntry]:
    """Check every entry, and that the tensors tile the file's data."""
    total_bytes = state[0]
    entries: dict[str, CheckpointEntry] = {}
    for name, described in header.items():
        if name != METADATA:
            entries[name] = _entry(path, name, described, data_bytes, state)
    at, before = data_bytes, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset_bytes, item[1].nbytes, item[0])):
        if (begin := entry.offset_bytes) != at:
            what = (
                f"puts {name!r} over {before!r}"
                if begin < at
                else f"leaves a gap of {begin - at} bytes before {name!r}"
            )
            raise _bad(path, what, "tensors that follow each other without overlap or gap")
        at, before = begin + entry.nbytes, name
    if at != total_bytes:
        what = "is cut off" if at > total_bytes else "has bytes after its last tensor"
        raise _bad(path, f"{what}: it has {total_bytes} bytes", f"{at} bytes by its header")
    return entries


def _entry(path: Path, name: str, described: object, data_bytes: int, state: tuple[int, ...]) -> CheckpointEntry:
    fields: dict[str, Any] = cast("dict[str, Any]", described) if isinstance(described, dict) else {}
    shape, offsets, kind = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    if not (_sizes(shape) and _sizes(offsets) and len(cast("list[int]", offsets)) == 2 and isinstance(kind, str)):
        raise _bad(path, f"describes {name!r} as {described!r:.80}", "dtype, shape and data_offsets of each tensor")
    if kind not in DTYPES:
        raise DataError(
            f"{str(path)!r} holds {name!r} as {kind!r:.40}",
            expected="one of " + ", ".join(DTYPES),
            hint="convert the checkpoint to one of these dtypes, or fetch the file again if it is damaged",
        )
    begin, end = cast("list[int]", offsets)
    entry = CheckpointEntry(
        shape=tuple(cast("list[int]", shape)),
        dtype=DTYPES[kind],
        file=str(path),
        offset_bytes=data_bytes + begin,
        state=state,
    )
    if end - begin != entry.nbytes:
        raise _bad(path, f"gives {name!r} {end - begin} bytes", f"{entry.nbytes}, for {kind} of shape {entry.shape}")
    return entry


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in cast("list[object]", value))


def _bad(path: Path, found: str, expected: str) -> DataError:
    return DataError(
        f"{str(path)!r} {found}",
        expected=expected,
        hint="the file is damaged or not a safetensors file: fetch it again",
    )
