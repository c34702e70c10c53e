"""Parts of one storage with their own version counters: ``unsafe_chunk`` makes them, RNN cells change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide


class Recurrent(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)[0]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.inner(x).unsafe_chunk(2, -1)
        return x + a.sigmoid_() * b.sigmoid_()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Recurrent(lambda: nn.GRU(32, 32, batch_first=True)),
    "lstm, float64": lambda: Recurrent(lambda: nn.LSTM(32, 32, batch_first=True)),
    "unsafe_chunk": Gated,
}


@pytest.mark.parametrize("policy", ["keep", "offload", "inputs", "minimal", "auto"])
@pytest.mark.parametrize("name", MAKERS)
def test_siblings_that_change_in_place_keep_their_gradients(name: str, policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(MAKERS[name]() for _ in range(3)))
    x = torch.randn(256, 8, 32)
    if "float64" in name:
        model, x = model.double(), x.double()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, verify=policy == "offload"):
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
