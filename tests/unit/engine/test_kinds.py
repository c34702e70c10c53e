"""Kinds of tensors, views of one storage, weights: which move, which stay, and that they come back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action
from tests.helpers.engines import (
    POLICIES,
    Leaves,
    assert_nothing_left,
    check_everywhere,
    forward_pass,
    leaf,
    open_engine,
)


def complex_numbers(v: Leaves) -> list[Tensor]:
    z = torch.complex(v["x"], v["x"].cos())
    return [torch.view_as_real(z * z.conj() * z.conj().exp()), (z.conj() @ z.t()).imag]


def negative_views(v: Leaves) -> list[Tensor]:
    z = torch.complex(v["x"], v["x"].cos()).conj()
    return [z.imag * z.imag]


def booleans_and_integers(v: Leaves) -> list[Tensor]:
    mask = v["x"] > 0
    order = v["x"].argsort(-1)
    return [
        torch.where(mask, v["x"].exp(), v["x"]),
        v["x"][mask] * 2,
        v["x"].gather(1, order).sin(),
        v["x"][order[0] % 6],
    ]


def nothing_and_scalars(v: Leaves) -> list[Tensor]:
    none, one = v["x"][:0], v["x"][0, 0]
    return [
        none.exp() * none,
        one.exp() * one,
        v["x"] * one,
        torch.cat([none, v["x"]]).sin(),
        none.view(8, 0).sum() * one,
    ]


def sparse_coo(v: Leaves) -> list[Tensor]:
    return [torch.sparse.mm(v["x"].to_sparse(), v["w"])]


def sparse_csr(v: Leaves) -> list[Tensor]:
    with_rows = v["x"].detach().relu().to_sparse_csr()
    return [with_rows @ v["w"]]


class SavesPlainQuantized(torch.autograd.Function):
    """Saves its input in eight bits, as a tensor with a quantized element type and no quantizer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward((x * 10).abs().to(torch.uint8).view(torch.quint8))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].view(torch.uint8)


def with_its_transpose(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    return [y @ y.t(), y.t() @ y]


def with_its_first_rows(v: Leaves) -> list[Tensor]:
    y = v["x"].cumsum(0)
    return [y[:1] * y[:1], y * y, y[:1] * y, y[-1:] * y[-1:]]


def with_an_offset(v: Leaves) -> list[Tensor]:
    y = v["x"].cumsum(0)
    return [y[5:] * y[5:], y.view(-1)[8:12].exp() * y.view(-1)[8:12]]


def stride_zero(v: Leaves) -> list[Tensor]:
    y = v["x"][:1].cumsum(1).expand(50, 8)
    return [y * y, (y[None].expand(3, 50, 8) * v["x"].cumsum(0)[0]).sin()]


def overlapping(v: Leaves) -> list[Tensor]:
    y = v["x"].cumsum(0)
    windows = y.view(-1).unfold(0, 4, 1)
    return [windows * windows, y * y]


def queries_keys_values(v: Leaves) -> list[Tensor]:
    qkv = F.linear(v["x"][None], v["w"].repeat(3, 1)).view(1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    q, k, value = qkv
    return [(q @ k.transpose(-1, -2)).softmax(-1) @ value]


def odd_offsets(v: Leaves) -> list[Tensor]:
    y = v["x"].to(torch.bfloat16).cumsum(0).view(-1)
    return [y[1:4] * y[1:4], y[3:].view(-1) * y[3:]]


def narrow_types(v: Leaves) -> list[Tensor]:
    half = v["x"].to(torch.bfloat16)
    wide = half.float()
    again = half.double() * v["x"].to(torch.float16).double()
    return [wide * wide, again * again, half * half, F.silu(wide) * half]


def narrow_columns(v: Leaves) -> list[Tensor]:
    """One element per row, not adjacent in the shape's last dimension, but contiguous nevertheless."""
    half = v["x"].to(torch.bfloat16)
    wide = half.reshape(-1, 1).float(), half.reshape(1, -1).movedim(0, -1).float(), half.sum().float(), half[:0].float()
    return [x * x for x in wide]


def low_precision(v: Leaves) -> list[Tensor]:
    eighth = v["x"].to(torch.float8_e4m3fn)
    return [eighth.to(torch.float32) * v["x"]]


def channels_last(v: Leaves) -> list[Tensor]:
    image = v["x"].view(1, 2, 4, 6).contiguous(memory_format=torch.channels_last)
    y = F.silu(image * 2)
    return [F.conv2d(y, y[:, :, :2, :2].detach()), y * y]


def types_over_one_storage(v: Leaves) -> list[Tensor]:
    y = v["x"].cumsum(0)
    return [y * y, v["x"] * y.detach().view(torch.int32).float()]


KINDS: dict[str, Callable[[Leaves], list[Tensor]]] = {
    f.__name__: f
    for f in (
        complex_numbers, negative_views, booleans_and_integers, nothing_and_scalars, sparse_coo, sparse_csr,
        with_its_transpose, with_its_first_rows, with_an_offset, stride_zero, overlapping, queries_keys_values,
        odd_offsets, narrow_types, narrow_columns, low_precision, channels_last, types_over_one_storage,
    )
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_tensor_comes_back_as_it_was(name: str) -> None:
    check_everywhere(KINDS[name], {"x": leaf(6, 8), "w": leaf(8, 8, parameter=True)})


@pytest.mark.parametrize("policy", POLICIES)
def test_quantized_elements_without_a_quantizer_stay(policy: str) -> None:
    """Not a kind above: the oracle's own copies would have a quantizer."""

    class Saves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return SavesPlainQuantized.apply(super().forward(x).exp())

    model, x = nn.Sequential(Saves(8, 8), Saves(8, 8)), torch.randn(6, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
        for _ in range(2):
            assert torch.equal(*torch.autograd.grad(model(x).sum(), x), expected)
        assert handle.stats().kept_bytes >= 2 * 6 * 8


def moved(program: Callable[[Leaves], list[Tensor]], leaves: dict[str, Tensor]) -> int:
    """Return the bytes that ``Offload`` copies out for a program."""
    with open_engine("offload") as engine:
        with forward_pass(engine, *[v for v in leaves.values() if not isinstance(v, nn.Parameter)]):
            outputs = program(leaves)
        count = engine.tier.device.out_bytes  # type: ignore[attr-defined]
        del outputs
        assert_nothing_left(engine)
    return count


def test_a_block_is_on_the_device_of_what_may_move_else_of_its_weights() -> None:
    here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    with open_engine("offload") as engine:
        for inputs, weights, device in (
            ([elsewhere, here], [], "cpu"),
            ([here], [elsewhere], "cpu"),
            ([], [elsewhere], "meta"),
            ([], [], "cpu"),
        ):
            with forward_pass(engine, *inputs, weights=weights) as run:
                assert run.device_type == device


def test_inputs_of_one_storage_count_once() -> None:
    x, frozen = torch.randn(4, 4, requires_grad=True) * 1, torch.randn(4, 4)
    with open_engine("offload") as engine, forward_pass(engine, x, *x.chunk(2), x.T, frozen) as run:
        assert run.tally.input_bytes == x.nbytes


def test_one_storage_moves_once_however_it_is_seen() -> None:
    def program(v: Leaves) -> list[Tensor]:
        y = v["x"].cumsum(0)
        return [y * y, y.t() @ y, y.view(-1) * y.view(-1), y[:, 2:] * y[:, 2:], y.detach() * v["x"].sum()]

    assert moved(program, {"x": leaf(6, 8)}) == 6 * 8 * 4


def test_windows_on_one_storage_do_not_add_up() -> None:
    def program(v: Leaves) -> list[Tensor]:
        y = v["x"].cumsum(0).view(-1)
        return [y[i : i + 16] * y[i : i + 16] for i in range(0, 112, 4)]

    assert moved(program, {"x": leaf(16, 8)}) <= 1.5 * 16 * 8 * 4


def test_little_of_a_large_storage_moves_alone() -> None:
    assert moved(lambda v: [v["x"].cumsum(0)[16:18] ** 2], {"x": leaf(64, 8)}) == 2 * 8 * 4
    # A part begins where allocators of devices align: at a multiple of 512 bytes, here at the first byte.
    assert moved(lambda v: [v["x"].cumsum(0)[4:6] ** 2], {"x": leaf(64, 8)}) == 6 * 8 * 4


def test_stride_zero_is_not_materialised() -> None:
    assert moved(lambda v: [v["x"].cumsum(0).expand(100, 6, 8) ** 2], {"x": leaf(6, 8)}) == 6 * 8 * 4


def test_a_cast_up_is_stored_as_it_was() -> None:
    def program(v: Leaves) -> list[Tensor]:
        wide = v["x"].cumsum(0).to(torch.bfloat16).float()
        return [wide * wide]

    assert moved(program, {"x": leaf(6, 8)}) == 6 * 8 * 2


def test_the_source_of_a_cast_up_is_stored_itself() -> None:
    """What the graph makes of it may have been written since, without a version."""

    def program(v: Leaves) -> list[Tensor]:
        half = v["x"].cumsum(0).to(torch.bfloat16)
        wide = half.float()
        return [wide * wide, half.sin()]

    assert moved(program, {"x": leaf(6, 8)}) == 2 * 6 * 8 * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_never_move(policy: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    frozen, buffer = nn.Parameter(torch.randn(8, 8), requires_grad=False), torch.randn(6, 8)
    with open_engine(policy) as engine, forward_pass(engine, x, weights=[w, frozen, buffer]) as run:
        y = (
            x @ w.detach()
            + x @ w.t().detach()[:, :8]
            + x @ frozen
            + x * buffer
            + x * buffer[:1]
            + x @ frozen.view(8, 8)
        )
        assert y.requires_grad and run.tally.unique == 0
        z = x @ w
        assert z.requires_grad and run.tally.unique == 6 * 8 * 4, "x alone"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "keep"])
@pytest.mark.parametrize("frozen", [False, True])
def test_autocasts_copies_of_weights_never_move(policy: str, frozen: bool) -> None:
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(40, 8, requires_grad=True)
    for layer in model:
        layer.first.requires_grad_(not frozen)

    def grads() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return list(torch.autograd.grad(y.float().square().sum(), [x, model[0].second.weight]))

    expected = grads()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, verify=True) as handle:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(expected, grads(), strict=True))
        expected_action = Action.KEEP if policy == "inputs" else Action.RECOMPUTE
        sites = handle._engine.last_pass.sites
        copies = {s: a for (s, a), (_, nbytes) in sites.items() if nbytes == 2 * 8 * 8 * 2}  # of both layers
        assert len(copies) == 2 and set(copies.values()) == {expected_action}, sites


@pytest.mark.parametrize("policy", POLICIES)
def test_filters(policy: str) -> None:
    x = leaf(6, 8)

    def program() -> Tensor:
        return F.silu(x.cumsum(0) * 2).sum() + x.exp().sum()

    expected = torch.autograd.grad(program(), x)[0]
    for name in ("tensor_filter", "keep_filter"):
        with open_engine(policy, **{name: lambda t: False}) as engine:
            with forward_pass(engine, x):
                loss = program()
            stats = engine.stats()
            assert stats.offloaded_bytes == 0
            if name == "keep_filter":
                assert stats.kept_bytes == stats.unique_bytes and stats.recomputed_bytes == 0
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay() -> None:
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        with open_engine("minimal") as engine:
            with forward_pass(engine, x):
                y = torch.nested.to_padded_tensor(x * x if layout is torch.jagged else x, 0.0)
            y.sum().backward()
            assert x.grad is not None
            del y
            assert_nothing_left(engine)
