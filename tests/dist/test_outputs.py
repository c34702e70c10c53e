"""Blocks under FSDP2 that save their output: the next block saves it too, without the first one's weights.

Between steps the model is moved, which swaps its shards.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.trial import Enable, Findings, Job, Record, check, compare, note_step, randomise
from tests.helpers.models import WIDTH
from tests.helpers.spawn import spawn

LAYERS = 4


class Activated(nn.Module):
    """Ends in an operator that saves its result, like the blocks of many convolutional networks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x + self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Activated() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _job(enable: Enable) -> Job:
    model = Model()
    whole = randomise(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    enable(model)
    return Job(model=model, step=partial(_step, model), whole=whole)


def _step(model: nn.Module, step: int, record: Record) -> None:
    torch.manual_seed(step)
    value = model(torch.randn(2, 8, WIDTH)).square().mean()
    value.backward()
    note_step(record, str(step), model, value)
    model.to("cpu")  # as verl does around checkpoints: torch swaps the contents of all shards


def outputs() -> dict[str, Findings]:
    return compare(_job, ("auto", "minimal", "inputs"))


def test_an_output_is_not_recomputed_from_weights_that_are_gone() -> None:
    values = spawn(outputs, 2)
    check(values, blocks=LAYERS)
    assert all(found["minimal"].recomputes > 0 for found in values)
