"""Saved tensors made of other tensors: distributed, jagged, and third-party classes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.engine import Engine
from ebbtide.engine.inputs import BlockInputs
from tests.helpers.engines import POLICIES, TIERS, assert_nothing_left, forward_pass, in_thread, open_engine
from tests.helpers.oracle import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::FutureWarning")

Data = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def plain_values(tensor: Tensor | None) -> list[Tensor]:
    """Return a tensor's contents as plain tensors."""
    assert tensor is not None
    if isinstance(tensor, TwoTensor):
        return plain_values(tensor.a) + plain_values(tensor.b)
    if isinstance(tensor, DTensor):
        return [tensor.full_tensor()]
    return [tensor.values() if tensor.is_nested else tensor]


def distributed(mesh: Any) -> Data:
    x = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]).requires_grad_()
    return x, nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Replicate()]))


def partial(mesh: Any) -> Data:
    x = DTensor.from_local(torch.randn(6, 8), mesh, [Partial()]).requires_grad_()
    return x, nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(1)]))


def two(mesh: Any) -> Data:
    x = TwoTensor(torch.randn(6, 8), torch.randn(6, 8)).requires_grad_()
    return x, nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))


def jagged(mesh: Any) -> Data:
    rows = [torch.randn(2, 8), torch.randn(4, 8)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True), nn.Parameter(torch.randn(8, 8))


def wrapper_of_wrappers(mesh: Any) -> Data:
    x = TwoTensor(TwoTensor(torch.randn(6, 8), torch.randn(6, 8)), TwoTensor(torch.randn(6, 8), torch.randn(6, 8)))
    w = TwoTensor(TwoTensor(torch.eye(8), torch.ones(8, 8)), TwoTensor(torch.eye(8), torch.eye(8)))
    return x.requires_grad_(), nn.Parameter(w)


KINDS: dict[str, Callable[[Any], Data]] = {
    f.__name__: f for f in (distributed, partial, two, jagged, wrapper_of_wrappers)
}


def program(x: Tensor, w: Tensor) -> Tensor:
    y = torch.sin(x * 2) @ w
    return (y * torch.sigmoid(y)).exp()


def grads(data: Data, engine: Engine | None = None, *, thread: bool = False) -> list[Tensor]:
    x, w = data
    x.grad = w.grad = None
    if engine is None:
        y = program(x, w)
    else:
        with forward_pass(engine, x, weights=[w]):
            y = program(x, w)
    feed = torch.ones_like(y)
    in_thread(lambda: y.backward(feed)) if thread else y.backward(feed)
    return [value.clone() for t in (x, w) for value in plain_values(t.grad)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_comes_back_as_it_was(kind: str, tier: str, policy: str, mesh: Any) -> None:
    data = KINDS[kind](mesh)
    expected = grads(data)
    with open_engine(policy, tier, verify=True, window_bytes=1) as engine:  # none is held back for backward
        for step in range(2):
            got = grads(data, engine, thread=bool(step))
            assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True)), step
            assert_nothing_left(engine)
        assert (engine.stats().offloaded_bytes > 0) == (policy in ("offload", "minimal", "auto"))


@pytest.mark.parametrize("kind", KINDS)
def test_its_inner_tensors_leave_the_device_and_weights_stay(kind: str, mesh: Any) -> None:
    x, w = KINDS[kind](mesh)
    with open_engine("offload", window_bytes=1) as engine:
        with forward_pass(engine, x, weights=[w]):
            y = (x * 2).sin()
            z = y @ w
        held = engine.stats()
        assert held.kept_bytes == 0
        inner = sum(v.untyped_storage().nbytes() for v in plain_values(x.detach()))
        assert held.offloaded_bytes == 2 * inner  # x * 2 and its sine; w is a weight, and x times a number saves none
        del y, z
        assert_nothing_left(engine)


@pytest.mark.parametrize("policy", ["offload", "keep"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "partial"])
def test_a_change_in_place_raises_what_plain_training_raises(kind: str, policy: str, mesh: Any) -> None:
    x, _ = KINDS[kind](mesh)
    with open_engine(policy, window_bytes=1) as engine:
        with forward_pass(engine, x):
            y = x * 2
            z = y.sin()
        y.add_(1)
        with pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation"):
            z.backward(torch.ones_like(z))
        z.detach_()
        del y, z


def test_the_bytes_of_an_input_are_those_inside_it(mesh: Any) -> None:
    x, gathered = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    given = {
        "distributed": DTensor.from_local(x, mesh, [Shard(0)]),
        "made of it": DTensor.from_local(x.detach(), mesh, [Shard(0)]).requires_grad_() * 2,
        "arriving": AsyncCollectiveTensor(gathered).requires_grad_(),
        "distributed, arriving": DTensor.from_local(AsyncCollectiveTensor(gathered), mesh, [Shard(0)]).requires_grad_(),
        "two": TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_() * 2,
    }
    sizes = [BlockInputs([value]).nbytes for value in given.values()]
    assert dict(zip(given, sizes, strict=True)) == dict.fromkeys(given, 48) | {"two": 24}
    assert BlockInputs([value.detach() for value in given.values()]).nbytes == 0
    assert BlockInputs([*given.values()]).nbytes == 3 * 48 + 24, "of one storage once"


def test_a_change_between_two_saves_is_two_values(mesh: Any) -> None:
    for kind in ("distributed", "two"):
        x, _ = KINDS[kind](mesh)

        def step(x: Tensor = x) -> list[Tensor]:
            y = (x * 2).detach()
            with torch.no_grad():
                first = y.clone()
            z = x * y  # saves y
            del z
            y.mul_(first)
            return [x * y]

        expected = step()[0]
        expected.backward(torch.ones_like(expected))
        wanted = [v.clone() for v in plain_values(x.grad)]
        x.grad = None
        with open_engine("offload", window_bytes=1) as engine:
            with forward_pass(engine, x):
                (got,) = step()
            got.backward(torch.ones_like(got))
        assert all(same_bits(a, b) for a, b in zip(wanted, plain_values(x.grad), strict=True))


def test_a_result_of_a_collective_is_taken_as_it_arrived(mesh: Any) -> None:
    with open_engine("offload") as engine:
        x = torch.randn(4, 3, requires_grad=True)
        with forward_pass(engine, x):
            gathered = all_gather_tensor(x.detach().clone(), 0, mesh)
            assert isinstance(gathered, AsyncCollectiveTensor)
            y = x * gathered
        assert engine.stats().offloaded_bytes > 0
        y.sum().backward()
        assert x.grad is not None and same_bits(x.grad, gathered.wait())


def test_a_result_of_a_collective_leaves_the_device(mesh: Any) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, gathered: Tensor) -> Tensor:
            ctx.save_for_backward(gathered)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] * ctx.saved_tensors[0], None

    x, inner = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    expected, memory = inner.clone(), weakref.ref(inner.untyped_storage())
    with open_engine("offload", window_bytes=1) as engine:
        with forward_pass(engine, x):
            y = Reads.apply(x, AsyncCollectiveTensor(inner))
            del inner
            z = x.sin().sin()  # whose copy makes room in the window
        assert memory() is None
        (y.sum() + 0 * z.sum()).backward()
        assert x.grad is not None and same_bits(x.grad, expected + 0)


class Sealed(torch.Tensor):
    """A subclass that shares real memory and has no inner tensors."""


def test_another_subclass_stays_as_it_is() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with open_engine("offload") as engine:
        with forward_pass(engine, x):
            y = (x * 1).as_subclass(Sealed)
            z = y.sin() * y
        z.sum().backward()
        plain = torch.autograd.grad(((x * 1).sin() * (x * 1)).sum(), x)[0]
        assert x.grad is not None and same_bits(x.grad, plain)
