"""Rules for views, concatenation and indexing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ebbtide.engine.build import NodeView, Rule
from ebbtide.engine.declared import MOST_FUNCTIONS, DeclaredRule, Fn, From
from ebbtide.engine.rules.making import expression, method, operator, part, to_shape
from ebbtide.engine.tickets import Expr

_unsafe_view = DeclaredRule(lambda size: lambda x: x.view(size), [From(0, loose=True)], metadata=["shape"])
"""``reshape``, which makes a contiguous copy first."""

_squeeze = DeclaredRule(
    lambda size: lambda x: x.view(size) if x.is_contiguous() else x.reshape(size), [From(0)], metadata=["shape"]
)


def _joined(join: Callable[[list[torch.Tensor], int], torch.Tensor]) -> Rule:
    @functools.lru_cache(MOST_FUNCTIONS)
    def along(dim: int) -> Fn:
        return lambda *parts: join(list(parts), dim)

    def rule(n: NodeView) -> Expr | None:
        operands = [n.input(i) for i in range(len(n.node.next_functions))]
        return expression(n, along(n.constant("dim")), operands)

    return rule


def _index(n: NodeView) -> Expr | None:
    """Rule for ``x[i, :, j]``: the indices were saved, None where a whole dimension is taken."""
    indices, present = n.slots("indices")

    def pick(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        left = iter(tensors)
        chosen: list[torch.Tensor | None] = [next(left) if found else None for found in present]
        return torch.ops.aten.index(x, chosen)

    return expression(n, pick, [n.input(0), *indices])


_index_select = DeclaredRule(
    lambda dim: lambda x, i: x.index_select(dim, i), [From(0), From(None, "index")], constants=["dim"]
)
_gather = DeclaredRule(
    lambda dim: lambda x, i: x.gather(dim, i), [From(0, "self"), From(None, "index")], constants=["dim"]
)
_embedding = DeclaredRule(lambda: lambda weight, i: F.embedding(i, weight), [From(0), From(None, "indices")])


def _upsample(name: str, *constants: str) -> Rule:
    """Rule for the operator ``name`` with the scales that its node kept, one for each dimension."""
    upsample: Any = getattr(torch.ops.aten, name)

    def rule(n: NodeView) -> Expr | None:
        size, values = n.constant("output_size"), [n.constant(c) for c in constants]
        ends = {1: ("",), 2: ("_h", "_w"), 3: ("_d", "_h", "_w")}[len(size)]
        scales = [n.constant("scales" + end) for end in ends]
        return expression(n, lambda x: upsample(x, size, *values, *scales), [n.input(0)])

    return rule


def views() -> dict[str, Rule]:
    """Return the rules for views."""
    return {
        "AliasBackward0": method("detach"),
        "DiagonalBackward0": method("diagonal", "offset", "dim1", "dim2"),
        "ExpandBackward0": to_shape("expand"),
        "PermuteBackward0": method("permute", "dims"),
        "ReshapeAliasBackward0": to_shape("reshape"),
        "SelectBackward0": method("select", "dim", "index"),
        "SliceBackward0": operator(torch.ops.aten.slice, "dim", "start", "end", "step"),
        "SplitBackward0": part("split", "split_size", "dim"),
        "SplitWithSizesBackward0": part("split", "split_sizes", "dim"),
        "SqueezeBackward0": _squeeze,
        "SqueezeBackward1": _squeeze,
        "SqueezeBackward2": _squeeze,
        "TBackward0": method("t"),
        "TransposeBackward0": method("transpose", "dim0", "dim1"),
        "UnbindBackward0": part("unbind", "dim"),
        "UnfoldBackward0": method("unfold", "dimension", "size", "step"),
        "UnsafeSplitBackward0": part("split", "split_size", "dim"),
        "UnsafeViewBackward0": _unsafe_view,
        "UnsqueezeBackward0": method("unsqueeze", "dim"),
        "ViewAsComplexBackward0": operator(torch.view_as_complex),
        "ViewAsRealBackward0": operator(torch.view_as_real),
        "ViewBackward0": to_shape("view"),
    }


def copies() -> dict[str, Rule]:
    """Return the rules for what puts tensors together, repeats them, or picks elements."""
    return {
        "CatBackward0": _joined(torch.cat),
        "EmbeddingBackward0": _embedding,
        "FlipBackward0": method("flip", "dims"),
        "GatherBackward0": _gather,
        "IndexBackward0": _index,
        "IndexSelectBackward0": _index_select,
        "PixelShuffleBackward0": operator(F.pixel_shuffle, "upscale_factor"),
        "PixelUnshuffleBackward0": operator(F.pixel_unshuffle, "downscale_factor"),
        "RepeatBackward0": method("repeat", "repeats"),
        "RollBackward0": method("roll", "shifts", "dims"),
        "StackBackward0": _joined(torch.stack),
        "TrilBackward0": method("tril", "diagonal"),
        "TriuBackward0": method("triu", "diagonal"),
        "UpsampleBilinear2DBackward0": _upsample("upsample_bilinear2d", "align_corners"),
        "UpsampleNearest1DBackward0": _upsample("upsample_nearest1d"),
        "UpsampleNearest2DBackward0": _upsample("upsample_nearest2d"),
        "UpsampleNearest3DBackward0": _upsample("upsample_nearest3d"),
        "UpsampleNearestExact2DBackward0": _upsample("_upsample_nearest_exact2d"),
    }
