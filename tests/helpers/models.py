"""Tiny models with random weights, made from configurations: nothing is downloaded, the same seed gives the same bits.

``build("llama")`` returns a model with a batch; ``Tiny.step()`` runs forward and backward and returns everything it
computed, to be compared by ``oracle.differences``. Each family has more than one block, a width that is not a power of
two where the architecture allows, and float inputs that require gradients where it takes floats, so that input
gradients are compared as well. The families of transformers and diffusers are in ``decoder_families``,
``text_families``, ``media_families`` and ``diffusion_families``; those written here in plain torch are for tests that
want little code around one thing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.decoder_families import DECODERS
from tests.helpers.diffusion_families import DIFFUSION
from tests.helpers.media_families import MEDIA
from tests.helpers.oracle import Outcome, step
from tests.helpers.sizes import TINY, Built, Maker, Size
from tests.helpers.text_families import ENCODERS, RECURRENT

WIDTH = TINY.width


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model, a batch for it, and how to take a step.

    Attributes:
        name: Its name in ``NAMES``.
        model: In training mode.
        inputs: Keyword arguments of its forward.
        blocks: Name of the module that holds its repeated blocks, for tests that wrap them one by one.
        autocast: The forward runs under ``torch.autocast("cpu", torch.bfloat16)``.
    """

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    blocks: str
    autocast: bool = False

    def loss(self, model: nn.Module | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward; return the scalar loss and the float outputs."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            outputs = outputs_of((self.model if model is None else model)(**self.inputs))
        if "loss" in outputs:
            return outputs["loss"], outputs
        return sum((v.float().square().mean() for v in outputs.values()), torch.zeros(())), outputs

    def step(self) -> Outcome:
        """Run one forward and backward, from the same random state each time (dropout repeats)."""
        torch.manual_seed(1)
        return step(self.model, self.loss, self.inputs)

    def block_list(self) -> list[nn.Module]:
        """The repeated blocks in order."""
        return list(self.model.get_submodule(self.blocks).children())


def outputs_of(result: Any) -> dict[str, Tensor]:
    """Return the differentiable tensors of a forward's result."""
    if isinstance(result, Tensor):
        return {"output": result}
    items = result.items() if isinstance(result, Mapping) else enumerate(result)
    return {str(k): v for k, v in items if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad}


@functools.cache
def _has_bfloat16_lstm() -> bool:
    """Whether torch runs an LSTM under autocast: its CPU library has no kernel for processors without AVX-512."""
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


def build(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    size: Size = TINY,
    autocast: bool = False,
    **changes: Any,
) -> Tiny:
    """Build a model by name.

    Args:
        name: One of ``NAMES``.
        dtype: Dtype of weights and float inputs.
        seed: Seed of weights and batch; the caller's random state is unchanged.
        size: Size of configuration and batch.
        autocast: Run the forward under ``torch.autocast``.
        changes: Further fields of the configuration, such as ``attention_dropout=0.1``.

    A test is skipped if torch itself cannot run its model on this processor.
    """
    if autocast and name in ("lstm", "lstm_stack") and not _has_bfloat16_lstm():
        pytest.skip("torch has no LSTM in bfloat16 on this processor")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs, blocks = _BUILDERS[name](size, changes)
        _cast(model.train(), dtype)
        for key, value in inputs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                inputs[key] = value.to(dtype).requires_grad_()
    return Tiny(name=name, model=model, inputs=inputs, blocks=blocks, autocast=autocast)


def switch_on_checkpoints(model: Any, options: Mapping[str, Any]) -> None:
    """Have a model of transformers checkpoint its layers: newer versions deprecate the older keyword."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)(dict(options))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast as ``from_pretrained`` does: diffusers keeps the modules that a model names in float32."""
    nn.Module.to(model, dtype)  # diffusers' own method warns that it casts those too
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, parameter in model.named_parameters():
        if set(kept) & set(name.split(".")):
            parameter.data = parameter.data.float()


class Mlp(nn.Module):
    """A gated feed-forward block with a norm and a residual."""

    def __init__(self, width: int = WIDTH, inner: int = 80) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values: three saved views of one storage."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(self.norm(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, h))


class Conv(nn.Module):
    """A residual convolution block: group norm, activation, convolution."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(nn.functional.gelu(self.norm(x)))


class Stack(nn.Module):
    """Blocks one after another under the name ``layers``, as in most models."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    """A two-layer LSTM between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 24), nn.LSTM(24, 24, num_layers=2, batch_first=True)])
        self.out = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projection, lstm = self.layers
        return self.out(lstm(projection(x))[0])


class Block(nn.Sequential):
    """Attention and feed-forward: a transformer block in plain torch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(Attention(dropout=dropout), Mlp(), nn.Dropout(dropout))


class Cell(nn.Module):
    """A norm, a recurrent layer and a residual: no rule covers the middle of the block."""

    def __init__(self, layer: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.norm, self.recurrent = nn.LayerNorm(width), layer(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(self.norm(x))[0]


def _plain(make: Callable[[Size], nn.Module], batch: Callable[[Size], Tensor]) -> Maker:
    def build_plain(size: Size, changes: dict[str, Any]) -> Built:
        if changes:
            raise TypeError(f"plain modules take no configuration: {sorted(changes)}")
        return make(size), {"x": batch(size)}, "layers"

    return build_plain


def _stack(block: Callable[[Size], nn.Module], batch: Callable[[Size], Tensor] | None = None) -> Maker:
    """Three blocks of one kind in plain torch."""
    given = batch or (lambda size: size.values(size.tokens, size.width))
    return _plain(lambda size: Stack(*(block(size) for _ in range(3))), given)


_PLAIN: dict[str, Maker] = {
    "mlp": _stack(lambda size: Mlp(size.width, size.inner)),
    "attention": _stack(lambda size: Attention(size.width)),
    "block": _stack(lambda size: Block()),
    "dropout": _stack(lambda size: Block(0.2)),
    "conv": _stack(lambda size: Conv(), lambda size: size.values(8, 10, 10)),
    "lstm": _plain(lambda size: Recurrent(), lambda size: size.values(size.tokens, WIDTH)),
}
STACKS: dict[str, Maker] = {
    "lstm_stack": _stack(lambda size: Cell(nn.LSTM, size.width)),
    "gru_stack": _stack(lambda size: Cell(nn.GRU, size.width)),
}
_TRANSFORMERS = DECODERS | ENCODERS | RECURRENT | MEDIA
_BUILDERS = _PLAIN | STACKS | _TRANSFORMERS | DIFFUSION
PLAIN = (*_PLAIN, *STACKS)
TRANSFORMERS = tuple(_TRANSFORMERS)
FAMILIES = (*_TRANSFORMERS, *DIFFUSION, *STACKS)
NAMES = tuple(_BUILDERS)

DROPOUT = (
    "gpt2",
    "phi",
    "bert",
    "t5",
    "bart",
    "swin",
    "convnext",
    "dinov2",
    "wav2vec2",
    "whisper",
    "unet2d",
    "dit",
    "cogvideox",
)
"""Families that draw random numbers in training."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"dtype": torch.float32, "autocast": True},
}
"""What ``build`` is given for each precision: weights in it, or weights in float32 under autocast to bfloat16."""
