"""Tensor and sequence parallel training: DTensor weights and activations, collectives inside blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.dist.schedules import Order, job_of
from tests.dist.trial import Enable, Findings, Job, Record, compare, note_step, randomise

WIDTH, HEAD, INNER, VOCABULARY, SEQUENCE = 32, 8, 64, 64, 12


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to train.

    Attributes:
        style: ``"tensor"``: matrices are split, activations are local tensors; ``"dtensor"``: activations in a block
            stay DTensors; ``"sequence"``: norms and residuals are split along the sequence; ``"stream"``: and stay
            DTensors between blocks; ``"loss"``: the loss is split, too.
        shard: FSDP2 over the ranks that the style does not use.
        checkpointed: The call of every block is checkpointed.
        mixed: FSDP2's bfloat16 parameters.
        schedule: A name of ``SCHEDULES``.
    """

    style: str = "tensor"
    shard: bool = False
    checkpointed: bool = False
    mixed: bool = False
    schedule: str = "one"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, order: Sequence[int] | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers if order is None else [self.layers[i] for i in order]:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


def compare_setup(setup: Setup, policies: tuple[str, ...]) -> dict[str, Findings]:
    """Train without ebbtide, then with each policy; return the findings of each."""
    return compare(partial(_job, setup), policies)


def _job(setup: Setup, enable: Enable) -> Job:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        model = Decoder(checkpointed=setup.checkpointed)
        whole = randomise(model)
        _parallelise(model, setup.style, mesh["tensor"])
        if setup.shard:
            dtype = torch.bfloat16 if setup.mixed else None
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["shard"], mp_policy=policy)
            fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
        enable(model, strategy="fsdp2" if setup.shard else "single")
        return model, whole

    if setup.style == "loss":  # its backward must run in a context
        model, whole = make()
        return Job(model=model, step=partial(_step_of_split_loss, model), whole=whole)
    return job_of(setup.schedule, make, partial(_loss, mesh["shard"].get_local_rank()))


def _loss(replica: int, model: nn.Module, number: int, order: Order) -> Tensor:
    # Ranks that share a layer see the same batch.
    ids = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(100 * number + replica))
    logits = model(ids) if order is None else model(ids, order)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def _step_of_split_loss(model: nn.Module, step: int, record: Record) -> None:
    ids = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(step))
    with loss_parallel():
        value = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        value.backward()
    note_step(record, str(step), model, value)


def _parallelise(model: Decoder, style: str, mesh: DeviceMesh) -> None:
    if style in ("sequence", "stream", "loss"):
        _along_the_sequence(model, mesh, whole_loss=style != "loss", local_stream=style != "stream")
        return
    local = style != "dtensor"
    plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
    plan |= {f"mlp.{n}": ColwiseParallel(use_local_output=local) for n in ("gate", "up")}
    plan |= {"attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def _along_the_sequence(model: Decoder, mesh: DeviceMesh, *, whole_loss: bool, local_stream: bool) -> None:
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    split: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": local_stream}
    plan: dict[str, Any] = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(**whole),
        **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
        "attention.o": RowwiseParallel(**split),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(**whole),
        **{f"mlp.{n}": ColwiseParallel() for n in ("gate", "up")},
        "mlp.down": RowwiseParallel(**split),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    outside: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), **split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Replicate() if whole_loss else Shard(-1),
            use_local_output=whole_loss,
        ),
    }
    parallelize_module(model, mesh, outside)
