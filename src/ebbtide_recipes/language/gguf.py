"""Reads a GGUF file: metadata and tensors, each in one pass over the bytes.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and ``dequantize_row_q4_1`` and
``dequantize_row_q8_0`` of ``ggml-quants.c`` there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import DataError

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = {_F32: (1, 4), _Q4_1: (32, 20), _Q8_0: (32, 34)}
"""Values and bytes of a block, by the type's number."""


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """A GGUF file.

    Attributes:
        metadata: Values by key.
        weights: Tensors by name, dequantised to float32.
    """

    metadata: dict[str, Any]
    weights: dict[str, torch.Tensor]


def read(path: Path) -> Gguf:
    """Read a GGUF file whose tensors are float32, Q4_1 or Q8_0.

    Raises:
        DataError: The file is no GGUF file of version 2 or 3, or holds tensors of another type.
    """
    cursor = _Cursor(bytearray(path.read_bytes()))  # writable, as torch wants a buffer to be
    if cursor.data[:4] != b"GGUF" or cursor.number("<I", at=4) not in (2, 3):
        raise DataError(f"{path} is no GGUF file", expected="GGUF of version 2 or 3", hint="fetch the file again")
    cursor.position = 8
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    metadata = {cursor.string(): cursor.value(cursor.number("<I")) for _ in range(pairs)}
    entries = [_entry(cursor, path) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    begin = -(-cursor.position // alignment) * alignment
    data = torch.frombuffer(cursor.data, dtype=torch.uint8)[begin:]
    return Gguf(
        metadata=metadata,
        weights={name: _dequantised(data, shape, kind, offset) for name, shape, kind, offset in entries},
    )


def _entry(cursor: _Cursor, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    """Read a tensor's name, shape in torch's order, type and offset."""
    name = cursor.string()
    dimensions = [cursor.number("<Q") for _ in range(cursor.number("<I"))]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    if kind not in _BLOCK:
        raise DataError(
            f"tensor {name!r} of {path} is of ggml type {kind}",
            expected=f"one of the types {', '.join(map(str, _BLOCK))} (F32, Q4_1, Q8_0)",
            hint="the built-in model needs no others: fetch the file again",
        )
    return name, tuple(reversed(dimensions)), kind, offset


def _dequantised(data: torch.Tensor, shape: tuple[int, ...], kind: int, offset: int) -> torch.Tensor:
    """Return a tensor's values in float32: product and sum are rounded one after the other, as ggml does."""
    values, block_bytes = _BLOCK[kind]
    count = torch.Size(shape).numel() // values
    # A copy of the tensor's own bytes: whoever keeps the values does not keep the file.
    blocks = data[offset : offset + count * block_bytes].clone().view(count, block_bytes)
    if kind == _F32:
        return blocks.view(torch.float32).view(shape)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == _Q8_0:
        return (blocks[:, 2:].view(torch.int8) * scale).view(shape)
    least = blocks[:, 2:4].contiguous().view(torch.float16).float()
    packed = blocks[:, 4:]
    levels = torch.cat([packed & 0xF, packed >> 4], dim=1)  # low halves first
    return (levels * scale).add_(least).view(shape)


class _Cursor:
    """Walks over the bytes of a file."""

    def __init__(self, data: bytearray) -> None:
        self.data, self.position = data, 0

    def number(self, form: str, *, at: int | None = None) -> Any:
        """Read a number here and go on behind it, or read one at a place and stay here."""
        (value,) = struct.unpack_from(form, self.data, self.position if at is None else at)
        self.position += struct.calcsize(form) if at is None else 0
        return value

    def string(self) -> str:
        """Read a string and go on behind it."""
        length = self.number("<Q")
        self.position += length
        return self.data[self.position - length : self.position].decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value of a type and go on behind it."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(_NUMBERS[kind])
