from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.base.errors import ConfigError
from ebbtide.base.units import format_size, parse_size

KIB = 1024


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("40GiB", 40 * KIB**3),
        ("40 GB", 40 * 1000**3),
        ("40g", 40 * KIB**3),
        ("512MiB", 512 * KIB**2),
        ("512 mb", 512 * 1000**2),
        ("1.5K", 1536),
        ("2TiB", 2 * KIB**4),
        ("1PB", 1000**5),
        ("  7 b ", 7),
        ("7", 7),
        ("1_000_000", 1_000_000),
        (1048576, 1048576),
        (1.0, 1),
    ],
)
def test_parse_size_reads_what_people_write(text: str | float, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "40 giga", "40 iB", "-1", "-1GiB", "0", "0.4", "1e3", "1,5G", "nan", "inf"]
)
def test_parse_size_refuses_what_is_no_size_above_zero(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, name="host_budget")
    assert caught.value.found == f"host_budget is {text!r}"


@pytest.mark.parametrize("text", ["0", 0, "0KiB", "0 B"])
def test_a_size_may_be_zero_where_that_has_a_meaning(text: str | int) -> None:
    assert parse_size(text, least=0) == 0


@pytest.mark.parametrize(
    ("text", "hint"), [("-5MiB", "smallest size is 0"), (1.5, "'1.5KiB'"), ("abc", "KB, MB"), (True, "KB, MB")]
)
def test_where_zero_is_a_size_no_error_says_that_one_byte_is_the_smallest(text: str | float, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a size of 0 or more, .* whole number(?s:.*)hint: .*{hint}"):
        parse_size(text, least=0)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1023.6, "1.0 KiB"),
        (KIB**3 - 1, "1.0 GiB"),
        (1023.96 * KIB**3, "1.0 TiB"),
        (1023.94 * KIB**3, "1023.9 GiB"),
        (KIB**2, "1.0 MiB"),
        (2.5 * KIB**3, "2.5 GiB"),
        (KIB**4, "1.0 TiB"),
        (5000 * KIB**4, "5000.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_size_writes_what_people_read(size_bytes: float, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(1, 1000 * KIB**4))
def test_what_format_size_writes_parse_size_reads_back(size_bytes: int) -> None:
    # One decimal is written, so what is read back is off by half a tenth of the unit: at worst 5 % (at 1.0 of it).
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.05)


@given(st.integers(1, 10**18))
def test_a_number_of_bytes_is_read_exactly(size_bytes: int) -> None:
    assert parse_size(size_bytes) == parse_size(str(size_bytes)) == size_bytes
