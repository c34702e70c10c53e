"""Storages that change under a graph: resized to zero and back, replaced, reused, detached by ``.data``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ebbtide.engine import Engine
from tests.helpers.engines import (
    POLICIES,
    TIERS,
    Leaves,
    assert_nothing_left,
    block,
    check_everywhere,
    compare,
    forward_pass,
    leaf,
    observe,
    open_engine,
)
from tests.helpers.oracle import same_bits

CASES: dict[str, Callable[[Leaves], list[Tensor]]] = {}
REFUSED: dict[str, Callable[[Leaves], list[Tensor]]] = {}


def case(program: Callable[[Leaves], list[Tensor]]) -> Callable[[Leaves], list[Tensor]]:
    CASES[program.__name__] = program
    return program


def refused(program: Callable[[Leaves], list[Tensor]]) -> Callable[[Leaves], list[Tensor]]:
    REFUSED[program.__name__] = program
    return program


@case
def data_assigned_before_it_is_saved(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    y.data = y.data * 2
    return [y.cos() * y]


@case
def data_assigned_after_its_saver_is_gone(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    y.sin()  # saves y as it was; dropped
    y.data = torch.full_like(y, 0.3)
    return [y.cos(), y * 2]


@case
def data_assigned_while_its_saver_lives(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    unneeded = y.sin()
    y.data = torch.full_like(y, 0.3)
    assert unneeded.requires_grad
    return [y.cos()]


@case
def data_assigned_between_a_value_and_what_is_made_of_it(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    y.sin()
    y.data = y.data * 3
    return [(y * 2).exp().tanh(), y.sigmoid() * y]


@case
def resized_and_filled(v: Leaves) -> list[Tensor]:
    y = torch.empty(0).resize_(6, 8).copy_(v["x"].detach())
    return [y * v["x"]]


@case
def set_to_another_storage_before_it_is_saved(v: Leaves) -> list[Tensor]:
    y = torch.zeros(3)
    y.set_(v["x"].detach().exp())
    return [y * v["x"]]


@case
def given_as_out(v: Leaves) -> list[Tensor]:
    y = torch.empty(6, 8)
    torch.exp(v["x"].detach(), out=y)
    return [y * v["x"]]


@case
def given_as_out_again_after_its_saver_is_gone(v: Leaves) -> list[Tensor]:
    y, total = torch.empty(6, 8), v["x"] * 1
    for number in range(3):
        torch.mul(v["x"].detach(), number, out=y)
        y * v["x"]  # saves y; dropped
    return [total * y]


@case
def detached_in_place_before_it_is_saved(v: Leaves) -> list[Tensor]:
    y = (v["x"] * 1).detach_()
    return [y * v["x"]]


@case
def memory_of_numpy(v: Leaves) -> list[Tensor]:
    return [torch.from_numpy(numpy.arange(48, dtype=numpy.float32).reshape(6, 8)) * v["x"]]


@case
def memory_at_an_odd_address(v: Leaves) -> list[Tensor]:
    raw = torch.frombuffer(bytearray(range(195)), dtype=torch.uint8)[3:]
    return [raw.view(6, 32).float()[:, :8] * v["x"], raw[:48].view(6, 8) * v["x"]]


@case
def copies_made_in_inference_mode(v: Leaves) -> list[Tensor]:
    with torch.inference_mode():
        constant = torch.arange(48.0).view(6, 8)
    return [v["x"].sin() + constant.clone() * v["x"]]


@refused
def resized_after_it_was_saved(v: Leaves) -> list[Tensor]:
    y = v["x"].detach() * 1
    z = y * v["x"]
    y.resize_(60, 8)
    return [z]


@refused
def set_after_it_was_saved(v: Leaves) -> list[Tensor]:
    y = v["x"].detach() * 1
    z = y * v["x"]
    y.set_(torch.zeros(6, 8))
    return [z]


@refused
def given_as_out_after_it_was_saved(v: Leaves) -> list[Tensor]:
    y = v["x"].detach() * 1
    z = y * v["x"]
    torch.exp(v["x"].detach(), out=y)
    return [z]


@refused
def zeroed_after_it_was_saved(v: Leaves) -> list[Tensor]:
    y = v["x"].exp()
    z = y.view(-1)[:16].sin()
    y.detach().zero_()
    return [z, y.sum()]


def the_leaves() -> dict[str, Tensor]:
    return {"x": leaf(6, 8), "w": leaf(8, 8, parameter=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_storage_may_change_where_plain_training_allows_it(name: str) -> None:
    check_everywhere(CASES[name], the_leaves())


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_storage_that_changed_is_refused_where_plain_training_refuses_it(name: str, policy: str, tier: str) -> None:
    leaves = the_leaves()
    expected = observe(REFUSED[name], leaves)
    assert expected.error == (RuntimeError, "backward"), "the case itself"
    for rate in (1.0, 1e12):  # the copy has not begun, or is done
        with open_engine(policy, tier, rate=rate, window_bytes=1 if rate > 1 else 1 << 20) as engine:
            assert compare(expected, observe(REFUSED[name], leaves, engine)) == []
            assert_nothing_left(engine)


@pytest.mark.xfail(
    strict=True,
    reason="`.data` counts no version: the second reader is given what the first one saved, plain autograd gives both "
    "what is there in backward",
)
def test_data_changed_between_two_savers() -> None:
    def program(v: Leaves) -> list[Tensor]:
        y = v["x"] * 1
        unneeded = y.sin()
        y.data.mul_(2)
        assert unneeded.requires_grad
        return [y.cos()]

    leaves = the_leaves()
    with open_engine("offload", rate=1e12, window_bytes=1) as engine:
        assert compare(observe(program, leaves), observe(program, leaves, engine)) == []


class Sharded:
    """Weights like FSDP2's: one flat storage, empty except between unshard and reshard; views of it are saved."""

    def __init__(self) -> None:
        self.shard = torch.randn(2 * 64)
        self.flat = self.shard.clone()
        views = self.flat.split(64)
        self.weights = [nn.Parameter(view.view(8, 8)) for view in views]
        self.reshard()

    def unshard(self) -> None:
        storage = self.flat.untyped_storage()
        storage.resize_(self.shard.untyped_storage().nbytes())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.flat):
            self.flat.copy_(self.shard)

    def reshard(self) -> None:
        self.flat.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def unsharded(self) -> Any:
        self.unshard()
        try:
            yield self.weights
        finally:
            self.reshard()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_whose_storage_is_resized_to_zero_between_forward_and_backward(policy: str, tier: str) -> None:
    sharded, x = Sharded(), leaf(6, 8)

    def step(engine: Engine | None) -> list[Tensor]:
        if engine is not None:
            engine.begin_pass()
        y = x
        for number in range(2):
            with sharded.unsharded() as weights:
                opened = contextlib.nullcontext()
                if engine is not None:
                    opened = block(engine, y, weights=weights, index=number)
                with opened:
                    y = (
                        torch.tanh(y @ weights[0]) * (y @ weights[1].t()[:, :].detach())
                        + y @ weights[1][:4].t() @ (weights[0][:4])
                    )
        if engine is not None:
            engine.end_pass()
        with sharded.unsharded() as weights:
            return list(torch.autograd.grad(y.square().sum(), [x, *weights]))

    expected = step(None)
    with open_engine(policy, tier, rate=1.0, window_bytes=1, weights_move=True) as engine:
        for _ in range(2):
            assert all(map(same_bits, expected, step(engine)))
            assert engine.tier.counters.out_bytes <= 40 * 6 * 8 * 4, "no weight was moved"  # type: ignore[attr-defined]
            assert_nothing_left(engine)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_activation_whose_storage_is_resized_to_zero_and_filled_again(policy: str, tier: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    values = torch.randn(512)

    def step(engine: Engine | None) -> list[Tensor]:
        gathered = values.clone()
        with contextlib.nullcontext() if engine is None else forward_pass(engine, x, weights=[w]):
            y = ((x @ gathered[:64].view(8, 8)) @ w) @ gathered.view(64, 8)[8:16]
        storage = gathered.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        storage.copy_(values.untyped_storage())
        return list(torch.autograd.grad(y.square().sum(), [x, w]))

    expected = step(None)
    for rate in (1.0, 1e12):
        with open_engine(policy, tier, rate=rate, window_bytes=1) as engine:  # every copy is done before the resize
            for _ in range(2):
                assert all(map(same_bits, expected, step(engine)))
                assert_nothing_left(engine)
