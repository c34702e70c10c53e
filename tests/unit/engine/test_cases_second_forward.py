"""Blocks that depend on state at the time of their run: layers with swapped weights, and checkpointed blocks.

A rule that reads a layer later, and a second forward in backward, find the later state: attributes that were restored,
weights that were updated, generators that advanced, contexts that were left. Without a guard each case is silently
wrong, or fails where ordinary training works.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import ebbtide
from ebbtide.base.errors import EbbtideError
from tests.helpers.engines import POLICIES, drain
from tests.helpers.parts import WIDTH, Forward, Model, differing, linear, training_step

# Attributes of layers, read at another time than when the layer ran


class Layer(nn.Module):
    """A block around one layer, which is computed differently from some step on."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.make = nn.LayerNorm(WIDTH), linear(), linear()

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return x + F.silu(y) * y.sigmoid()


class OtherWeights(Layer):
    """A norm whose weights are rebuilt in each forward, from a difference that begins as zero."""

    def inner(self, x: Tensor) -> Tensor:
        more = self.make(x.mean(0)) * float(self.late)
        return functional_call(self.norm, {"weight": self.norm.weight + more, "bias": self.norm.bias + more}, (x,))


class OtherBias(Layer):
    def inner(self, x: Tensor) -> Tensor:
        more = self.make(x.mean(0)).cumprod(0).cummax(0).values * float(self.late)
        return functional_call(self.up, {"weight": self.up.weight, "bias": self.up.bias + more}, (x,))


class OtherFrozenBias(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up.bias.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        return functional_call(self.up, {"weight": self.up.weight, "bias": self.up.bias + float(self.late)}, (x,))


class OtherConstant(Layer):
    def inner(self, x: Tensor) -> Tensor:
        before, self.norm.eps = self.norm.eps, 1.0 if self.late else self.norm.eps
        y = self.norm(x)
        self.norm.eps = before
        return y


class LeadsElsewhere(nn.LayerNorm):
    late = False

    def forward(self, x: Tensor) -> Tensor:
        return self.elsewhere(x) if self.late else super().forward(x)

    def elsewhere(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1.0)


class OtherMethod(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LeadsElsewhere(WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        self.norm.late = self.late
        return self.norm(x)


class HandsThrough(nn.LayerNorm):
    away = True

    def forward(self, x: Tensor) -> Tensor:
        return x if self.away else super().forward(x)


class OtherNode(Layer):
    """An unused norm after a function that does the same, with weights that are equal at first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = HandsThrough(WIDTH)
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def inner(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.fill_(float(self.late))
        return self.norm(F.layer_norm(x, (WIDTH,), self.weight, self.bias))


@pytest.mark.parametrize(
    "layer", [OtherWeights, OtherBias, OtherFrozenBias, OtherConstant, OtherMethod, OtherNode], ids=lambda k: k.__name__
)
def test_a_layer_computes_with_what_it_had_when_it_ran(layer: type[Layer]) -> None:
    model, x = Model(layer), torch.randn(4, WIDTH)

    def steps() -> Iterator[dict[str, Tensor | None]]:
        for late in (False, True, True):
            for block in model.layers:
                block.late = late
            yield training_step(model, x)

    expected = list(steps())
    for policy in POLICIES:
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*"):
            for step, (one, other) in enumerate(zip(expected, steps(), strict=True)):
                assert differing(one, other) == [], (policy, step)


# Checkpointed blocks


def must_keep(h: Tensor) -> Tensor:
    """A chain that no rule covers: a block of it is checkpointed."""
    for _ in range(6):
        h = torch.special.erfcx(torch.logcumsumexp(h, -1).asinh().atan())
    return h


class Block(nn.Module):
    """A block that is checkpointed under ``minimal``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = linear(), 1.0
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return x + must_keep(self.inner(self.a(x), given))

    def inner(self, h: Tensor, given: Any) -> Tensor:
        return h


Taken = dict[str, Tensor | None]
Step = Callable[[nn.Module, Tensor], Taken]
SECOND: list[Any] = []


def case(*, inner: Forward | None = None, route: Forward | None = None) -> Callable[[Step], Step]:
    """Add a case: a block around ``inner``, called by ``route``, and its step."""

    def add(step: Step) -> Step:
        kind = type("Block", (Block,), {"inner": inner} if inner else {})
        SECOND.append(pytest.param(kind, route, step, id=step.__name__))
        return step

    return add


def forward_and_backward(model: nn.Module, x: Tensor, between: Callable[[], object] = lambda: None) -> Taken:
    model.zero_grad()
    fed = x.clone().requires_grad_()
    y = model(fed)
    between()
    y.float().square().sum().backward()
    return {"output": y.detach(), "input": fed.grad} | {k: p.grad for k, p in model.named_parameters()}


def _appends(self: Any, h: Tensor, given: list[Tensor]) -> Tensor:
    given.append(h.square().mean())
    return h


def _adds(self: Any, h: Tensor, given: dict[str, Any]) -> Tensor:
    given["loss"] = given.get("loss", 0.0) + h.square().mean()
    return h


def _pops(self: Any, h: Tensor, given: list[float]) -> Tensor:
    return h * given.pop()


def _with_list(layers: Any, x: Tensor) -> Tensor:
    losses: list[Tensor] = []
    for layer in layers:
        x = layer(x, losses)
    return x + sum(losses)


def _with_dictionary(layers: Any, x: Tensor) -> Tensor:
    losses: dict[str, Any] = {}
    for layer in layers:
        x = layer(x, losses)
    return x + losses["loss"]


def _with_stack(layers: Any, x: Tensor) -> Tensor:
    scales = [1.0, 2.0, 3.0]
    for layer in layers:
        x = layer(x, scales)
    return x


@case(inner=_appends, route=_with_list)
def a_list_that_blocks_append_to(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


@case(inner=_adds, route=_with_dictionary)
def a_dictionary_that_blocks_add_to(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


@case(inner=_pops, route=_with_stack)
def a_list_that_blocks_take_from(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


@case(inner=lambda s, h, given: h * random.uniform(0.5, 1.5))
def a_number_that_python_drew(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


@case(inner=lambda s, h, given: h * float(np.random.rand()))
def a_number_that_numpy_drew(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


@case(inner=lambda s, h, given: h * (2.0 if s.training else 1.0))
def evaluation_before_the_backward(model: nn.Module, x: Tensor) -> Taken:
    taken = forward_and_backward(model, x, model.eval)
    model.train()
    return taken


@case(inner=lambda s, h, given: h * s.scale)
def an_attribute_of_the_next_forward(model: Any, x: Tensor) -> Taken:
    def scale(to: float) -> None:
        for layer in model.layers:
            layer.scale = to

    scale(1.0)
    return forward_and_backward(model, x, lambda: scale(3.0))


def _change(tensors: Callable[[Any], Tensor], model: Any, by: float) -> None:
    with torch.no_grad():
        for layer in model.layers:
            tensors(layer).add_(by)


@case(inner=lambda s, h, given: h + s.shift)
def a_buffer_of_the_next_forward(model: nn.Module, x: Tensor) -> Taken:
    try:
        return forward_and_backward(model, x, lambda: _change(lambda s: s.shift, model, 1.0))
    finally:
        _change(lambda s: s.shift, model, -1.0)


@case()
def a_bias_that_was_updated(model: nn.Module, x: Tensor) -> Taken:
    try:
        return forward_and_backward(model, x, lambda: _change(lambda s: s.a.bias, model, 0.5))
    finally:
        _change(lambda s: s.a.bias, model, -0.5)


@case(inner=lambda s, h, given: _attend(h))
def a_kernel_chosen_around_the_forward(model: nn.Module, x: Tensor) -> Taken:
    model.zero_grad()
    fed = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        y = model(fed)
    y.square().sum().backward()
    return {"input": fed.grad} | {k: p.grad for k, p in model.named_parameters()}


@case(inner=lambda s, h, given: _attend(h.bfloat16()).float())
def a_type_of_attention_chosen_around_the_forward(model: nn.Module, x: Tensor) -> Taken:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    with sdpa_kernel(SDPBackend.MATH):
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            return forward_and_backward(
                model, x, lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
            )
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _attend(h: Tensor) -> Tensor:
    q = h.view(4, 2, 1, WIDTH // 2).permute(2, 1, 0, 3)
    return F.scaled_dot_product_attention(q, q, q).permute(2, 0, 1, 3).reshape(4, WIDTH)


@case(inner=lambda s, h, given: (h * torch.linspace(0, 1, WIDTH)).float())
def a_default_type_around_the_forward(model: nn.Module, x: Tensor) -> Taken:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return forward_and_backward(model, x, lambda: torch.set_default_dtype(before))
    finally:
        torch.set_default_dtype(before)


def _with_constant(layers: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = torch.ones(WIDTH)
    for layer in layers:
        x = layer(x, constant)
    return x


@case(inner=lambda s, h, given: h + given, route=_with_constant)
def a_tensor_made_in_inference_mode(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


def _with_counter(layers: Any, x: Tensor) -> Tensor:
    counter = torch.ones(WIDTH)
    for layer in layers:
        x = layer(x, counter)
    return x


def _counts(self: Any, h: Tensor, given: Tensor) -> Tensor:
    with torch.no_grad():
        given.add_(1.0)
    return h + given


@case(inner=_counts, route=_with_counter)
def a_tensor_that_blocks_count_in(model: nn.Module, x: Tensor) -> Taken:
    return forward_and_backward(model, x)


LOUD = {"an_attribute_of_the_next_forward", "a_buffer_of_the_next_forward", "a_bias_that_was_updated"}
"""Where a second forward may refuse, with an error of ours that says what to do: what it needs is gone by then."""


def test_the_blocks_of_these_cases_are_checkpointed() -> None:
    model, x = Model(Block), torch.randn(4, WIDTH)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks="layers.*") as handle:
        for _ in range(2):
            forward_and_backward(model, x)
        assert handle.stats().checkpointed_blocks == 3


@pytest.mark.parametrize(("kind", "route", "step"), SECOND)
def test_a_second_forward_computes_what_the_first_did(kind: type[Block], route: Forward | None, step: Step) -> None:
    model, x = Model(kind, route), torch.randn(4, WIDTH)

    def steps() -> list[Taken | EbbtideError]:
        random.seed(3)
        np.random.seed(3)
        taken: list[Taken | EbbtideError] = []
        for _ in range(3):
            try:
                taken.append({k: None if t is None else t.clone() for k, t in step(model, x).items()})
            except EbbtideError as error:
                if step.__name__ not in LOUD:
                    raise
                drain()
                taken.append(error.with_traceback(None))
        return taken

    expected = steps()
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks="layers.*"):
        for one, other in zip(expected, steps(), strict=True):
            assert isinstance(one, dict)
            assert isinstance(other, EbbtideError) or differing(one, other) == []


# What a block sets, and sets back after the tensor with which its second forward ends


class Reads(torch.autograd.Function):
    """Saves a tensor, and reads a setting in its backward."""

    found: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, h: Tensor, read: Callable[[], Any]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.read = read
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        Reads.found.append(ctx.read())
        return gradient, None


def _flag(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _set_device(value: torch.device) -> None:
    torch.set_default_device(None if value == torch.device("cpu") else value)


backends = torch.backends
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": (torch.get_default_device, _set_device, torch.device("meta")),
    "determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "Inductor's": (lambda: torch._inductor.config.deterministic, torch.use_deterministic_algorithms, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, 2),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "low precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "cuBLAS": (*_flag(backends.cuda.matmul, "allow_tf32"), True),
    "cuDNN": (*_flag(backends.cudnn, "allow_tf32"), False),
    "no cuDNN": (*_flag(backends.cudnn, "enabled"), False),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on), True),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        torch.float16,
    ),
}


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_block_sets_back_at_its_end_is_as_before_its_second_forward(setting: str, changed: bool) -> None:
    read, write, other = SETTINGS[setting]

    class SetsBack(Block):
        def forward(self, x: Tensor, given: Any = None) -> Tensor:
            h, before = self.a(x), read()
            write(other)
            h = Reads.apply(must_keep(h), read)
            write(before)
            return x + h

    def set_benchmark(on: bool) -> None:
        torch.backends.cudnn.benchmark = on

    model, x, before = Model(SetsBack), torch.randn(4, WIDTH), read()
    Reads.found.clear()
    try:
        with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks="layers.*") as handle:
            for _ in range(2):
                set_benchmark(False)
                forward_and_backward(model, x, lambda: set_benchmark(changed))
                assert read() == before and torch.backends.cudnn.benchmark is changed
            assert handle.stats().checkpointed_blocks == 3
        assert Reads.found == [before] * 6
    finally:
        set_benchmark(False)
        write(before)


def test_a_weight_that_was_updated_is_refused_as_plain_training_refuses_it() -> None:
    model, x = Model(Block), torch.randn(4, WIDTH)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks="layers.*"):
        forward_and_backward(model, x)  # the first block of a kind is not checkpointed
        with pytest.raises(RuntimeError, match="modified by an inplace operation|changed between the forward"):
            forward_and_backward(model, x, lambda: _change(lambda s: s.a.weight, model, 0.5))
    drain()
