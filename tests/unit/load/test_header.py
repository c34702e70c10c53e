"""Headers of safetensors files: read like the library's; false headers are refused before a byte is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ebbtide.base.errors import DataError
from ebbtide.load.header import DTYPES, read_header


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def told(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_entries_lie_where_the_library_finds_them(tmp_path: Path) -> None:
    tensors = {
        f"t{i}": torch.randint(0, 100, (i, 3)).to(dtype)
        for i, dtype in enumerate(DTYPES.values())
        if not dtype.is_complex and "fnuz" not in str(dtype)  # safetensors 0.6 does not know those
    }
    tensors["scalar"] = torch.tensor(1.5)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    data = path.read_bytes()
    with safe_open(path, "pt") as file:
        for name, entry in entries.items():
            expected = file.get_tensor(name)
            raw = data[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
            assert (entry.dtype, entry.shape) == (expected.dtype, tuple(expected.shape))
            assert raw == bytes(expected.contiguous().flatten().view(torch.uint8).tolist())


def test_scales_of_8_bit_formats_are_known(tmp_path: Path) -> None:
    save_file({"scale": torch.ones(3).to(torch.float8_e8m0fnu)}, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors")["scale"].dtype == torch.float8_e8m0fnu


LIES: dict[str, tuple[Any, bytes, int | None, str]] = {
    "a length beyond the file": ({}, b"", 1 << 30, "claims a header of 1.0 GiB"),
    "a length beyond reason": ({}, b"", 1 << 62, "claims a header of"),
    "no JSON": (b"{nonsense", b"", None, "has a header that is no JSON"),
    "no text": (b"\xff\xfe{}", b"", None, "has a header that is no JSON"),
    "nested without end": (b"[" * 100_000, b"", None, "has a header that is no JSON"),
    "a list": ([], b"", None, "has a header that is a list"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), None, "describes 'a' as"),
    "a negative size": ({"a": told([-1], 0, 4)}, bytes(4), None, "describes 'a' as"),
    "a size that is true": ({"a": told([True], 0, 4)}, bytes(4), None, "describes 'a' as"),
    "sizes whose product is vast": ({"a": told([1 << 40, 1 << 40], 0, 4)}, bytes(4), None, "gives 'a' 4 bytes"),
    "too few bytes": ({"a": told([2], 0, 4)}, bytes(4), None, "gives 'a' 4 bytes"),
    "an overlap": ({"a": told([2], 0, 8), "b": told([1], 4, 8)}, bytes(8), None, "puts 'b' over 'a'"),
    "a gap": ({"a": told([1], 0, 4), "b": told([1], 8, 12)}, bytes(12), None, "4 bytes before 'b'"),
    "bytes behind the end": ({"a": told([1], 0, 4)}, bytes(5), None, "has bytes after its last tensor"),
    "a name that stands twice": (b'{"a": {}, "a": {}}', b"", None, "names 'a' twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    header, data, length, message = LIES[lie]
    path = write(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(DataError, match="hint: the file is damaged") as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kept_bytes", [0, 4, 8, 20, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(10)}, path)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(DataError):
        read_header(path)


def test_a_missing_file_of_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.safetensors' cannot be read \(No such file or directory\)"):
        read_header(tmp_path / "absent.safetensors")


def test_a_dtype_that_torch_or_this_library_lacks_is_no_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": told([1], 0, 4, "F33")}, bytes(4))
    with pytest.raises(DataError, match="holds 'a' as 'F33'") as caught:
        read_header(path)
    assert str(path) in caught.value.found and "convert" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_numbers_in_eight_bits_of_other_processors_are_known(tmp_path: Path, dtype: torch.dtype) -> None:
    kind = f"F8_{str(dtype).split('_')[1].upper()}"
    path = write(tmp_path / "x.safetensors", {"a": told([4], 0, 4, kind)}, bytes(4))
    assert read_header(path)["a"].dtype == dtype
