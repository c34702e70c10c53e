"""Weights that have bytes only while a part of a block runs, as under ZeRO-3."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.engine.model import ModelWeights
from ebbtide.engine.weights import Weights


def test_an_activation_at_the_address_of_a_weight_that_was_freed_is_no_weight() -> None:
    model = ModelWeights(tuple, move=True, steps=lambda: 0)
    model.begin_pass(tuple)
    weights, gathered = Weights(model, tuple), nn.Parameter(torch.randn(16, 16))
    weights.see([gathered])
    assert weights.include(gathered.data) and weights.hold(gathered.untyped_storage())
    key = gathered.untyped_storage()._cdata
    gathered.data = torch.empty(0)  # DeepSpeed frees it so when the part of the block has run
    others = [torch.randn(16, 16)]
    while others[-1].untyped_storage()._cdata != key:
        others.append(torch.randn(16, 16))
        assert len(others) < 100_000
    assert not weights.include(others[-1]) and not weights.hold(others[-1].untyped_storage())
