"""Arrays that a block's modules can reach: of numpy, ``array.array``, and ``bytearray``."""

from __future__ import annotations

import array
import sys
import zlib
from typing import Any

MOST_ARRAY_BYTES = 1024**2
"""Larger arrays are not recorded, since each forward of the block would copy them: their digests are compared around
its first forwards."""

MOST_DIGESTED_BYTES = 32 * 1024**2
"""More bytes in such arrays of one block are not read either: the block is never checkpointed."""


def is_array(kind: type) -> bool:
    """Whether instances of a class are arrays of plain values."""
    numpy = sys.modules.get("numpy")
    return issubclass(kind, (array.array, bytearray, *(() if numpy is None else (numpy.ndarray,))))


def is_number(value: Any) -> bool:
    """Whether a value is a scalar of numpy; a record, which can be written, is none."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void)


def is_writeable(value: Any) -> bool:
    """Whether an array can be written."""
    return isinstance(value, (array.array, bytearray)) or bool(value.flags.writeable)


def size_of(value: Any) -> int:
    """Return the bytes of an array."""
    return value.nbytes if hasattr(value, "nbytes") else len(value) * getattr(value, "itemsize", 1)


def digest(value: Any) -> int:
    """Return a checksum of all bytes of an array."""
    return zlib.crc32(_bytes_in(value))


class HeldArray:
    """An array, as a container of its bytes."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def copy(self) -> Any:
        """Return its values."""
        return self._value[:] if isinstance(self._value, array.array) else self._value.copy()

    def restore(self, then: Any) -> None:
        """Write earlier values into the array, unless it still has them."""
        if _bytes_in(self._value) != _bytes_in(then):
            self._value[... if hasattr(self._value, "flags") else slice(None)] = then


def _bytes_in(value: Any) -> bytes | bytearray:
    return value if isinstance(value, bytearray) else value.tobytes()
