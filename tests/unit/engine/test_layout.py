"""Layouts: the place of a view in its storage, and the same view over other bytes."""

from __future__ import annotations

import pytest
import torch

from ebbtide.engine.layout import Layout, byte_view, checksum, content_bytes, storage_bytes, with_layout
from tests.helpers.oracle import same_bits

BASE = torch.arange(240, dtype=torch.float32).view(12, 20)
VIEWS = {
    "whole": BASE,
    "transposed": BASE.t(),
    "offset": BASE[3:7],
    "columns": BASE[:, 5:9],
    "steps": BASE[::3, ::2],
    "expanded": BASE[2:3].expand(6, 20),
    "overlapping": BASE.as_strided((8, 6), (2, 1), 4),
    "scalar": BASE[4, 4],
    "empty": BASE[:0],
    "bytes": BASE.view(torch.uint8)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_the_extent_is_what_the_view_can_reach(name: str) -> None:
    view = VIEWS[name]
    layout = Layout.of(view)
    first, last = layout.first, layout.last
    items = torch.arange(BASE.numel() * BASE.itemsize // view.itemsize)
    reached = items.as_strided(view.shape, view.stride(), view.storage_offset()).flatten() * view.itemsize
    if view.numel():
        assert (first, last) == (int(reached.min()), int(reached.max()) + view.itemsize)
    else:
        assert first == last


@pytest.mark.parametrize("name", [n for n in VIEWS if n != "empty"])
def test_a_view_over_its_own_source_is_itself(name: str) -> None:
    # The source of a kept entry is a window on the old storage, which does not begin at byte 0 of it.
    view = VIEWS[name]
    layout = Layout.of(view)
    first, last = layout.first, layout.last
    source = byte_view(view.untyped_storage(), first, last, view)
    assert same_bits(layout.over(source, first), view)
    assert same_bits(layout.over(source.clone(), first), view)
    assert layout.over(source.clone(), first).stride() == view.stride()


def test_whole_means_dense_and_alone() -> None:
    nbytes = BASE.untyped_storage().nbytes()
    whole = {name for name, view in VIEWS.items() if Layout.of(view).covers(nbytes)}
    assert whole == {"whole", "transposed"}
    assert Layout.of(torch.empty(3, 1, 4)).covers(48)
    assert not Layout.of(torch.empty(3, 1, 4)).covers(64)


def test_with_layout_copies_only_what_lies_otherwise() -> None:
    there = BASE.clone()
    assert with_layout(there, Layout.of(there)) is there
    other = with_layout(there.t().contiguous().t(), Layout.of(there))
    assert other.stride() == there.stride() and torch.equal(other, there)
    part = with_layout(there[:6], Layout.of(there[:6].clone()))
    assert part.untyped_storage().nbytes() == part.nbytes and torch.equal(part, there[:6])


def test_content_bytes_begin_where_the_content_begins() -> None:
    data = torch.arange(64, dtype=torch.int16)
    assert torch.equal(content_bytes(data[8:], 6), storage_bytes(data)[16:22])


def test_the_checksum_sees_a_changed_and_a_swapped_byte() -> None:
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    changed, swapped = data.clone(), torch.tensor([1, 2], dtype=torch.uint8)
    changed[4321] ^= 1
    assert checksum(changed) != checksum(data) == checksum(data.clone())
    assert checksum(swapped) != checksum(swapped.flip(0))


def test_the_checksum_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    whole = checksum(data)
    monkeypatch.setattr("ebbtide.engine.layout._CHECKSUM_BYTES", 1000)
    assert checksum(data) == whole
