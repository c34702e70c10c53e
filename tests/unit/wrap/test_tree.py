"""The tree of a model: walked only when something was exchanged, in whatever way."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.wrap.tree import Tree


class Scaled(nn.Module):
    """A block that multiplies with a buffer, which autograd saves."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.register_buffer("scale", torch.full((64, width), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x) * self.scale).tanh()


class Adapted(nn.Module):
    """A low-rank adapter around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        self.base.weight.data += self.up.weight.data @ self.down.weight.data
        return self.base.requires_grad_(True)


def make(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled() for _ in range(depth)))


def _tie(model: Any) -> None:
    model[2].linear.weight = model[0].linear.weight


def _behind(model: Any) -> None:
    registry = model[1].linear._parameters
    registry["weight"] = nn.Parameter(registry["weight"].detach() * 2)


def _registry(model: Any) -> None:
    model[1].linear._parameters = {"weight": nn.Parameter(torch.ones(16, 16)), "bias": None}


def _subclass(model: Any) -> None:
    model[1].__class__ = type("Sharded", (Scaled,), {})


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter is exchanged": lambda m: setattr(m[1].linear, "weight", nn.Parameter(torch.ones(16, 16))),
    "a parameter is exchanged behind the module's back": _behind,
    "all of a module's parameters are exchanged": _registry,
    "a parameter is added": lambda m: m[1].linear.register_parameter("bias", nn.Parameter(torch.ones(16))),
    "a buffer is added to the last layer": lambda m: m[2].linear.register_buffer("step", torch.ones(())),
    "a parameter is tied": _tie,
    "a buffer is exchanged": lambda m: setattr(m[1], "scale", torch.full((64, 16), 3.0)),
    "a layer is exchanged": lambda m: setattr(m[1], "linear", nn.Linear(16, 16, bias=False)),
    "an adapter is added": lambda m: setattr(m[1], "linear", Adapted(m[1].linear)),
    "an adapter is merged": lambda m: setattr(m[2], "linear", m[2].linear.merged()),
    "a class is changed, as fully_shard does": _subclass,
}


def changed(name: str) -> tuple[Any, Callable[[Any], object]]:
    """Return a model and a change to make between two steps."""
    model: Any = make()
    if name == "an adapter is merged":
        model[2].linear = Adapted(model[2].linear)
    return model, CHANGES[name]


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_exchanged_is_seen(name: str) -> None:
    model, change = changed(name)
    tree = Tree(model)
    assert tree.look() == tree.look() == 1
    change(model)
    assert tree.look() == tree.look() == 2
    found = tree.weights()
    assert len(found) == len(expected := [*model.parameters(), *model.buffers()])
    assert all(one is other for one, other in zip(found, expected, strict=True))


def test_a_weight_that_takes_the_place_of_another_in_memory_is_returned() -> None:
    model: Any = make()
    tree = Tree(model)
    for _ in range(50):
        tree.look()
        before = id(model[0].linear.weight)
        del model[0].linear.weight
        gc.collect()
        model[0].linear.weight = nn.Parameter(torch.ones(16, 16))
        tree.look()
        assert tree.weights()[0] is model[0].linear.weight
        if id(model[0].linear.weight) == before:
            return
    pytest.skip("no address was used again")


def test_contents_of_weights_can_be_swapped() -> None:
    """``Module.to`` swaps DTensors: torch refuses to swap a tensor that has weak references."""
    model: Any = make()
    handle = ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0)
    step(model)
    for weight in model.parameters():
        weight.grad = None
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))
    doubled = step(model)
    handle.close()
    assert len(doubled) == 4 and all(map(torch.equal, doubled, step(model)))


def test_what_is_exchanged_is_not_kept() -> None:
    model: Any = make()
    tree = Tree(model)
    tree.look()
    gone = torch.UntypedStorage._weak_ref(model[1].linear.weight.untyped_storage())
    model[1].linear = nn.Identity()
    gc.collect()
    assert torch.UntypedStorage._expired(gone)
    torch.UntypedStorage._free_weak_ref(gone)


@contextmanager
def counting(calls: list[str]) -> Iterator[None]:
    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_look_takes_as_many_calls_however_large_the_model_is() -> None:
    counts = list[int]()
    for depth in (2, 400):
        model, calls = make(depth), list[str]()
        tree = Tree(model)
        tree.look()
        with counting(calls):
            assert tree.look() == 1
        counts.append(len(calls))
        assert len(tree.weights()) == 2 * depth
    assert counts[0] == counts[1] < 20, counts


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(torch.linspace(-1, 1, 64 * 16).view(64, 16)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("policy", ["offload", "minimal"])
@pytest.mark.parametrize("name", [*CHANGES, "weights are frozen", "weights are trained again"])
def test_training_goes_on_with_what_the_model_is_now(name: str, policy: str) -> None:
    def trained(*, offloaded: bool) -> list[torch.Tensor]:
        if name in CHANGES:
            model, change = changed(name)
        else:
            model, frozen = make(), name == "weights are frozen"
            model[1].requires_grad_(frozen)
            change = lambda m: m[1].requires_grad_(not frozen)  # noqa: E731
        found, sizes = list[torch.Tensor](), list[int]()
        handle = ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) if offloaded else None
        for number in range(4):
            if number == 2:
                change(model)
            torch.manual_seed(number)
            found += step(model)
            if handle is not None:
                sizes.append(handle.stats().unique_bytes)
        if handle is not None:
            handle.close()
            if name == "a buffer is exchanged":
                assert sizes[1] == sizes[3], sizes  # a buffer is no activation
        return found

    expected, got = trained(offloaded=False), trained(offloaded=True)
    assert len(expected) == len(got) and all(map(torch.equal, expected, got))
