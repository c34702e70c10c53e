"""Dispatch modes that a program opens: what ebbtide computes is not for them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ebbtide
from ebbtide.engine.modes import outside_modes
from tests.helpers.engines import REMAKE
from tests.helpers.parts import WIDTH, differing, gated_model
from tests.helpers.twice import Block, Stack, check, sgd, step_of

STEPS = 6


class Coarse(TorchDispatchMode):
    """Emulates a lower precision: every new float is rounded to bfloat16, and every integer to eight bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable
        coarser = _COARSER.get(result.dtype) if made else None
        return result if coarser is None else result.to(coarser).to(result.dtype)


_COARSER = {torch.float32: torch.bfloat16, torch.int64: torch.int8}


def _steps(model: nn.Module, *, coarse: tuple[int, ...]) -> Iterator[dict[str, Tensor | None]]:
    """Run steps, some of whose forwards are coarse; return what each computed."""
    torch.manual_seed(3)
    for step in range(STEPS):
        model.zero_grad()
        x = torch.randn(4 + step % 2, WIDTH, requires_grad=True)
        with Coarse() if step in coarse else contextlib.nullcontext():
            y = model(x)
        y.square().sum().backward()
        found = {"output": y, "input": x.grad} | {k: p.grad for k, p in model.named_parameters()}
        yield {k: None if t is None else t.detach().clone() for k, t in found.items()}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("coarse", [tuple(range(STEPS)), (3, 5), (0, 1)], ids=["always", "later", "at first"])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_a_mode_that_changes_results_in_forward_only(policy: str, coarse: tuple[int, ...], verify: bool) -> None:
    model = gated_model()
    expected = list(_steps(model, coarse=coarse))
    plan: Any = REMAKE if policy == "recompute" else policy
    with ebbtide.enable_activation_offloading(model, policy=plan, min_bytes=0, window=1, verify=verify) as handle:
        for step, found in enumerate(_steps(model, coarse=coarse)):
            assert differing(expected[step], found) == [], step
        assert handle.stats().memory_saved_bytes > 0


@pytest.mark.parametrize("policy", ["minimal", "auto", "offload"])
def test_a_count_of_operators_in_forward_is_the_models(policy: str) -> None:
    model = gated_model()

    def counted() -> list[int]:
        found: list[int] = []
        for step in range(STEPS):
            x = torch.randn(4 + step % 2, WIDTH, requires_grad=True)
            with FlopCounterMode(display=False) as counter:
                y = model(x)
            y.square().sum().backward()
            found.append(counter.get_total_flops())
        return found

    expected = counted()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1):
        assert counted() == expected


@pytest.mark.parametrize("kind", [Coarse, functools.partial(FlopCounterMode, display=False)], ids=["coarse", "flops"])
@pytest.mark.parametrize("to_the_end", [False, True])
def test_no_block_is_checkpointed_in_a_mode(kind: Any, to_the_end: bool) -> None:
    """A second forward outside of it would compute otherwise; in it, it would be counted."""
    counts: list[int] = []

    @step_of
    def forward_only(model: Any) -> Tensor:
        with kind() as mode:
            loss = model(torch.randn(8, 16)).square().mean()
        counts.append(0 if kind is Coarse else mode.get_total_flops())
        return loss

    def step(model: Any, number: int) -> Tensor:
        if not to_the_end:
            return forward_only(model, number)
        with kind() as mode:
            loss = plain(model, number)
        counts.append(0 if kind is Coarse else mode.get_total_flops())
        return loss

    plain = step_of(lambda model: model(torch.randn(8, 16)).square().mean())
    check(lambda: sgd(Stack(Block(), Block(), Block())), step, steps=STEPS, policies=["minimal"])
    assert counts[:STEPS] == counts[STEPS:]


def test_modes_are_open_again_after_an_error() -> None:
    def work() -> None:
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
        raise ValueError

    with Coarse() as outer, Coarse() as inner:
        with pytest.raises(ValueError):
            outside_modes(work)
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [outer, inner]
