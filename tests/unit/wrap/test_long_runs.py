"""What a run leaves behind: after its first steps, a step leaves no object that the one before did not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.nodevice import NoDevice
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from tests.helpers.handles import enable_over
from tests.unit.wrap.test_replay import batch, stack

WARM, MORE = 20, 24

Step = Callable[[nn.Module, int], None]


def train(model: nn.Module, number: int) -> None:
    model(batch(5, number)).square().mean().backward()
    model.zero_grad()


def train_on_lengths(model: nn.Module, number: int) -> None:
    model(batch(3 + number % 4, number)).square().mean().backward()
    model.zero_grad()


def evaluate(model: nn.Module, number: int) -> None:
    train(model, number)
    with torch.no_grad():
        model(batch(5, number))
    model(batch(5, number))  # a graph that is dropped


def read_twice(model: nn.Module, number: int) -> None:
    loss = model(batch(5, number)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    model.zero_grad()


def fail(model: nn.Module, number: int) -> None:
    def stop(gradient: Tensor) -> Tensor:
        raise RuntimeError("stopped")

    x = batch(5, number).requires_grad_()
    x.register_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        model(x).square().mean().backward()
    model.zero_grad()


@pytest.mark.parametrize("policy", ["keep", "offload", "inputs", "minimal", "auto"])
@pytest.mark.parametrize(
    ("target", "step"),
    [("disk", train), *(("host", step) for step in (train, train_on_lengths, evaluate, read_twice, fail))],
)
def test_nothing_is_left_by_a_step(tmp_path: Path, target: str, policy: str, step: Step) -> None:
    place = DiskTier(str(tmp_path)) if target == "disk" else HostTier(NoDevice())
    model = stack()
    counts: list[int] = []
    with enable_over(place, model, policy=policy, min_bytes=0):
        for number in range(WARM + MORE):
            step(model, number)
            if number >= WARM:
                gc.collect()
                counts.append(len(gc.get_objects()))
    place.close()
    assert min(counts[-6:]) - min(counts[:6]) < MORE / 4, counts
