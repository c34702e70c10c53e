"""TorchScript inside blocks and around the model: parts without module hooks, opaque code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from tests.helpers.twice import Stack, check, sgd, step_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated"),
]

squares = step_of(lambda model: model(torch.randn(8, 16)).square().mean())


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))


def _gate(x: Tensor, bias: Tensor) -> Tensor:
    return x * torch.sigmoid(x + bias) * torch.tanh(x)


class Scripted(nn.Module):
    """A block with a scripted part and, last, a scripted function: what it saves ends a second forward."""

    def __init__(self, gate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.part = nn.Linear(16, 16), torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.GELU()))
        self.bias, self.gate = nn.Parameter(torch.zeros(16)), gate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(self.part(F.gelu(self.up(x))), self.bias)


@pytest.mark.parametrize("kind", ["parts", "blocks"])
def test_scripted_parts_and_blocks_train_as_alone(kind: str) -> None:
    gate: Any = torch.jit.script(_gate)

    def make() -> nn.Module:
        blocks = [torch.jit.script(Scriptable()) if kind == "blocks" else Scripted(gate) for _ in range(4)]
        return sgd(Stack(*blocks))

    for _ in range(2):  # the interpreter compiles what it has run twice, and computes other bits then
        squares(model := make(), 0), squares(model, 1), squares(model, 2)
    check(make, squares)


@pytest.mark.parametrize("policy", ["minimal", "offload"])
def test_a_model_is_traced_as_it_is_alone(policy: str) -> None:
    model = Stack(*[Scriptable() for _ in range(3)])
    x = torch.randn(8, 16)

    def traced() -> list[str]:
        return [node.kind() for node in torch.jit.trace(model, x, check_trace=False).inlined_graph.nodes()]

    alone = traced()
    with ebbtide.enable_activation_offloading(model, policy=policy, target="disk", min_bytes=0) as handle:
        assert traced() == alone
        assert handle.stats().packs == 0
        model(x).sum().backward()
        assert handle.stats().packs > 0
