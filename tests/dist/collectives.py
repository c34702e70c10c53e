"""Blocks that call collectives in their forward, which neither a wrapper nor a parameter shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbtide.base.actions import Action, Plan
from tests.dist.trial import Enable, Findings, Job, Record, compare, follow, note_step, randomise

WIDTH, INNER, LAYERS = 16, 32, 3


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to train.

    Attributes:
        style: ``"tensor"``: Megatron's, matrices split and sums over ranks; ``"sequence"``: Megatron's with split
            activations between; ``"experts"``: one expert per rank, tokens sent to it and back.
        dense: Layers before the first that has experts.
        lengths: Tokens of a batch, by rank.
        one_wishes: Only rank 0 wants blocks checkpointed.
    """

    style: str
    dense: int = 0
    lengths: tuple[int, int] = (12, 12)
    one_wishes: bool = False


class Copy(torch.autograd.Function):
    """Megatron's ``copy_to_tensor_model_parallel_region``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _summed(grad)


class Reduce(torch.autograd.Function):
    """Megatron's ``reduce_from_tensor_model_parallel_region``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Gather(torch.autograd.Function):
    """Megatron's ``gather_from_sequence_parallel_region``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _own_part(_summed(grad))


class Scatter(torch.autograd.Function):
    """Megatron's ``reduce_scatter_to_sequence_parallel_region``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _own_part(_summed(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gathered(grad)


class Send(torch.autograd.Function):
    """Send rows to their ranks, as expert parallelism sends tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        return _exchanged(x, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        return _exchanged(grad, received, sent), None, None


class SplitMlp(nn.Module):
    """A column-parallel and a row-parallel matrix; activations between layers are full, or split in rows."""

    def __init__(self, *, sequence: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER // 2), nn.Linear(INNER // 2, WIDTH, bias=False)
        self.enter, self.leave = (Gather, Scatter) if sequence else (Copy, Reduce)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.up(self.enter.apply(self.norm(x))), approximate="tanh")
        return x + self.leave.apply(self.down(y))


class Experts(nn.Module):
    """A router, and one expert on this rank: each token goes to the rank of its preferred expert."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH))
        self.dense = nn.Identity() if dense else None

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        if self.dense is not None:
            return x + self.expert(x) * weight[:, None]
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there = Send.apply(x[order], sent.tolist(), received.tolist())
        back = Send.apply(self.expert(there), received.tolist(), sent.tolist())
        return x + torch.empty_like(x).index_copy(0, order, back) * weight[:, None]


class Model(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        if setup.style == "experts":
            layers = [Experts(dense=i < setup.dense) for i in range(LAYERS)]
        else:
            layers = [SplitMlp(sequence=setup.style == "sequence") for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OneWishes:
    """A plan by which rank 0 checkpoints all blocks, including the first, and the other rank none."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        asked = must_keep_bytes > 2**60  # whether it might at any time
        return Action.CHECKPOINT if asked or dist.get_rank() == 0 else Action.KEEP


def compare_setup(setup: Setup, policies: tuple[str, ...]) -> dict[str, Findings]:
    """Train without ebbtide, then with each policy; return the findings of each."""
    return compare(partial(_job, setup), policies)


def _job(setup: Setup, enable: Enable) -> Job:
    model = Model(setup)
    whole = randomise(model)
    handle = enable(model, strategy="single")
    if handle is not None and setup.one_wishes:
        follow(handle, OneWishes(handle.plan))
    return Job(model=model, step=partial(_step, setup, model), whole=whole)


def _step(setup: Setup, model: nn.Module, step: int, record: Record) -> None:
    rank = dist.get_rank()
    # Ranks that share every token see the same batch.
    torch.manual_seed(10 * step + (0 if setup.style == "tensor" else rank))
    value = model(torch.randn(setup.lengths[rank], WIDTH, requires_grad=True)).square().mean()
    value.backward()
    note_step(record, str(step), model, value)


def _summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def _own_part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _exchanged(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent)
    return result
