"""Models under the hooks: blocks in any order, checkpointing inside and outside, nested contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.base.errors import ConflictError
from tests.helpers.engines import POLICIES, hooks_are_closed
from tests.helpers.models import build
from tests.helpers.oracle import Oracle, differences, same_bits

POLICY = pytest.mark.parametrize("policy", POLICIES)


class Layer(nn.Module):
    """A gated feed-forward layer; may checkpoint its own inside, change its output in place, or return a dictionary."""

    def __init__(self, width: int = 8, *, inside: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.inside = inside

    def inner(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return self.down(F.silu(y) * torch.sigmoid(y))

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.inside)


class Model(nn.Module):
    """Layers, called as ``route`` says."""

    def __init__(self, route: Callable[[Any, Tensor], Tensor] | None = None, count: int = 3, **given: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**given) for _ in range(count))
        self.route = route or in_line

    def forward(self, x: Tensor) -> Any:
        return self.route(self.layers, x)


def in_line(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def skipped(layers: Any, x: Tensor) -> Tensor:
    return layers[2](layers[0](x))


def twice(layers: Any, x: Tensor) -> Tensor:
    return layers[0](layers[1](layers[0](x)))


def unused(layers: Any, x: Tensor) -> Tensor:
    layers[1](x)  # computed and dropped
    return layers[2](layers[0](x))


def in_place(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
        x += 1
    return x


def inside_out(layers: Any, x: Tensor) -> Tensor:
    return layers[1](layers[0](x)) + layers[2](x.detach())


def without_gradients_between(layers: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = layers[0](x)
    return layers[1](x) * target


ROUTES = [in_line, skipped, twice, unused, in_place, inside_out, without_gradients_between]


def grads(model: nn.Module, x: Tensor, run: Callable[[], Any] | None = None) -> list[Tensor | None]:
    torch.manual_seed(5)
    model.zero_grad()
    x.grad = None
    y = model(x) if run is None else run()
    leaves = y.values() if isinstance(y, dict) else [y]
    sum(v.square().sum() for v in leaves).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all((a is None) == (b is None) and (a is None or same_bits(a, b)) for a, b in zip(one, other, strict=True))


def check(model: nn.Module, policy: Any, *, steps: int = 3, **given: Any) -> ebbtide.Handle:
    x = torch.randn(4, 8, requires_grad=True)
    expected = grads(model, x)
    with ebbtide.enable_activation_offloading(
        model, policy=policy, min_bytes=0, window=1, verify=True, **given
    ) as handle:
        for _ in range(steps):
            assert same(expected, grads(model, x))
            assert handle.stats().live_tickets == 0 and hooks_are_closed()
    assert same(expected, grads(model, x)), "after close"
    return handle


@POLICY
@pytest.mark.parametrize("route", ROUTES)
def test_blocks_are_called_as_the_model_likes(route: Any, policy: str) -> None:
    check(Model(route), policy)


@POLICY
def test_frozen_first_layers(policy: str) -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    model.layers[1].up.requires_grad_(False)
    x = torch.randn(4, 8)

    def steps() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), [p for p in model.parameters() if p.requires_grad]))

    expected = steps()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, verify=True) as handle:
        for _ in range(2):
            assert same(expected, steps()) and handle.stats().live_tickets == 0


@POLICY
def test_outputs_in_dictionaries_and_eval_with_gradients(policy: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            seen = [x]
            for layer in self.layers:
                seen.append(layer(seen[-1]))
            return {"last": seen[-1], "first": seen[1]}

    check(Named().eval(), policy)


@POLICY
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_a_block(policy: str, reentrant: bool) -> None:
    check(Model(inside=reentrant), policy)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_block(reentrant: bool) -> None:
    def around(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    model, x = Model(around), torch.randn(4, 8, requires_grad=True)
    expected = grads(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        assert same(expected, grads(model, x)) and handle.stats().live_tickets == 0
        assert handle.stats().offloaded_bytes > 0 and hooks_are_closed()
    assert same(expected, grads(model, x))


def test_other_hooks_outside_are_refused() -> None:
    model, x = Model(), torch.randn(4, 8, requires_grad=True)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        with Oracle(), pytest.raises(ConflictError, match="other saved-tensor hooks"):
            model(x)
        assert hooks_are_closed()


def test_other_hooks_around_a_part_of_a_block_are_their_own() -> None:
    model, x = Model(), torch.randn(4, 8, requires_grad=True)
    around: Any = contextlib.nullcontext()

    def partly_under_others(y: Tensor, inner: Any = model.layers[0].inner) -> Tensor:
        with around:
            z = inner(y)
        return z * y

    model.layers[0].inner = partly_under_others
    expected = grads(model, x)
    around = Oracle()
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        assert same(expected, grads(model, x)) and handle.stats().live_tickets == 0
    assert around.packed > 0


@POLICY
def test_two_models_and_one_in_the_other(policy: str) -> None:
    one, two = Model(), Model(twice)
    both = nn.Sequential(one, two)
    x = torch.randn(4, 8, requires_grad=True)
    expected = grads(both, x)
    with (
        ebbtide.enable_activation_offloading(one, policy=policy, min_bytes=0) as first,
        ebbtide.enable_activation_offloading(two, policy="minimal", min_bytes=0) as second,
    ):
        for _ in range(2):
            assert same(expected, grads(both, x))
            assert first.stats().live_tickets == second.stats().live_tickets == 0
            assert first.stats().packs > 0 and second.stats().packs > 0
        with pytest.raises(ConflictError, match="already offloaded"):
            ebbtide.enable_activation_offloading(one)
    assert same(expected, grads(both, x))


@pytest.mark.parametrize("outer", ["offload", "minimal"])
def test_a_context_around_one_part(outer: str) -> None:
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)

    def nested() -> Tensor:
        with ebbtide.offload_saved_tensors(policy=outer, min_bytes=0, verify=True):
            y = layer(x)
            with ebbtide.offload_saved_tensors(min_bytes=0, verify=True):
                y = layer(y)
            return layer(y)

    expected = grads(layer, x, lambda: layer(layer(layer(x))))
    for _ in range(2):
        assert same(expected, grads(layer, x, nested)) and hooks_are_closed()


def test_switching_off_and_on_while_graphs_live() -> None:
    model, x = Model(), torch.randn(4, 8, requires_grad=True)
    expected = grads(model, x)
    handle = ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0)
    alive = model(x)
    handle.disable()
    assert same(expected, grads(model, x))
    handle.enable()
    assert same(expected, grads(model, x))
    handle.close()
    assert same(expected, grads(model, x, lambda: alive))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("policy", ["offload", "inputs", "auto"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_of_transformers_composes(policy: str, dropout: float) -> None:
    """Its checkpoint is inside our hooks: never a cancelled checkpoint."""
    plain = build("llama", attention_dropout=dropout)
    expected = plain.step()
    tiny = build("llama", attention_dropout=dropout)
    tiny.model.gradient_checkpointing_enable({"use_reentrant": False})
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0) as handle:
        assert differences(expected, tiny.step()) == []
        stats = handle.stats()
        assert stats.packs > 0 and stats.live_tickets == 0
        alone = build("llama", attention_dropout=dropout)
        with ebbtide.enable_activation_offloading(alone.model, policy="keep", min_bytes=0) as counted:
            alone.step()
            assert stats.unique_bytes < counted.stats().unique_bytes / 4, "the checkpoint still drops what it should"


@pytest.mark.parametrize(
    ("name", "config"), [("Cache", "config.get_text_config()"), ("EncoderDecoderCache", "get_decoder().config")]
)
def test_a_cache_is_not_run_twice(name: str, config: str, caplog: pytest.LogCaptureFixture) -> None:
    """A second forward of a block would find its cache changed: such blocks are treated tensor by tensor."""

    class Caching(Layer):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            if cache is not None:
                cache.seen.append(x.detach())
                x = x + sum(cache.seen)
            return x + F.prelu(self.inner(x).cumsum(0), self.norm.weight[:1]).cumsum(1).cumprod(0)

    class Cache:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Caching() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, cache=kind())
            return x * 0.01

    kind = type(name, (Cache,), {})
    check(Cached(), "minimal")
    assert caplog.text.count(f"Caching blocks are not checkpointed: they take a key-value cache ({name})") == 1
    assert f"hint: model.{config}.use_cache = False (prefix tuning always passes a cache)" in caplog.text
