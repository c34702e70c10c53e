"""Cases that break offloaders which commit one group of tensors per layer: each is a row that is run.

A row is a stack of toy layers and a step. It is trained without and with offloading, in one process or sharded on
two ranks, and must compute the same bits; where ordinary training raises, offloading must raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from tests.dist.trial import Enable, Findings, Job, Record, compare, note_step, randomise

LAYERS, WIDTH, ROWS_OF_X = 5, 24, 24
"""As many rows as columns: what a layer saves transposed has the shape of what it saves."""


class Layer(nn.Module):
    """A block with two parts, and hooks for the peculiarity of a row.

    Args:
        inner: Compute the block from its first product.
        output: Make the block's return value from its result.
    """

    def __init__(self, inner: Callable[[Tensor], Tensor], output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.output = inner, output

    def forward(self, x: Tensor) -> Any:
        return self.output(x + self.down(self.inner(self.up(x))))


class Toy(nn.Module):
    """Five blocks, run in the requested order, each output passed on by ``between``."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(row.inner, row.output) for _ in range(LAYERS))
        self.between = row.between

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(LAYERS))) -> Tensor:
        for i in order:
            x = self.between(self.layers[i](x))
        return x


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """Arguments of a row's step: the model, a batch by number, and a record of the gradients."""

    model: nn.Module
    note: Callable[..., None]
    record: Record
    needs_grad: bool = False

    def batch(self, number: int) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randn(ROWS_OF_X, WIDTH, generator=generator).requires_grad_(self.needs_grad)

    def loss(self, number: int, *args: Any) -> Tensor:
        return self.model(self.batch(number), *args).square().mean()


def plain(trainee: Trainee) -> None:
    loss = trainee.loss(0)
    loss.backward()
    trainee.note("plain", loss)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A scenario.

    Attributes:
        step: Run the forwards and backwards of a step.
        inner: The peculiarity inside a block.
        output: The block's return value.
        between: The model's use of that value.
        frozen: Blocks whose weights take no gradient.
        needs_grad: The model's input takes a gradient.
        units: How blocks are sharded on ranks: ``"blocks"``, ``"nested"``, ``"in checkpoints"``.
        alone: The row also runs in a single process.
        policies: The policies to run.
        raises: Ordinary training raises, and ebbtide must too.
        kept: Bytes of the largest storage that may be moved; 0: any.
    """

    step: Callable[[Trainee], None] = plain
    inner: Callable[[Tensor], Tensor] = torch.tanh
    output: Callable[[Tensor], Any] = lambda x: x
    between: Callable[[Any], Tensor] = lambda x: x
    frozen: int = 0
    needs_grad: bool = False
    units: str = "blocks"
    alone: bool = True
    policies: tuple[str, ...] = ("offload", "minimal", "auto", "enable_ckpt")
    raises: bool = False
    kept: int = 0


# Steps


def accumulated(trainee: Trainee) -> None:
    for i in range(3):
        trainee.loss(i).backward()
        trainee.note(str(i))


def evaluated_first(trainee: Trainee) -> None:
    trainee.model.eval()
    with torch.no_grad():
        trainee.note("evaluated", trainee.loss(1))
    trainee.model.train()
    plain(trainee)


def evaluated_with_gradients(trainee: Trainee) -> None:
    trainee.model.eval()
    plain(trainee)


def two_forwards(trainee: Trainee) -> None:
    (trainee.loss(0) + trainee.loss(1)).backward()
    trainee.note("both")


def dropped(trainee: Trainee) -> None:
    trainee.loss(0)
    plain(trainee)


def without_gradients_first(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.note("looked", trainee.loss(1))
    plain(trainee)


def one_not_run(trainee: Trainee) -> None:
    trainee.loss(0, (0, 1, 3, 4)).backward()
    trainee.note("without the third")
    plain(trainee)


def run_twice(trainee: Trainee) -> None:
    trainee.loss(0, (0, 1, 1, 2, 3, 4, 0)).backward()
    trainee.note("twice")


def failed_first(trainee: Trainee) -> None:
    third: Any = next(m for k, m in trainee.model.named_modules() if k.endswith("2.up"))
    hook = third.register_forward_pre_hook(_fail)
    with contextlib.suppress(ArithmeticError):
        trainee.loss(1)
    hook.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks stay open"
    for unit in trainee.model.modules():
        if hasattr(unit, "reshard"):  # torch leaves the weights of an interrupted forward unsharded
            unit.reshard()
    plain(trainee)


def two_backwards(trainee: Trainee) -> None:
    loss = trainee.loss(0)
    for last in (False, True):
        loss.backward(retain_graph=not last)
        trainee.note(f"last {last}")


def refused(trainee: Trainee) -> None:
    """Assert that the step raises in backward."""
    loss = trainee.loss(0)
    try:
        loss.backward()
    except RuntimeError as error:
        trainee.record["said"] = torch.tensor("modified by an inplace operation" in str(error))
        torch.zeros((), requires_grad=True).clone().backward()  # autograd drops its remaining nodes
    trainee.model.zero_grad()
    trainee.note("refused")


def _fail(*_: object) -> None:
    raise ArithmeticError("this forward fails")


# Peculiarities inside a block


def with_transpose(h: Tensor) -> Tensor:
    return torch.tanh(h @ h.t())[:, :WIDTH] * h


def with_first_rows(h: Tensor) -> Tensor:
    return torch.cat([h[:2] * h[:2].sigmoid(), h[2:]]) * h.sigmoid()


def with_expanded_mask(h: Tensor) -> Tensor:
    mask = (h[:1, :1] > 0).to(h.dtype).expand(64, *h.shape)
    return (h * mask).mean(0) + h * mask[0]


def changed_before_its_end(h: Tensor) -> Tensor:
    y = h.exp()  # saves its result
    y.add_(1)
    return y


def in_place(x: Tensor) -> Tensor:
    return x.mul_(0.5).add_(1)


ROWS: dict[str, Row] = {
    "plain step": Row(),
    "3x grad accumulation": Row(step=accumulated),
    "eval() forward then step": Row(step=evaluated_first),
    "eval() but grads needed": Row(step=evaluated_with_gradients),
    "two forwards, then one backward": Row(step=two_forwards),
    "forward whose graph is dropped, then a step": Row(step=dropped),
    "no_grad forward in train mode, then a step": Row(step=without_gradients_first),
    "one layer not executed": Row(step=one_not_run),
    "layers run twice in one forward": Row(step=run_twice),
    "exception mid-forward, then a step": Row(step=failed_first),
    "layer saves h and h.t()": Row(inner=with_transpose),
    "layer saves h and h[:2]": Row(inner=with_first_rows),
    "expanded (stride-0) mask": Row(inner=with_expanded_mask, kept=64 * ROWS_OF_X * WIDTH * 4 - 1),
    "first layers frozen, second step": Row(frozen=2),
    "layer returns a dict": Row(output=lambda x: {"hidden": x, "other": None}, between=lambda out: out["hidden"]),
    "in-place op on a layer output": Row(between=in_place),
    "saved tensor mutated before the end of the layer": Row(
        step=refused, inner=changed_before_its_end, raises=True, policies=("offload", "minimal", "auto")
    ),
    "backward twice with retain_graph": Row(step=two_backwards),
    "enable_ckpt=True": Row(policies=("enable_ckpt",), needs_grad=True),
    "enable_ckpt=True, no input requires grad": Row(policies=("enable_ckpt",)),
    "flat FSDP2": Row(alone=False),
    "nested fully_shard inside a layer": Row(units="nested", alone=False),
    "FSDP2 on CheckpointWrapper(layer) with inner wrap + enable_ckpt": Row(
        units="in checkpoints", alone=False, policies=("enable_ckpt",)
    ),
}
"""The rows that were executed on other systems, by the words in which they were reported."""


def run_row(name: str, *, sharded: bool) -> dict[str, Findings]:
    """Train without ebbtide and under each of the row's policies; return the findings of each."""
    row = ROWS[name]
    return compare(partial(_job, row, sharded), row.policies)


def _job(row: Row, sharded: bool, enable: Enable) -> Job:
    model = Toy(row)
    whole = randomise(model)
    for layer in model.layers[: row.frozen]:
        layer.requires_grad_(False)
    if sharded:
        _shard(model, row.units)
    enable(model, strategy="fsdp2" if sharded else "single")

    def step(number: int, record: Record) -> None:
        def note(what: str, loss: Tensor | None = None) -> None:
            note_step(record, f"{number} {what}", model, loss)

        row.step(Trainee(model=model, note=note, record=record, needs_grad=row.needs_grad))

    return Job(model=model, step=step, whole=whole)


def _shard(model: Toy, units: str) -> None:
    for i, layer in enumerate(model.layers):
        if units != "blocks":
            fully_shard(layer.up)
        if units == "in checkpoints":
            model.layers[i] = layer = checkpoint_wrapper(layer)
        fully_shard(layer)
    fully_shard(model)
