"""Inputs and outputs of blocks, and nested blocks, under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import ebbtide
from tests.helpers.engines import POLICIES
from tests.helpers.parts import WIDTH, Model, Part, check_model, differing, gated, linear, training_step

Made = tuple[nn.Module, Tensor]
CASES: dict[str, Callable[[], Made]] = {}


def case(make: Callable[[], Made]) -> Callable[[], Made]:
    CASES[make.__name__] = make
    return make


def two_dims() -> Tensor:
    return torch.randn(4, WIDTH)


# Inputs and outputs


@case
def a_block_that_returns_its_input() -> Made:
    return Model(lambda: Part(lambda s, x: x, a=linear())), two_dims()


@case
def a_block_that_returns_a_view_of_its_input() -> Made:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(2, 2, WIDTH), s.a(x).sin()

    def route(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            seen, y = layer(x.sin())
            x = seen.view(4, WIDTH) * 2 + y
        return x

    return Model(lambda: Part(forward, a=linear()), route), two_dims()


@case
def outputs_changed_in_place_by_the_caller() -> Made:
    def route(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).view(2, 2, WIDTH).view(4, WIDTH)
            x.mul_(2)
            x[0].add_(1)
        return x

    return Model(lambda: Part(gated, a=linear(), b=linear()), route), two_dims()


@case
def generators() -> Made:
    def forward(s: Any, x: Tensor) -> Iterator[Tensor]:
        yield s.a(x).sin()
        yield F.silu(s.a(x)) * x

    def route(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            for piece in layer(x):
                x = x + piece
        return x

    return Model(lambda: Part(forward, a=linear()), route), two_dims()


@dataclass
class Carried:
    """A container that is not a pytree."""

    state: Tensor
    more: list[Tensor]


@case
def values_in_dataclasses() -> Made:
    def forward(s: Any, given: Carried) -> Carried:
        return Carried(s.a(given.state), [given.more[0].sin() * given.state])

    def route(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            made = layer(Carried(x, [x * 1]))
            x = made.state + made.more[0]
        return x

    return Model(lambda: Part(forward, a=linear()), route), two_dims()


@case
def values_in_nested_containers() -> Made:
    def forward(s: Any, given: dict[str, Any]) -> dict[str, Any]:
        x, (y, none) = given["x"], given["rest"]
        return {"x": s.a(x) * y, "rest": (y.tanh(), none), "seen": [x, {"y": y}]}

    def route(layers: nn.ModuleList, x: Tensor) -> Tensor:
        carried: dict[str, Any] = {"x": x, "rest": (x.sin(), None)}
        for layer in layers:
            carried = layer(carried)
        return carried["x"] + carried["seen"][1]["y"]

    return Model(lambda: Part(forward, a=linear()), route), two_dims()


# Blocks in blocks


@case
def a_block_that_calls_itself() -> Made:
    def forward(s: Any, x: Any) -> Tensor:
        x, depth = x if isinstance(x, tuple) else (x, 2)
        y = gated(s, x)
        return s((y, depth - 1)) if depth else y

    return Model(lambda: Part(forward, a=linear(), b=linear())), two_dims()


@case
def a_block_that_calls_the_next() -> Made:
    model = Model(lambda: Part(gated, a=linear(), b=linear()), lambda layers, x: layers[0](x))
    for one, following in zip(model.layers, [*model.layers[1:], None], strict=True):

        def forward(s: Any, x: Tensor, following: Any = (following,)) -> Tensor:  # a tuple: not a part of the module
            inner = x * 2 if following[0] is None else following[0](x + s.a(x).sin())
            return inner * s.b(x).sigmoid()

        one.run = forward
    return model, two_dims()


@case
def a_gradient_taken_inside() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(s.a(x).tanh().sum(), x, create_graph=True)
        return x - 0.1 * slope

    return Model(lambda: Part(forward, a=linear())), two_dims()


@case
def vmap_inside() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        return x + torch.vmap(lambda row: s.a(row).sin() * row)(x)

    return Model(lambda: Part(forward, a=linear())), two_dims()


def _checkpointed(reentrant: bool) -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        return checkpoint_sequential(s.inner, 2, x, use_reentrant=reentrant)

    def make() -> nn.Module:
        return Part(forward, inner=nn.Sequential(linear(), nn.SiLU(), linear(), nn.GELU()))

    return Model(make), two_dims()


@case
def checkpoint_sequential_inside() -> Made:
    return _checkpointed(False)


@case
def reentrant_checkpoint_sequential_inside() -> Made:
    return _checkpointed(True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_blocks_take_and_give_what_they_like(name: str, policy: str) -> None:
    check_model(*CASES[name](), policy)


def test_blocks_that_save_do_so_under_the_hooks() -> None:
    """The cases above are not idle: those that pack nothing are listed here."""
    idle = []
    for name, make in CASES.items():
        if not check_model(*make(), "keep", steps=1).stats().packs:
            idle.append(name)
    assert idle == ["a_block_that_returns_its_input", "generators"]


def test_a_block_with_a_random_generator_of_its_own_is_not_run_twice() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.prelu(s.a(x).cumsum(0), s.a.bias[:1]).cumsum(1).cumprod(0).cumsum(1).logcumsumexp(0)
        return x + y * torch.rand(y.shape, generator=s.generator)

    def model() -> Model:
        torch.manual_seed(0)
        made = Model(lambda: Part(forward, a=linear()))
        for layer in made.layers:
            layer.generator = torch.Generator().manual_seed(3)
        return made

    x, plain, other = two_dims() * 0.1, model(), model()
    with ebbtide.enable_activation_offloading(other, policy="minimal", min_bytes=0, blocks="layers.*"):
        for _ in range(3):
            assert differing(training_step(plain, x), training_step(other, x)) == []
