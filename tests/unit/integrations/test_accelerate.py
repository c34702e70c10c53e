"""Contexts of ``memory_efficient_init`` on one accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

accelerated = pytest.importorskip("ebbtide.integrations.accelerate")


class Preparing:
    """Stand-in for an accelerator."""

    def prepare(self, *args: Any) -> tuple[Any, ...]:
        return args


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_models_of_two_contexts_are_each_filled_by_their_own(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[tuple[nn.Module, Any]] = []

    def fill(accelerator: Any, model: nn.Module, later: Any, plain: Callable[[], Any], *rest: Any) -> Any:
        filled.append((model, later))
        later.done(model)
        return plain()

    monkeypatch.setattr(accelerated, "_filled", fill)
    accelerator, models, records = Preparing(), [nn.Linear(1, 1), nn.Linear(1, 1)], []
    for model in models:
        later = accelerated.Later()
        later.note(model, {"weight": torch.ones(1, 1)})
        records.append(later)
        accelerated._fill_in_prepare(accelerator, later, {})
    for number in order:
        assert accelerator.prepare(models[number]) == (models[number],)
    assert filled == [(models[number], records[number]) for number in order]
    other = nn.Linear(1, 1)
    assert accelerator.prepare(other) == (other,) and len(filled) == 2
