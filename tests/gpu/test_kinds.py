"""Tensors that only a device saves: attention kernels with random state, vendor libraries, streams, low precision.

Ordinary training and training under every policy start from the same random state and run deterministic kernels, so
that every gradient is compared bitwise; a case whose ordinary training does not repeat itself is skipped with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ebbtide
from tests.helpers.engines import POLICIES
from tests.helpers.oracle import same_bits

pytestmark = pytest.mark.gpu

WIDTH, HEADS = 128, 4


class Attend(nn.Module):
    """Attention by one kernel, with dropout."""

    def __init__(self, backend: SDPBackend, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.backend, self.dropout, self.masked = backend, dropout, masked

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril() if self.masked else None
        with sdpa_kernel(self.backend):
            y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=mask is None)
        return x + self.out(y.transpose(1, 2).reshape(b, s, -1))


class Recurrent(nn.Module):
    """A recurrent layer of the vendor's library, and a residual."""

    def __init__(self, kind: type[nn.Module], **given: Any) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), kind(WIDTH, WIDTH, batch_first=True, **given)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))[0]


class Convolved(nn.Module):
    """Convolution, batch norm and activation, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 8, 16, WIDTH // 16).contiguous(memory_format=torch.channels_last)
        return (image + F.relu(self.norm(self.conv(image)))).contiguous().view(x.shape)


class OnItsOwnStream(torch.autograd.Function):
    """Computes on a side stream, forward and backward, as overlapping communication does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        side = torch.Stream(device=x.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = torch.exp(x * 0.1)
        torch.accelerator.current_stream().wait_stream(side)
        y.record_stream(
            torch.accelerator.current_stream()
        )  # made on one stream, read on another, also in ordinary training
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        side = torch.Stream(device=y.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            result = grad * y * 0.1
        torch.accelerator.current_stream().wait_stream(side)
        result.record_stream(torch.accelerator.current_stream())
        return result


class Sided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + OnItsOwnStream.apply(self.linear(x)) * torch.tensor(0.5)  # a CPU tensor among those of the device


class Mixed(nn.Module):
    """Dropout, an embedding's indices, a gather: saved tensors of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().sum(-1).argsort(-1)[..., None].expand_as(x)
        return x + self.drop(F.gelu(self.linear(self.norm(x)))).gather(1, order)


CASES: dict[str, Callable[[], nn.Module]] = {
    "flash": lambda: Attend(SDPBackend.FLASH_ATTENTION),
    "flash_dropout": lambda: Attend(SDPBackend.FLASH_ATTENTION, dropout=0.1),
    "efficient": lambda: Attend(SDPBackend.EFFICIENT_ATTENTION),
    "efficient_mask_dropout": lambda: Attend(SDPBackend.EFFICIENT_ATTENTION, dropout=0.1, masked=True),
    "cudnn": lambda: Attend(SDPBackend.CUDNN_ATTENTION),
    "math": lambda: Attend(SDPBackend.MATH, dropout=0.1),
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.1),
    "gru": lambda: Recurrent(nn.GRU),
    "convolution": Convolved,
    "streams": Sided,
    "mixed": Mixed,
}


NOTHING_TO_MOVE = {("convolution", "inputs")}
"""No operator of the block saves the block's own input, only a copy of it in another layout."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator()
    return nn.Sequential(*(nn.Sequential(CASES[name](), nn.LayerNorm(WIDTH)) for _ in range(3))).to(device).train()


def train(
    model: nn.Module, steps: int, precision: str, before_last: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """Take some steps of plain gradient descent; return losses, input gradients and all weights."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(1)
    found: list[Tensor] = []
    for step in range(steps):
        if step == steps - 1:
            before_last()
        x = torch.randn(2, 64, WIDTH, device=device, requires_grad=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
            y = model(x.bfloat16() if precision == "bf16" else x)
        loss = y.float().square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None
        found.append(loss.detach())
        assert x.grad is not None
        found.append(x.grad)
    return [*found, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def offloaded(model: nn.Module, policy: str) -> ebbtide.Handle:
    """Enable offloading with a window that these small models do not fit into: every step moves bytes."""
    return ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks=["0", "1", "2"], window="1B")


def train_offloaded(handle: ebbtide.Handle, model: nn.Module, precision: str) -> tuple[list[Tensor], int]:
    """Take three steps; return also the bytes that the last one copied in."""
    before: list[int] = []
    got = train(model, 3, precision, lambda: before.append(handle.stats().total_copy_in_bytes))
    return got, handle.stats().total_copy_in_bytes - before[0]


@pytest.mark.filterwarnings("ignore:RNN module weights", "ignore:.*deterministic.*:UserWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_what_devices_save_comes_back_as_it_was(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    try:
        plain, again = (train(build(name).to(dtype), 3, precision) for _ in range(2))
    except RuntimeError as error:  # no such kernel for this dtype or device
        pytest.skip(f"plain training: {str(error).splitlines()[0]}")
    if not all(map(same_bits, plain, again)):
        pytest.skip("plain training does not repeat itself bitwise")
    for policy in POLICIES:
        model = build(name).to(dtype)
        with offloaded(model, policy) as handle:
            got, moved = train_offloaded(handle, model, precision)
            assert all(map(same_bits, plain, got)), (policy, handle.stats())
            assert handle.stats().live_tickets == 0
            assert (moved > 0) == (policy != "keep" and (name, policy) not in NOTHING_TO_MOVE), policy


def test_another_stream_than_the_default_one() -> None:
    plain = train(build("mixed"), 2, "fp32")
    model, stream = build("mixed"), torch.Stream(device=torch.accelerator.current_accelerator())
    with offloaded(model, "offload"):
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            got = train(model, 2, "fp32")
        torch.accelerator.current_stream().wait_stream(stream)
        assert all(map(same_bits, plain, got))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.needs_cuda)])
def test_compiled_blocks(backend: str) -> None:
    def compiled() -> nn.Module:
        torch._dynamo.reset()
        model = build("flash")
        for block in model:
            block.compile(backend=backend, fullgraph=True)
        return model

    plain = train(compiled(), 3, "autocast")
    model = compiled()
    with offloaded(model, "offload") as handle:
        got, moved = train_offloaded(handle, model, "autocast")
        assert all(map(same_bits, plain, got)) and moved > 0


class Dropping(nn.Module):
    """Has state inside a device's library that a checkpoint would not repeat: random state, or the algorithm."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.special.i0e(x)
        return self.linear(x)


@pytest.mark.parametrize(
    ("make", "tuned", "checkpointed"),
    [
        (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1), False, 0),
        (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2), False, 3),
        (lambda: nn.Conv2d(8, 8, 3), True, 0),
        (lambda: nn.Conv2d(8, 8, 3), False, 3),
    ],
    ids=["lstm with dropout", "lstm", "convolution under benchmark", "convolution"],
)
def test_blocks_that_a_device_would_compute_otherwise_do_not_run_twice(
    make: Callable[[], nn.Module], tuned: bool, checkpointed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tuned)
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if tuned and device.type != "cuda":  # the setting is cuDNN's
        checkpointed = 3
    model = nn.Sequential(*(Dropping(make()) for _ in range(3))).to(device)
    x = torch.randn(2, 16, WIDTH, device=device, requires_grad=True)
    with ebbtide.enable_activation_offloading(model, enable_ckpt=True, min_bytes=0) as handle:
        for _ in range(3):
            model(x).square().mean().backward()
        assert handle.stats().checkpointed_blocks == checkpointed
