"""What decides a device's bits besides values: the alignment of restored tensors, kernels that vary between runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.errors import RestoreError
from ebbtide.engine import Expr, NodeView
from ebbtide.engine.fingerprint import Compared
from ebbtide.engine.rules import rule_table
from ebbtide.engine.trust import Trust
from tests.gpu.test_first_light import _batch, _model, _same, _step
from tests.simdev.device import configured, counters

DEVICE = torch.device("privateuseone", 0)  # its name even where it cannot be built
WIDTH, BLOCKS, STEPS = 64, 3, 3


class Noted(torch.autograd.Function):
    """Saves a tensor and records its alignment in forward and in backward."""

    seen: list[tuple[int, int]] = []

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.save_for_backward(part)
        ctx.before = part.data_ptr() % 512
        return part.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (part,) = ctx.saved_tensors
        Noted.seen.append((ctx.before, part.data_ptr() % 512))
        return grad * part


class Parts(nn.Module):
    """Saves parts of a long storage, each at another offset."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.linear(x).view(-1)
        starts = [4 * k for k in range(1, 40, 3)]  # of 16 bytes each, so that no offset is a multiple of 512
        return x + sum(Noted.apply(flat[at : at + WIDTH]).sum() for at in starts) / len(starts)


def test_parts_of_a_storage_come_back_as_they_were_aligned() -> None:
    model = nn.Sequential(*(Parts() for _ in range(BLOCKS))).to(DEVICE)
    with ebbtide.enable_activation_offloading(
        model, policy="offload", min_bytes=0, window="1B", blocks=[str(n) for n in range(BLOCKS)]
    ) as handle:
        Noted.seen.clear()
        for _ in range(STEPS):
            model(torch.ones(256, WIDTH, device=DEVICE)).square().mean().backward()
        stats = handle.stats()
    assert {before for before, _ in Noted.seen} > {16, 64} and all(a == b for a, b in Noted.seen)
    whole = 256 * WIDTH * 4
    assert 0 < stats.total_copy_out_bytes < STEPS * BLOCKS * 3 * whole  # the parts were copied, not the storages


class Doubled(torch.autograd.Function):
    """A function whose rule gives different bits every second time, as a sum of atomic additions may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 2


class Unsteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + Doubled.apply(self.linear(x)).sin()


@pytest.mark.parametrize("limit", [0, 1 << 28])  # whether the host waits for answers
def test_a_recipe_that_does_not_repeat_itself_is_not_trusted(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("ebbtide.engine.trust._MOST_UNREAD_BYTES", limit)
    runs = itertools.count()

    def rule(n: NodeView) -> Expr | None:
        x = n.operand("", 0)
        return None if x is None else Expr(lambda v: v * 2 + (next(runs) % 2) * 1e-3, (x,), key=("doubled",))

    monkeypatch.setattr("ebbtide.api._custom_rules", {"DoubledBackward": rule})
    model, x = nn.Sequential(Unsteady()).to(DEVICE), torch.ones(256, WIDTH, device=DEVICE)
    plain = _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks=["0"]) as handle:
        for _ in range(STEPS):
            with configured(kernel_delay_us=300):
                assert _same(plain, _step(model, x))
        assert handle.stats().demoted_sites
    assert next(runs) > 1


STOPS = ("host_waits", "copies_blocking", "copies_pageable", "kernels_waited_for")


def stops() -> int:
    """Return how often the host has waited for the device."""
    return sum(counters().get(name, 0) for name in STOPS)


def test_comparing_recipes_stops_the_host_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model(width=64, depth=4), _batch(width=64, tokens=256)
    plain, found = _step(model, x), list[int]()
    for name in ("holds", "fingerprint", "require", "end_backward"):
        monkeypatch.setattr(Trust, name, counted(getattr(Trust, name), found))
    for limit in (0, 1 << 30):  # in the first step the host waits, and the device learns the shapes of kernels
        monkeypatch.setattr("ebbtide.engine.trust._MOST_UNREAD_BYTES", limit)
        found.clear()
        with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window="1MiB") as handle:
            for _ in range(3):
                with configured(kernel_delay_us=200):
                    assert _same(plain, _step(model, x))
            assert handle.stats().recomputed_bytes > 0 and handle.stats().demoted_sites == ()
        assert (sum(found) == 0) is (limit > 0) and len(found) > 16, found


@pytest.mark.parametrize("end", ["closure", "close", "closed before"])
def test_a_difference_in_the_last_backward_is_an_error_before_its_gradients_are_used(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    factors, x = [2.0], torch.ones(256, WIDTH, device=DEVICE)

    def rule(n: NodeView) -> Expr | None:
        operand = n.operand("", 0)
        return None if operand is None else Expr(lambda v: v * factors[-1], (operand,), key=("doubled",))

    monkeypatch.setattr("ebbtide.api._custom_rules", {"DoubledBackward": rule})
    monkeypatch.setattr(Trust, "begin_block", lambda *given, **named: Compared.FULL)
    model = nn.Sequential(Unsteady()).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks=["0"])
    with handle, configured(kernel_delay_us=300):
        for _ in range(STEPS):
            optimizer.step(lambda: _step(model, x)[0])
        assert handle.stats().recomputed_bytes > 0 and not handle.stats().demoted_sites
        factors.append(3.0)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RestoreError, match="differs from what was saved"):
            if end == "closure":
                optimizer.step(lambda: _step(model, x)[0])
            else:
                loss = model(x).square().mean()
                calls: list[Callable[[], None]] = [loss.backward, handle.close]
                for call in calls if end == "close" else reversed(calls):
                    call()
    assert _same(before, [*model.parameters()])


def counted(call: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    """Return a function that records the host's waits for the device in each call."""

    def run(*given: Any, **named: Any) -> Any:
        before = stops()
        try:
            return call(*given, **named)
        finally:
            found.append(stops() - before)

    return run


def test_a_recipe_is_not_used_before_the_device_has_confirmed_it() -> None:
    model, x = _model(width=64, depth=4), _batch(width=64, tokens=256)
    plain, recomputed = _step(model, x), list[int]()
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window="1MiB") as handle:
        for _ in range(2):
            with configured(kernel_delay_us=500):
                assert _same(plain, _step(model, x))
            recomputed.append(handle.stats().recomputed_bytes)
            handle._engine.trust.await_comparisons()
        assert handle._engine.trust._unanswered == {} and all(handle._engine.trust._verdicts.values())
    assert recomputed[0] < recomputed[1], recomputed


def test_where_much_is_saved_the_host_waits_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.engine.trust._MOST_UNREAD_BYTES", 0)
    model, x, recomputed = _model(width=64, depth=4), _batch(width=64, tokens=256), list[int]()
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window="1MiB") as handle:
        for _ in range(2):
            _step(model, x)
            recomputed.append(handle.stats().recomputed_bytes)
    assert recomputed[0] == recomputed[1] > 0


def test_a_sum_along_a_dimension_is_recomputed_on_the_host_only() -> None:
    """Its order of additions on a device changes between runs; for integers the order does not matter."""
    rule: Any = rule_table()["CumsumBackward0"]
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    sources: Any = None  # of operands, which nobody looks for
    assert rule.expression("CumsumBackward0", x.cumsum(0).grad_fn, 0, sources) is None
    with pytest.raises(AttributeError):
        rule.expression("CumsumBackward0", x.cpu().cumsum(0).grad_fn, 0, sources)
