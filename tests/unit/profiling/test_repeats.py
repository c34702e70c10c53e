"""Equal blocks are simulated once: the profile is that of all blocks, or the complete step is simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.config import Options
from ebbtide.engine.rules import rule_table
from ebbtide.planner.machines import MACHINES
from ebbtide.planner.profile import Profile
from ebbtide.profiling.faketensors import FakeMachine
from ebbtide.profiling.repeats import NotAlike
from ebbtide.profiling.simulated import Job, _Task, simulate_model

WIDTH = 64


class Layer(nn.Module):
    """A block; its number is an attribute, as in models of transformers."""

    def __init__(self, number: int, inner: int = 128) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x) * scale))) * 0.5


class Odd(Layer):
    """Behaves differently by its number, which no other attribute shows."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        made = super().forward(x, scale)
        return made.exp() if self.number % 2 else made


class Net(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 1000)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = self.embed(x), torch.full((WIDTH,), 2.0)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x).square().mean()


def alike(count: int) -> Net:
    return Net([Layer(i) for i in range(count)])


def mixed(count: int) -> Net:
    """Return a model in which every fourth block is wider, after two that are narrower."""
    return Net([Layer(i, 32 if i < 2 else 256 if i % 4 == 0 else 128) for i in range(count)])


def task(net: nn.Module, job: Job) -> _Task:
    batch = torch.zeros(512, WIDTH, device="meta")
    return _Task(net, batch, MACHINES["h200"], job, None, None, Options(min_bytes=0), rule_table())


def assert_same(one: Profile, other: Profile) -> None:
    """Compare bytes exactly, and times up to the order of their sum."""
    shown = [
        [(b.name, b.kind, [replace(u, recompute_seconds=None) for u in b.units]) for b in found.blocks]
        for found in (one, other)
    ]
    assert shown[0] == shown[1]
    for name in ("forward_base_bytes", "backward_base_bytes", "checkpoint_base_bytes"):
        assert [getattr(b, name) for b in one.blocks] == [getattr(b, name) for b in other.blocks]
    assert one.head_base_bytes == other.head_base_bytes

    def times(profile: Profile) -> list[float]:
        blocks = [seconds for b in profile.blocks for seconds in (b.forward_seconds, b.backward_seconds)]
        units = [-1.0 if u.recompute_seconds is None else u.recompute_seconds for b in profile.blocks for u in b.units]
        return [profile.prologue_seconds, profile.head_seconds, profile.epilogue_seconds, *blocks, *units]

    assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(times(one), times(other), strict=True))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the simulated operators."""
    count, price = [0], FakeMachine._price

    def counted(self: FakeMachine, *given: Any) -> float:
        count[0] += 1
        return price(self, *given)

    monkeypatch.setattr(FakeMachine, "_price", counted)
    return count


@pytest.mark.parametrize(
    ("make", "shards"),
    [
        (alike, 1),
        pytest.param(alike, 4, marks=pytest.mark.slow),
        (mixed, 1),
        pytest.param(mixed, 4, marks=pytest.mark.slow),
    ],
)
def test_the_profile_is_that_of_all_blocks(make: Callable[[int], Net], shards: int, operators: list[int]) -> None:
    net, job = make(60 if make is mixed else 16), Job(shards=shards)
    short = task(net, job).profile(every_block=False)
    few, operators[0] = operators[0], 0
    assert_same(short, task(net, job).profile(every_block=True))
    assert few < 0.75 * operators[0]


def test_more_alike_blocks_take_no_more_operators(operators: list[int]) -> None:
    counts: list[int] = []
    for layers in (16, 48):
        operators[0] = 0
        simulate_model(
            alike(layers), torch.zeros(512, WIDTH, device="meta"), MACHINES["h200"], options=Options(min_bytes=0)
        )
        counts.append(operators[0])
    assert counts[1] < 1.5 * counts[0]  # thrice as many blocks


@pytest.mark.parametrize("count", [15, 16])  # the first and the last that may be left out are both odd, or not
def test_blocks_that_only_look_alike_are_simulated_one_by_one(count: int) -> None:
    net, batch = Net([Odd(i) for i in range(count)]), torch.zeros(512, WIDTH, device="meta")
    rules = {"TanhBackward0": rule_table()["TanhBackward0"]}  # a recompute in the first block alone would tell
    job = replace(task(net, Job()), rules=rules)
    with pytest.raises(NotAlike, match="look alike and take other time or memory"):
        job.profile(every_block=False)
    found = simulate_model(net, batch, MACHINES["h200"], options=Options(min_bytes=0), rules=rules)
    assert_same(found, job.profile(every_block=True))


def test_a_block_whose_parts_are_listened_to_is_not_left_out() -> None:
    net = alike(12)
    for layer in net.layers:
        layer.up.register_forward_hook(lambda *given: net.seen.append(given[-1]))  # type: ignore[union-attr]
    with pytest.raises(NotAlike, match="somebody listens"):
        task(net, Job()).profile(every_block=False)


def test_a_block_that_leaves_something_behind_is_not_left_out() -> None:
    class Leaves(Layer):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            made = super().forward(x, scale)
            self.left = made.detach() + 1
            return made

    with pytest.raises(NotAlike, match="leaves behind more than its gradients"):
        task(Net([Leaves(i) for i in range(12)]), Job()).profile(every_block=False)


def test_few_blocks_all_run(operators: list[int]) -> None:
    net = alike(6)
    short = task(net, Job()).profile(every_block=False)
    few, operators[0] = operators[0], 0
    task(net, Job()).profile(every_block=True)
    assert few == operators[0]
    assert len(short.blocks) == 6
