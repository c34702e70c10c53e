"""The moving average: its precision, and the steps in which it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide_recipes.video.ema import Average


def after(steps: int, average: Average, weight: torch.nn.Parameter, drift: float = 0.0) -> float:
    """Return the average of a weight after this many steps, each of which moves the weight."""
    nothing: Any = None
    average.on_train_begin(nothing, nothing, nothing)
    for _ in range(steps):
        with torch.no_grad():
            weight += drift
        average.on_step_end(nothing, nothing, nothing)
    with average.in_place():
        return float(weight.detach().float().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_moves_in_every_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 4, bias=False).to(dtype)
    torch.nn.init.zeros_(module.weight)
    average = Average(module, decay=0.999)
    assert after(1000, average, module.weight) == 0.0
    torch.nn.init.ones_(module.weight)
    assert after(1000, average, module.weight) > 0.95
    assert module.weight.dtype == dtype and bool((module.weight == 1).all())
    for rank in (1, 0):  # of DDP, whose processes have the same
        assert not [*tmp_path.iterdir()]
        average.save(tmp_path, rank)
    other = Average(module, decay=0.999)
    other.load(tmp_path, 2)
    with average.in_place():
        wanted = module.weight.detach().clone()
    with other.in_place():
        assert torch.equal(module.weight, wanted)


def test_an_average_waits_while_nothing_is_learned() -> None:
    module, learns = torch.nn.Linear(2, 2, bias=False), [False]
    torch.nn.init.zeros_(module.weight)
    average = Average(module, decay=0.5, learned=lambda: learns[0])
    assert after(5, average, module.weight, drift=1.0) == 0.0
    learns[0] = True
    assert after(1, average, module.weight) > 0.0
