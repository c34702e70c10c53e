"""Layouts track the origin of elements through all operations of conversions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.load.layout import Box, NotFollowedError, Piece, SourceLayout
from ebbtide.load.targets import boxes_of_range


def read(pieces: list[Piece], tensors: dict[str, torch.Tensor]) -> None:
    for piece in pieces:
        piece.into.copy_(piece.box.of(tensors[piece.key]))


def boxes(shape: tuple[int, ...]) -> list[Box]:
    """Return every box of a small shape."""
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return [
        Box(start=tuple(a for a, _ in one), size=tuple(b - a for a, b in one)) for one in itertools.product(*ranges)
    ]


def experts(x: dict[str, object]) -> object:
    stack = torch.stack
    gate, up = stack([x["g0"], x["g1"]], dim=0), stack([x["u0"], x["u1"]], dim=0)  # type: ignore[list-item]
    return torch.cat([gate, up], dim=1).transpose(1, 2).contiguous()


CONVERSIONS = {
    "itself": (lambda x: x["g0"], ["g0"]),
    "stacked and fused experts, transposed": (experts, ["g0", "g1", "u0", "u1"]),
    "stacked behind": (lambda x: torch.stack([x["g0"], x["u1"]], -1), ["g0", "u1"]),
    "a chunk": (lambda x: torch.chunk(x["qkv"], 3, dim=0)[1].contiguous(), ["qkv"]),
    "a split of a concatenation": (
        lambda x: torch.split(torch.cat([x["qkv"], x["g0"]], 0), [5, 3, 1], dim=0)[1],
        ["qkv", "g0"],
    ),
    "a row": (lambda x: torch.chunk(x["qkv"], 6, dim=0)[4].squeeze(0), ["qkv"]),
    "of no dimension": (lambda x: x["scalar"], ["scalar"]),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_any_box_of_a_converted_tensor_is_read_from_its_sources(name: str) -> None:
    convert, keys = CONVERSIONS[name]
    shapes = {"g0": (3, 4), "g1": (3, 4), "u0": (3, 4), "u1": (3, 4), "qkv": (6, 4), "scalar": ()}
    tensors = {k: torch.randn(s) for k, s in shapes.items()}
    expected = convert(tensors)
    layout = convert({k: SourceLayout.of(k, s, torch.float32) for k, s in shapes.items()})
    assert isinstance(layout, SourceLayout)
    assert tuple(layout.shape) == tuple(expected.shape)
    assert set(layout.keys) <= set(keys)
    for box in boxes(tuple(expected.shape)):
        into = torch.full(box.size, torch.nan)
        read(list(layout.pieces(box, into)), tensors)
        assert torch.equal(into, box.of(expected))


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: torch.relu(x),
        lambda x: torch.cat([x, x.transpose(0, 1)], 0),
        lambda x: torch.split(x, [1, 1], dim=0),
        lambda x: x.reshape(2, 6),
    ],
)
def test_what_is_not_a_movement_of_boxes_is_not_followed(convert: object) -> None:
    with pytest.raises((NotFollowedError, AttributeError)):
        convert(SourceLayout.of("x", (3, 4), torch.float32))  # type: ignore[operator]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_a_range_of_elements_is_tiled_by_its_boxes(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    found = torch.full((end - begin,), torch.nan)
    parts = list(boxes_of_range(shape, begin, end))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    for box, first in parts:
        found[first - begin :][: box.numel].view(box.size).copy_(box.of(whole))
    assert torch.equal(found, whole.flatten()[begin:end])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 30))
def test_the_parts_of_a_box_are_all_of_it_and_small(shape: list[int], most: int) -> None:
    box, counts = Box(start=(7,) * len(shape), size=tuple(shape)), torch.zeros(shape)
    for part in box.parts(most):
        assert part.numel <= most
        part.of(counts, origin=box.start).add_(1)
    assert counts.eq(1).all()


def test_an_adapter_inside_another_has_the_base_models_name() -> None:
    from ebbtide.load.names import base_name

    wrapped = "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj"
    assert base_name(wrapped) == "model.layers.0.mlp.experts.down_proj"
    assert base_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert base_name("my_base_layer.weight") == "my_base_layer.weight"
