"""Jagged tensors: their parts may have a symbolic size, and stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from tests.helpers.engines import POLICIES, assert_nothing_left
from tests.helpers.parts import WIDTH, Model, Part, differing, linear

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")


def attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (s.q, s.k, s.v))
    return x + s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def feed_forward(s: Any, x: Tensor) -> Tensor:
    return x + s.o(F.silu(s.q(s.norm(x))))


def gated(s: Any, x: Tensor) -> Tensor:
    one, other = s.q(x).chunk(2, -1)
    return x + torch.cat([one.sin() * other, other.exp()], -1)


def padded(s: Any, x: Tensor) -> Tensor:
    dense = torch.nested.to_padded_tensor(s.q(x), 0.5).softmax(1)
    return x + s.o(x) * dense.square().sum()


def by_its_values(s: Any, x: Tensor) -> Tensor:
    values = F.gelu(s.q(x.values()))
    return torch.nested.nested_tensor_from_jagged(values * values.sigmoid(), x.offsets())


def mixed(s: Any, x: Tensor) -> Tensor:
    return gated(s, attention(s, feed_forward(s, x)))


PROGRAMS = [attention, feed_forward, gated, padded, by_its_values, mixed]


def _step(model: nn.Module, lengths: tuple[int, ...]) -> dict[str, Tensor | None]:
    torch.manual_seed(5)
    parts = [torch.randn(n, WIDTH) for n in lengths]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    model.zero_grad()
    y = model(x)
    y.values().square().sum().backward()
    found = {"output": y.values(), "input": None if x.grad is None else x.grad.values()}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {name: None if t is None else t.detach().clone() for name, t in found.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_jagged_programs_keep_plain_trainings_bits(program: Callable[..., Any], policy: str) -> None:
    model = Model(lambda: Part(program, q=linear(), k=linear(), v=linear(), o=linear(), norm=nn.LayerNorm(WIDTH)))
    steps = [(3, 5, 2), (3, 5, 2), (4, 1), (3, 5, 2), (6, 6, 6), (3, 5, 2)]
    expected = [_step(model, lengths) for lengths in steps]
    with ebbtide.enable_activation_offloading(
        model, policy=policy, min_bytes=0, verify=True, blocks="layers.*"
    ) as handle:
        for lengths, plain in zip(steps, expected, strict=True):
            assert differing(plain, _step(model, lengths)) == []
        assert handle.stats().packs > 0
        assert_nothing_left(handle._engine)
