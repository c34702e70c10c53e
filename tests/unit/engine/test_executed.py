"""The prices of recomputes: timed in forward, and when they are executed."""

from __future__ import annotations

import pytest
import torch

from ebbtide.base.actions import Site
from ebbtide.engine.executed import RecomputeTimer

from .test_timing import CPU, Clock

NORM, ACT, GATE = ((Site("Layer", name, "Node", 0), 8) for name in ("norm", "act", "gate"))


class Scene:
    """Recomputes on a clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.timer = RecomputeTimer(self.clock)

    def spend(self, seconds: float) -> None:
        self.clock.now += seconds

    def operand(self) -> torch.Tensor:
        self.spend(100.0)  # the copy
        return torch.empty(0)

    def execute(self, *made: tuple[Site, int], seconds: float, operands: int = 0) -> None:
        self.timer.begin(CPU)
        for _ in range(operands):
            self.timer.operand(self.operand, CPU)
        self.spend(seconds)
        for kind in made:
            self.timer.made(kind)
        self.timer.end(CPU)


def scene_with(**seconds: float) -> Scene:
    scene = Scene()
    for kind in (NORM, ACT, GATE):
        scene.timer.time(kind, lambda kind=kind: scene.spend(seconds[kind[0].module]), CPU)
    return scene


def test_what_is_not_executed_costs_what_it_took_in_forward() -> None:
    assert scene_with(norm=1.0, act=2.0, gate=0.0).timer.prices() == {NORM: 1.0, ACT: 2.0, GATE: 0.0}


def test_the_median_of_what_was_executed_counts_without_the_copies_of_operands() -> None:
    scene = scene_with(norm=1.0, act=2.0, gate=0.0)
    for seconds in (3.0, 9.0, 4.0):
        scene.execute(NORM, seconds=seconds, operands=2)
    scene.execute(ACT, seconds=1.5)  # a disturbed price in forward is not lowered
    assert scene.timer.prices() == {NORM: 4.0, ACT: 2.0, GATE: 0.0}


def test_one_that_recomputes_its_operands_is_divided_among_them() -> None:
    scene = scene_with(norm=1.0, act=2.0, gate=0.0)
    scene.execute(NORM, ACT, seconds=6.0)
    assert scene.timer.prices() == {NORM: 2.0, ACT: 4.0, GATE: 0.0}
    free = scene_with(norm=0.0, act=0.0, gate=0.0)
    free.execute(NORM, ACT, seconds=6.0)
    assert free.timer.prices() == {NORM: 3.0, ACT: 3.0, GATE: 0.0}


def test_what_may_not_be_recomputed_has_no_price() -> None:
    scene = Scene()
    scene.timer.time(NORM, None, CPU)
    assert scene.timer.knows(NORM) and not scene.timer.knows(ACT)
    scene.execute(NORM, ACT, seconds=6.0)
    assert scene.timer.prices() == {}


def test_one_that_fails_counts_for_nothing() -> None:
    scene = scene_with(norm=1.0, act=2.0, gate=0.0)
    scene.timer.begin(CPU)
    scene.spend(50.0)
    scene.execute(NORM, seconds=3.0)
    assert scene.timer.prices()[NORM] == pytest.approx(3.0)
