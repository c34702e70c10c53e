"""FLOP of fused attention, which torch before 2.13 does not count if heads share keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from ebbtide.profiling import faketensors
from ebbtide.profiling.faketensors import _flops

BATCH, HEADS, QUERIES, KEYS, WIDTH, VALUE = 2, 8, 16, 32, 24, 12
FUSED = [f"_scaled_dot_product_{kernel}_attention" for kernel in ("efficient", "flash", "cudnn")]


def _qkv(shared: int) -> tuple[torch.Tensor, ...]:
    shapes = (HEADS, QUERIES, WIDTH), (HEADS // shared, KEYS, WIDTH), (HEADS // shared, KEYS, VALUE)
    return tuple(torch.empty(BATCH, *shape, device="meta") for shape in shapes)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_heads_that_share_keys_count_like_heads_of_their_own(
    monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    operator: Any = getattr(torch.ops.aten, name + suffix)
    gradient = [torch.empty(BATCH, HEADS, QUERIES, VALUE, device="meta")] if suffix else []
    expected = flop_registry[operator](*gradient, *_qkv(1), out_val=None)
    monkeypatch.setattr(faketensors, "flop_registry", {})  # an older torch raises for this
    for shared in (1, 4):
        found = _flops(operator.default, name + suffix, (*gradient, *_qkv(shared)), {}, None)
        assert found == (expected, True)
