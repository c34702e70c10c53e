"""Pipeline parallel training: several graphs alive at once, and backward split into its two halves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.dist.decoder import VOCABULARY
from tests.dist.trial import Enable, Findings, Job, Record, compare, note_step, randomise
from tests.helpers.models import WIDTH, Attention, Mlp

MICROBATCHES, BATCH, SEQUENCE = 4, 8, 10
CPU = torch.device("cpu")

PLACES: dict[str, list[list[int]]] = {
    "GPipe": [[0], [1]],
    "1F1B": [[0], [1]],
    "Interleaved1F1B": [[0, 2], [1, 3]],
    "InterleavedZeroBubble": [[0, 2], [1, 3]],
    "ZBVZeroBubble": [[0, 3], [1, 2]],
}
"""Which stages a rank of a pipeline of two holds."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train.

    Attributes:
        schedule: A name of ``PLACES``.
        shard: Every stage is sharded by FSDP2 over two pipelines.
    """

    schedule: str
    shard: bool = False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Stage(nn.Module):
    """Two blocks; the first stage has the embedding, the last one the head."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if index == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def compare_setup(setup: Setup, policies: tuple[str, ...]) -> dict[str, Findings]:
    """Train without ebbtide, then with each policy; return the findings of each."""
    return compare(partial(_job, setup), policies)


def _job(setup: Setup, enable: Enable) -> Job:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh = torch.arange(world).reshape(world // 2, 2)
    device_mesh = DeviceMesh("cpu", mesh, mesh_dim_names=("shard", "stage"))
    mine = PLACES[setup.schedule][rank % 2]
    count = 2 * len(mine)
    parts = nn.ModuleDict({str(i): Stage(i, count) for i in mine})
    whole = randomise(parts)
    for part in parts.values():
        if setup.shard:
            for layer in part.layers:
                fully_shard(layer, mesh=device_mesh["shard"])
            fully_shard(part, mesh=device_mesh["shard"])
        enable(part)
    group = device_mesh["stage"].get_group()
    schedule = _schedule(setup.schedule, [_stage(parts[str(i)], i, count, group) for i in mine])
    return Job(model=parts, step=partial(_step, parts, schedule, mine, count, rank // 2), whole=whole)


def _stage(part: nn.Module, index: int, count: int, group: Any) -> pipelining.PipelineStage:
    # Pass the shapes: else the stage finds them by a forward over uninitialised memory.
    size = (BATCH // MICROBATCHES, SEQUENCE)
    ids, hidden, logits = torch.zeros(size, dtype=torch.long), torch.zeros(*size, WIDTH), torch.zeros(*size, VOCABULARY)
    given = ids if index == 0 else hidden.requires_grad_()
    made = logits.requires_grad_() if index == count - 1 else hidden.requires_grad_()
    return pipelining.PipelineStage(part, index, count, CPU, input_args=(given,), output_args=(made,), group=group)


def _schedule(name: str, stages: list[Any]) -> Any:
    cls = pipelining.schedules.get_schedule_class(name)
    first = stages if len(stages) > 1 else stages[0]
    return cls(first, n_microbatches=MICROBATCHES, loss_fn=_loss)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _step(
    parts: nn.ModuleDict, schedule: Any, mine: list[int], count: int, replica: int, step: int, record: Record
) -> None:
    generator = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    losses: list[Tensor] = []
    last = count - 1 in mine
    schedule.step(*((ids,) if 0 in mine else ()), target=ids if last else None, losses=losses if last else None)
    note_step(record, str(step), parts)
    record |= {f"{step} loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
