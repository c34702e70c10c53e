"""Parts of one storage that change without a version of their own: of RNN cells, or written by a custom function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.profiling.auto import AutoPlan


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


class UncheckedAssign(torch.autograd.Function):
    """Write a part of a tensor without a new version, and return the tensor: as torchdiffeq's."""

    @staticmethod
    def forward(ctx: Any, scratch: torch.Tensor, value: torch.Tensor, index: int) -> torch.Tensor:
        ctx.index = index
        scratch.data[..., index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0][..., ctx.index], None


class Stages(nn.Module):
    """A step of a Runge-Kutta method whose stages are parts of one tensor; the step's size has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.size = nn.Linear(32, 32), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stages, y = torch.empty(*x.shape, 4), x
        for i in range(4):
            stages = UncheckedAssign.apply(stages, self.inner(y).tanh(), i)
            y = x + (stages[..., : i + 1] * (self.size * torch.ones(i + 1))).sum(-1)
        return y + (stages * (self.size * torch.ones(4))).sum(-1)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Recurrent(lambda: nn.GRU(32, 32, batch_first=True)),
    "lstm, float64": lambda: Recurrent(lambda: nn.LSTM(32, 32, batch_first=True)),
    "unsafe_chunk": Gated,
    "written by a custom function": Stages,
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


def test_parts_of_storages_are_planned_and_kept_like_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x, file = nn.Sequential(*(Gated() for _ in range(3))), torch.randn(256, 8, 32), tmp_path / "plan.json"

    def step(handle: ebbtide.Handle) -> int:
        model(x).square().mean().backward()
        return handle.stats().unique_bytes

    with ebbtide.enable_activation_offloading(model, policy=ebbtide.Auto(max_slowdown=0), min_bytes=0) as handle:
        saved = {step(handle) for _ in range(5)}
        assert isinstance(handle.plan, AutoPlan) and handle.plan.profile is not None
        assert saved == {handle.plan.profile.saved_bytes}
        handle.plan.save(file)
    with ebbtide.enable_activation_offloading(model, policy=file, min_bytes=0) as handle:
        step(handle)
        step(handle)
        assert handle._engine.timer is not None and handle._engine.timer.unhooked == {"0", "1", "2"}
    assert "make it again" not in caplog.text


def test_parts_of_storages_count_among_the_bytes_that_live_graphs_keep() -> None:
    model, x = nn.Sequential(*(Gated() for _ in range(3))), torch.randn(256, 8, 32)
    settings: dict[str, Any] = {"policy": "offload", "tensor_filter": lambda tensor: False}
    with ebbtide.enable_activation_offloading(model, min_bytes=0, **settings) as handle:
        y = model(x)
        stats = handle.stats()
        assert handle._engine.kept.total == stats.kept_bytes == stats.unique_bytes > 0
        y.square().mean().backward()
        del y
        assert handle._engine.kept.total == 0
