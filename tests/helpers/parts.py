"""Small models of parts, and their steps with and without a handle.

A *part* is a block made of a function and of the modules that the function uses; a ``Model`` is three of them, called
as its ``route`` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from tests.helpers.engines import assert_nothing_left, hooks_are_closed
from tests.helpers.oracle import same_bits

WIDTH = 8
Forward = Callable[[Any, Any], Any]


class Part(nn.Module):
    """A block: a function of itself and its input, and the modules that the function uses."""

    def __init__(self, forward: Forward, **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


class Model(nn.Module):
    """Three blocks, called as ``route`` says."""

    def __init__(self, make: Callable[[], nn.Module], route: Forward | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.route = route or in_line

    def forward(self, x: Tensor) -> Tensor:
        return self.route(self.layers, x)


def in_line(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Every block once, in order."""
    for layer in layers:
        x = layer(x)
    return x


def linear(width: int = WIDTH) -> nn.Linear:
    """A square projection."""
    return nn.Linear(width, width)


def gated(s: Any, x: Tensor) -> Tensor:
    """A residual layer of two projections, ``a`` and ``b``."""
    return x + s.b(F.silu(s.a(x)))


def gated_model(width: int = WIDTH) -> Model:
    """Three gated blocks."""
    return Model(lambda: Part(gated, a=linear(width), b=linear(width)))


def training_step(model: nn.Module, x: Tensor, *, seed: int = 5) -> dict[str, Tensor | None]:
    """Run one step of a model; return everything it computed: output, gradients (sparse ones made dense), buffers."""
    torch.manual_seed(seed)
    model.zero_grad()
    fed = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
    y = model(fed)
    y.square().sum().backward()
    found = {"output": y, "input": fed.grad} | {k: p.grad for k, p in model.named_parameters()}
    found |= {f"buffer {k}": b for k, b in model.named_buffers()}
    return {k: None if t is None else (t.to_dense() if t.is_sparse else t.detach().clone()) for k, t in found.items()}


def differing(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> list[str]:
    """Name the tensors that are not bitwise equal."""
    pairs = {k: (one.get(k), other.get(k)) for k in [*one, *(other.keys() - one.keys())]}
    return [k for k, (a, b) in pairs.items() if (a is None) != (b is None) or (a is not None and not same_bits(a, b))]


def check_model(model: nn.Module, x: Tensor, policy: str, *, steps: int = 3) -> ebbtide.Handle:
    """Assert that steps under a handle are bitwise those of ordinary training, buffers included, and leave nothing.

    Every restored byte is verified, nothing is too small to move, and one byte fills the window.
    """
    state = copy.deepcopy(model.state_dict())
    expected = [training_step(model, x) for _ in range(steps)]
    model.load_state_dict(state)
    with ebbtide.enable_activation_offloading(
        model, policy=policy, min_bytes=0, window=1, verify=True, blocks="layers.*"
    ) as handle:
        for step in range(steps):
            assert differing(expected[step], training_step(model, x)) == [], step
            assert hooks_are_closed()
            assert_nothing_left(handle._engine)
    return handle
