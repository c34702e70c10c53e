"""Checkpointed blocks that are called with tensors which consist of other tensors: their second forward gets the same.

The unit tests of their bytes are in ``tests/unit/engine/test_wrappers.py``, several ranks in ``tests/dist``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.testing._internal.two_tensor import TwoTensor

import ebbtide
from ebbtide.engine.storages import plain_tensors
from tests.helpers.engines import assert_nothing_left
from tests.helpers.oracle import same_bits

WIDTH, BLOCKS, STEPS = 16, 3, 4

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::FutureWarning")


class Block(nn.Module):
    """Saves several tensors that no rule covers: it is worth a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(6):
            y = torch.lgamma(y)
        for other in others:
            y = y * (other.dequantized() if isinstance(other, Quantized) else other)
        return x + self.down(y)


class Model(nn.Module):
    """Blocks between which the stream is a wrapper."""

    def __init__(self, wrap: Callable[[Tensor], Tensor], others: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.wrap, self.others = wrap, others

    def forward(self, x: Tensor) -> Tensor:
        x = self.wrap(self.stem(x))
        for layer in self.layers:
            x = layer(x, *self.others())
        return x


class Arrives(torch.autograd.Function):
    """The result of a collective that nobody has waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Quantized(Tensor):
    """Values as bytes with a scale, as quantized weights are."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["values_"], inner["scale"])

    def dequantized(self) -> Tensor:
        return self.values_ * self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(str(function))
        return Quantized(args[0].values_, args[0].scale)


def _distributed(model: Model, mesh: DeviceMesh, placement: Any, *, arriving: bool = False) -> None:
    for layer in model.layers:
        distribute_module(layer, mesh)
    if arriving:
        model.wrap = lambda x: DTensor.from_local(Arrives.apply(x), mesh, [placement])
    else:  # what an operator makes: inside it nothing needs a gradient
        model.wrap = lambda x: DTensor.from_local(x, mesh, [placement]) * 1.5


def sharded(model: Model, mesh: DeviceMesh) -> None:
    _distributed(model, mesh, Shard(0))


def split_in_the_middle(model: Model, mesh: DeviceMesh) -> None:
    _distributed(model, mesh, Shard(1))


def replicated(model: Model, mesh: DeviceMesh) -> None:
    _distributed(model, mesh, Replicate())


def partial(model: Model, mesh: DeviceMesh) -> None:
    _distributed(model, mesh, Partial())


def distributed_and_arriving(model: Model, mesh: DeviceMesh) -> None:
    _distributed(model, mesh, Shard(0), arriving=True)


def arriving(model: Model, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        layer.register_forward_hook(lambda module, x, y: Arrives.apply(y))
    model.wrap = Arrives.apply


def quantized(model: Model, mesh: DeviceMesh) -> None:
    values, scale = torch.randint(-9, 9, (WIDTH,), dtype=torch.int8), torch.full((1,), 0.1)
    model.others = lambda: [Quantized(values, scale)]


def two(model: Model, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            for name, weight in list(linear.named_parameters()):
                setattr(linear, name, nn.Parameter(TwoTensor(weight.detach(), weight.detach().clone() * 2)))
    stream = TwoTensor(torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH)).requires_grad_()
    model.wrap = lambda x: stream * 2


KINDS = {
    f.__name__: f
    for f in (
        sharded, split_in_the_middle, replicated, partial, distributed_and_arriving, arriving, quantized, two,
    )
}  # fmt: skip


def train(
    kind: str, mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]] = ((4, 6, WIDTH),) * STEPS, **given: Any
) -> tuple[list[Tensor], Any]:
    """Train; return the output and all gradients of each step, and the handle's figures."""
    torch.manual_seed(0)
    model = Model(lambda x: x, list)
    KINDS[kind](model, mesh)
    found: list[Tensor] = []
    handle = ebbtide.enable_activation_offloading(model, target="disk", min_bytes=0, **given) if given else None
    for step, shape in enumerate(shapes):
        torch.manual_seed(step)
        y = model(torch.randn(shape))
        y.backward(torch.ones_like(y))
        values = [y, *(p.grad for p in model.parameters() if p.grad is not None)]
        found += [part.clone() for part in plain_tensors([value.detach() for value in values])]
        del y, values
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
    if handle is None:
        return found, None
    stats = handle.stats()
    assert_nothing_left(handle._engine)
    handle.close()
    return found, stats


@pytest.mark.parametrize("policy", ["minimal", "auto", "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_called_with_wrappers_train_as_without(kind: str, policy: str, mesh: DeviceMesh) -> None:
    plain, _ = train(kind, mesh)
    got, stats = train(kind, mesh, policy=policy)
    assert len(plain) == len(got) > STEPS and all(map(same_bits, plain, got))
    if policy == "minimal":
        assert stats.checkpointed_blocks == BLOCKS


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_blocks_keep_no_more_than_what_is_in_their_inputs(kind: str, mesh: DeviceMesh) -> None:
    _, offloaded = train(kind, mesh, policy="offload")
    _, stats = train(kind, mesh, enable_ckpt=True)
    assert stats.checkpointed_blocks == BLOCKS
    assert stats.offloaded_bytes + stats.kept_bytes < 0.3 * offloaded.unique_bytes


@pytest.mark.parametrize("policy", ["minimal", "offload"])
def test_a_dtensor_without_elements(policy: str, mesh: DeviceMesh) -> None:
    """Such as the tokens of an expert that gets none."""
    shapes = [(rows, WIDTH) for rows in (4, 4, 0, 4)]
    plain, _ = train("sharded", mesh, shapes)
    got, _ = train("sharded", mesh, shapes, policy=policy)
    assert len(plain) == len(got) and all(map(same_bits, plain, got))
