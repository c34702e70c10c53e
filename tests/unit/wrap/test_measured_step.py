"""A measured step of a real model, on a clock that only the test advances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.engine import restore
from ebbtide.engine.spans import Span, SpanTimer
from ebbtide.engine.timed import TimedStep, TimedUnit
from ebbtide.engine.timing import StepTimer
from ebbtide.store.disk import DiskSlot
from tests.unit.engine.test_timing import Clock


class Spend(torch.autograd.Function):
    """Takes time in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.now += ctx.seconds
        return gradients[0], None, None


class Layer(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.up, self.down, self.clock = nn.Linear(16, 64), nn.Linear(64, 16), clock

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(Spend.apply(x, self.clock, 2.0))))


class Net(nn.Module):
    """Blocks behind an embedding whose backward takes ten seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.embed = clock, nn.Linear(4, 16)
        self.layers = nn.ModuleList(Layer(clock) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = Spend.apply(self.embed(x), self.clock, 10.0)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def measured(clock: Clock) -> tuple[TimedStep, Span]:
    """Return a measured step, and the span of the next one."""
    steps, spans = list[TimedStep](), list[Span]()
    net = Net(clock)
    with ebbtide.enable_activation_offloading(net, min_bytes=0) as handle:
        timer = StepTimer(clock, lambda step: bool(steps.append(step)), waited=dict[str, float], memory=False)
        timer.spans = SpanTimer(clock, lambda span: bool(spans.append(span)) if span else False, memory=False)
        timer.marks = True
        handle._engine.timer = timer
        for want in (lambda: None, timer.want, timer.spans.want):  # warms up, is measured, is timed as a whole
            want()
            net(torch.randn(8, 4)).backward()
            clock.now += 100.0  # the optimizer
        clock.ahead = True
        net(torch.randn(8, 4))
    return steps[0], spans[0]


def measure_next(handle: ebbtide.Handle, clock: Clock, steps: list[TimedStep]) -> None:
    """Let a handle measure its next step into a list."""
    timer = StepTimer(clock, lambda step: bool(steps.append(step)), waited=dict[str, float], memory=False)
    timer.marks = True
    handle._engine.timer = timer
    timer.want()


def recomputed(step: TimedStep) -> list[TimedUnit]:
    found = [unit for block in step.blocks for unit in block.units if unit.action is Action.RECOMPUTE]
    assert found
    return found


def test_the_backward_of_what_is_before_the_blocks_is_not_the_first_blocks() -> None:
    step, span = measured(Clock())
    assert [block.backward_seconds for block in step.blocks] == [2.0] * 3
    assert step.epilogue_seconds == 110.0
    assert [block.backward_seconds for block in span.blocks] == [2.0] * 3
    assert span.seconds == 6.0


def test_recomputes_are_priced_as_they_are_executed_without_the_copies_of_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, evaluate, take = Clock(), restore.recompute, DiskSlot.take

    def recompute(*given: Any) -> Tensor:
        clock.now += 3.0
        return evaluate(*given)

    def copy_in(slot: DiskSlot) -> Tensor:
        clock.now += 50.0
        return take(slot)

    monkeypatch.setattr(restore, "recompute", recompute)
    monkeypatch.setattr(DiskSlot, "take", copy_in)
    step, _ = measured(clock)
    assert {unit.recompute_seconds for unit in recomputed(step)} == {3.0}


def test_a_block_can_be_checkpointed_that_was_first_watched_in_the_measured_step() -> None:
    clock, steps = Clock(), list[TimedStep]()
    net = Net(clock)
    with ebbtide.enable_activation_offloading(net, min_bytes=0, policy="minimal") as handle:
        measure_next(handle, clock, steps)
        net(torch.randn(8, 4)).backward()
        net(torch.randn(8, 4))
    assert [block.checkpointable for block in steps[0].blocks] == [True] * 3


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("as an interrupt, or memory that is not enough")


def test_a_step_whose_backward_raised_is_measured_again() -> None:
    clock, steps = Clock(), list[TimedStep]()
    net = Net(clock)
    with ebbtide.enable_activation_offloading(net, min_bytes=0) as handle:
        measure_next(handle, clock, steps)
        forget = net.layers[1].register_forward_pre_hook(lambda module, args: Fails.apply(*args))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="as an interrupt"):
                net(torch.randn(8, 4)).backward()
        forget.remove()
        for _ in range(2):
            net(torch.randn(8, 4)).backward()
    assert [[block.backward_seconds for block in step.blocks] for step in steps] == [[2.0] * 3]


def test_a_step_whose_forward_raised_is_measured_again_though_the_error_is_held() -> None:
    clock, steps, held = Clock(), list[TimedStep](), list[BaseException]()

    def fail(*given: Any) -> None:
        raise RuntimeError("as memory that is not enough")

    net = Net(clock)
    with ebbtide.enable_activation_offloading(net, min_bytes=0) as handle:
        measure_next(handle, clock, steps)
        forget = net.layers[1].register_forward_pre_hook(fail)
        try:
            net(torch.randn(8, 4))
        except RuntimeError as error:
            held.append(error)
        forget.remove()
        for _ in range(2):
            net(torch.randn(8, 4)).backward()
    assert held and [[block.backward_seconds for block in step.blocks] for step in steps] == [[2.0] * 3]
