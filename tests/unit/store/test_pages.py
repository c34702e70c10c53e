"""Huge pages: which memory has them, and its neighbours."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from ebbtide.store import pages as pages_module
from ebbtide.store.pages import HUGE_PAGE_BYTES, host_reclaims_pages, small_free_bytes, use_huge_pages
from tests.helpers.pages import asked_for_huge_pages

MAPPED_BYTES = 5 * HUGE_PAGE_BYTES


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pages_module, "host_reclaims_pages", lambda: False)
    memory = mmap.mmap(-1, MAPPED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    loan = (ctypes.c_ubyte * MAPPED_BYTES).from_buffer(memory)
    address = ctypes.addressof(loan)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loan))  # mapped until the process ends
    return address


@pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux")
def test_only_whole_pages_inside_of_the_memory_are_huge(address: int) -> None:
    first, last = address + 100, address + MAPPED_BYTES - 100
    if not use_huge_pages(first, last - first):
        pytest.skip("this kernel has no huge pages")
    assert asked_for_huge_pages(address + mmap.PAGESIZE, address + MAPPED_BYTES - mmap.PAGESIZE)
    assert not asked_for_huge_pages(address, address + 1)
    assert not asked_for_huge_pages(last, last + 1)


def test_little_memory_is_left_alone(address: int) -> None:
    assert not use_huge_pages(address, HUGE_PAGE_BYTES - 1)
    assert not use_huge_pages(address + 1, HUGE_PAGE_BYTES)
    if sys.platform == "linux":
        assert not asked_for_huge_pages(address, address + HUGE_PAGE_BYTES)


def test_other_systems_are_not_asked(address: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not use_huge_pages(address, MAPPED_BYTES)
    assert Path("/proc/self/smaps").exists() is False or not asked_for_huge_pages(address, address + MAPPED_BYTES)


@pytest.mark.parametrize(
    ("order", "reclaims"),
    [("9", True), ("0", True), ("10", False), ("-1", False), ("4294967295", False), (None, False), ("?", False)],
)
def test_hosts_that_reclaim_free_huge_pages_are_recognized(tmp_path: Path, order: str | None, reclaims: bool) -> None:
    if order is not None:
        (tmp_path / "order").write_text(f"{order}\n")
    assert host_reclaims_pages(tmp_path / "order") is reclaims


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_has_small_pages_where_the_host_reclaims_huge_ones(
    address: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "host_reclaims_pages", lambda: True)
    assert not use_huge_pages(address, MAPPED_BYTES)
    assert not asked_for_huge_pages(address, address + MAPPED_BYTES)


def test_free_memory_in_small_pieces_is_read_of_all_zones(tmp_path: Path) -> None:
    pieces = tmp_path / "buddyinfo"
    pieces.write_text(
        "Node 0, zone      DMA      1      0      0      0      0      0      0      0      1      1      3\n"
        "Node 0, zone   Normal      2      1      0      0      0      0      0      0      0    822    719\n"
    )
    assert small_free_bytes(pieces) == (1 + 256 + 2 + 2) * mmap.PAGESIZE


@pytest.mark.parametrize("text", ["", "Node 0, zone DMA one two", None])
def test_free_memory_in_pieces_of_unknown_size_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "buddyinfo").write_text(text)
    assert small_free_bytes(tmp_path / "buddyinfo") == 0
