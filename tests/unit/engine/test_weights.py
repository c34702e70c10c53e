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


def test_weights_that_are_gathered_unseen_are_looked_for_when_an_unknown_storage_is_saved() -> None:
    model, asked = ModelWeights(tuple, move=True, steps=lambda: 0), list[int]()
    known, first, second = (nn.Parameter(torch.randn(16, 16)) for _ in range(3))
    model.begin_pass(lambda: [known])
    weights, parts = Weights(model, tuple), [[first], [], [second]]

    def gathered() -> list[torch.Tensor]:
        asked.append(1)
        return [*parts.pop(0)]

    weights.gathered = gathered
    assert weights.include(known.detach()) and weights.include(first) and asked == []
    assert weights.include(first.t().detach()) and weights.include(first.detach()) and len(asked) == 1
    assert not weights.include(torch.randn(16)) and len(asked) == 2
    assert weights.hold(second.untyped_storage()) and len(asked) == 3
    assert not weights.usable(first) and weights.usable(known), "its bytes are not there when the block recomputes"
    weights.forget()
    assert not weights.include(torch.randn(16)) and len(asked) == 3
