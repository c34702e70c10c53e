"""Modules of torch and of users, three steps of each, under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

import ebbtide
from tests.helpers.engines import POLICIES
from tests.helpers.parts import WIDTH, Forward, Model, Part, check_model, differing, gated, linear, training_step

Made = tuple[nn.Module, Tensor]
CASES: dict[str, Callable[[], Made]] = {}


def case(make: Callable[[], Made]) -> Callable[[], Made]:
    CASES[make.__name__] = make
    return make


def two_dims() -> Tensor:
    return torch.randn(4, WIDTH)


def sequence() -> Tensor:
    return torch.randn(5, 3, WIDTH)


# Weights that are computed, shared, or handed about


@case
def weight_norm() -> Made:
    norm = parametrizations.weight_norm
    return Model(lambda: Part(gated, a=norm(linear()), b=norm(linear()))), two_dims()


@case
def orthogonal_weights() -> Made:
    return Model(lambda: Part(gated, a=parametrizations.orthogonal(linear()), b=linear())), two_dims()


@case
def spectral_norm() -> Made:  # changes its buffers in every forward
    norm = parametrizations.spectral_norm
    return Model(lambda: Part(gated, a=norm(linear()), b=norm(linear()))), two_dims()


@case
def tied_weights() -> Made:
    model = Model(lambda: Part(gated, a=linear(), b=linear()))
    for layer in model.layers:
        layer.a.weight = layer.b.weight = model.layers[0].a.weight
    return model, two_dims()


@case
def parameters_in_lists_and_dictionaries() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        return x + sum(F.linear(x, p) for p in s.many) + s.named["k"] * x

    def make() -> nn.Module:
        many = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        return Part(forward, many=many, named=nn.ParameterDict({"k": torch.randn(WIDTH)}))

    return Model(make), two_dims()


@case
def a_weight_used_by_the_caller() -> Made:
    def route(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x) * layers[0].a.weight[0]
        return x

    return Model(lambda: Part(gated, a=linear(), b=linear()), route), two_dims()


@case
def functional_call_inside() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        scaled = {k: v * 1.1 for k, v in s.a.named_parameters()}
        return x + torch.func.functional_call(s.a, scaled, (x,)).sin()

    return Model(lambda: Part(forward, a=linear())), two_dims()


@case
def adapters_over_frozen_weights() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        return x + s.a(x) + s.up(s.down(s.drop(x))) * 2

    def make() -> nn.Module:
        down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        return Part(forward, a=linear().requires_grad_(False), down=down, up=up, drop=nn.Dropout(0.1))

    return Model(make), two_dims()


# Recurrent modules


def cells(s: Any, x: Tensor) -> Tensor:
    h = c = torch.zeros_like(x[0])
    states = []
    for token in x:
        h, c = s.lstm(token, (h, c))
        h = s.rnn(token, s.gru(token, h))
        states.append(h)
    return x + torch.stack(states)


def packed(s: Any, x: Tensor) -> Tensor:
    rows = rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), enforce_sorted=False)
    y, _ = rnn.pad_packed_sequence(s.inner(rows)[0], total_length=len(x))
    return x + y


def recurrent(s: Any, x: Tensor) -> Tensor:
    return x + s.inner(x)[0]


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: Part(recurrent, inner=nn.RNN(WIDTH, WIDTH, 2, nonlinearity="relu")),
    "gru_with_dropout": lambda: Part(recurrent, inner=nn.GRU(WIDTH, WIDTH, 2, dropout=0.3)),
    "lstm_with_dropout": lambda: Part(recurrent, inner=nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)),
    "lstm_with_projection": lambda: Part(recurrent, inner=nn.LSTM(WIDTH, 16, proj_size=WIDTH)),
    "bidirectional_lstm": lambda: Part(recurrent, inner=nn.LSTM(WIDTH, 4, bidirectional=True)),
    "bidirectional_gru": lambda: Part(recurrent, inner=nn.GRU(WIDTH, 4, bidirectional=True, batch_first=True)),
    "packed_lstm": lambda: Part(packed, inner=nn.LSTM(WIDTH, WIDTH)),
    "packed_gru": lambda: Part(packed, inner=nn.GRU(WIDTH, WIDTH)),
    "cells": lambda: Part(
        cells, lstm=nn.LSTMCell(WIDTH, WIDTH), gru=nn.GRUCell(WIDTH, WIDTH), rnn=nn.RNNCell(WIDTH, WIDTH)
    ),
}
CASES |= {name: lambda make=make: (Model(make), sequence()) for name, make in RECURRENT.items()}


# Embeddings, experts, attention, convolutions


@case
def sparse_gradients_of_embedding_bags() -> Made:
    ids, starts = torch.arange(12) % 7, torch.tensor([0, 3, 7, 9])

    def forward(s: Any, x: Tensor) -> Tensor:
        bags = s.a(s.mean(ids, starts)) * s.sum(ids.view(4, 3)) + s.largest(ids.view(4, 3))
        return x + bags + s.rows(ids[:4]).sin()

    def make() -> nn.Module:
        return Part(
            forward,
            a=linear(),
            mean=nn.EmbeddingBag(7, WIDTH, sparse=True, mode="mean"),
            sum=nn.EmbeddingBag(7, WIDTH, mode="sum"),
            largest=nn.EmbeddingBag(7, WIDTH, mode="max"),
            rows=nn.Embedding(7, WIDTH, sparse=True),
        )

    return Model(make), two_dims()


@case
def routed_experts() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        weights, chosen = s.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(s.experts):
            row, column = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, row, expert(x[row]) * weights[row, column, None])
        return x + y

    def make() -> nn.Module:
        experts = nn.ModuleList(nn.Sequential(linear(), nn.SiLU(), linear()) for _ in range(3))
        return Part(forward, router=nn.Linear(WIDTH, 3), experts=experts)

    return Model(make), torch.randn(6, WIDTH)


@case
def torchs_own_encoder_layer() -> Made:
    return Model(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, norm_first=True)), sequence()


@case
def torchs_own_decoder_layer() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.inner(x, x.flip(0))

    return Model(lambda: Part(forward, inner=nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.1))), sequence()


@case
def batch_norm() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        return x + s.b(F.silu(s.norm(s.a(x))))

    return Model(lambda: Part(forward, a=linear(), norm=nn.BatchNorm1d(WIDTH), b=linear())), two_dims()


@case
def batch_norm_in_eval_mode() -> Made:
    model, x = batch_norm()
    return model.eval(), x


def _convolution(s: Any, x: Tensor) -> Tensor:
    return x + s.up(F.max_pool2d(F.gelu(s.norm(s.down(x))), 3, 1, 1))


def _convolutions(**given: Any) -> nn.Module:
    down, up = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.ConvTranspose2d(4, 4, 3, padding=1)
    return Part(_convolution, down=down, norm=nn.InstanceNorm2d(4, affine=True, **given), up=up)


@case
def convolutions_in_channels_last() -> Made:
    return Model(_convolutions), torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)


def _resampled(s: Any, x: Tensor) -> Tensor:
    y = F.avg_pool2d(s.group(F.leaky_relu(x * 1, 0.1, inplace=True)), 2)
    return F.interpolate(y, scale_factor=2, mode="bilinear")


@case
def resampling() -> Made:
    return Model(lambda: Part(_resampled, group=nn.Conv2d(4, 4, 1, groups=2))), torch.randn(2, 4, 6, 6)


@case
def rotations_and_spectra() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(4), torch.arange(4.0))
        z = torch.view_as_complex(x.view(4, 4, 2)) * turn
        return s.a(torch.view_as_real(z).flatten(-2)) + torch.fft.irfft(torch.fft.rfft(x) * 2, n=WIDTH)

    return Model(lambda: Part(forward, a=linear())), two_dims()


# Buffers


def _with_buffer(forward: Forward) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        part = Part(forward, a=linear())
        part.register_buffer("seen", torch.ones(WIDTH))
        return part

    return make


@case
def a_buffer_changed_in_place_before_it_is_saved() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            s.seen.mul_(0.9).add_(x.mean(0) * 0.1)
        return x + s.a(x * s.seen)

    return Model(_with_buffer(forward)), two_dims()


@case
def a_buffer_replaced_in_forward() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.seen = s.seen * 0.9 + x.detach().mean(0) * 0.1
        return x + s.a(x * s.seen)

    return Model(_with_buffer(forward)), two_dims()


# Types


@case
def autocast_inside() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = s.b(F.silu(s.a(x)))
            with torch.autocast("cpu", enabled=False):
                z = s.a(y.float())
        return x + z * y

    return Model(lambda: Part(forward, a=linear(), b=linear())), two_dims()


@case
def random_numbers() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.alpha_dropout(s.a(F.dropout(F.silu(x), 0.2)), 0.1, True) + torch.rand_like(x) * x
        return y + F.gumbel_softmax(x) + torch.bernoulli(x.sigmoid()) * x + torch.empty_like(x).bernoulli_(0.5) * y

    return Model(lambda: Part(forward, a=linear())), two_dims()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_a_module_trains_as_it_does_alone(name: str, policy: str) -> None:
    check_model(*CASES[name](), policy)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_blocks_that_save_do_so_under_the_hooks() -> None:
    """The cases above are not idle: those that pack nothing are listed here."""
    idle = []
    for name, make in CASES.items():
        if not check_model(*make(), "keep", steps=1).stats().packs:
            idle.append(name)
    assert idle == []


def test_a_block_that_changes_its_buffers_is_not_run_twice() -> None:
    model = Model(lambda: _convolutions(track_running_stats=True))
    check_model(model, torch.randn(2, 4, 6, 6), "minimal")


class ChangesConstants(nn.LayerNorm):
    """A norm with its own forward, which does not always use its attributes."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        eps = 1.0 if self.late else self.eps
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, eps)


class LooksLikeItsWeight(nn.Module):
    """A constant that at first equals the frozen weight next to it, except for its dtype."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.full((WIDTH, WIDTH), float(self.late), dtype=torch.bfloat16)
        return x + x @ self.weight + (x.bfloat16() @ state).float()


@pytest.mark.parametrize("policy", ["auto", "minimal"])
@pytest.mark.parametrize("make", [lambda: ChangesConstants(WIDTH), LooksLikeItsWeight], ids=["constants", "weight"])
def test_what_was_right_in_the_first_step_may_be_wrong_later(make: Callable[[], nn.Module], policy: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        return x + F.silu(y) * y.sigmoid()

    model, x = Model(lambda: Part(forward, a=make())), two_dims()

    def steps() -> Iterator[dict[str, Tensor | None]]:
        for late in (False, True, True):
            for layer in model.layers:
                layer.a.late = late
            yield training_step(model, x)

    expected = list(steps())
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*"):
        assert [differing(a, b) for a, b in zip(expected, steps(), strict=True)] == [[], [], []]


@pytest.mark.parametrize("blocks", ["layers.*", None])
@pytest.mark.parametrize("policy", POLICIES)
def test_lazy_modules_are_made_in_the_first_forward(policy: str, blocks: str | None) -> None:
    def model() -> nn.Module:
        if blocks is None:  # nothing repeats
            return nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(WIDTH))
        return Model(lambda: Part(gated, a=nn.LazyLinear(WIDTH), b=nn.LazyLinear(WIDTH)))

    plain, lazy, x = model(), model(), two_dims()
    with ebbtide.enable_activation_offloading(lazy, policy=policy, min_bytes=0, verify=True, blocks=blocks) as handle:
        lazy(x)
        plain(x)
        plain.load_state_dict(lazy.state_dict())
        assert differing(training_step(plain, x), training_step(lazy, x)) == []
        assert handle.stats().packs > 0
