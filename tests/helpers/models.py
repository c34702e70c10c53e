"""Tiny models with random weights, made from configurations: nothing is fetched, the same seed gives the same bits.

``build("llama")`` gives a model with a batch; ``Tiny.step()`` runs forward and backward and returns everything it
computed, to be compared by ``oracle.differences``. Each transformers model has more than one block, a width that is no
power of two where the architecture allows, and float inputs that require gradients where it takes floats, so that input
gradients are compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.oracle import Outcome, step

BATCH, SEQUENCE, WIDTH, VOCABULARY = 2, 12, 48, 61


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model, a batch for it, and how to take a step.

    Attributes:
        name: The name it was built by.
        model: In training mode.
        inputs: Keyword arguments of its forward.
        blocks: Name of the module that holds its repeated blocks, for tests that wrap them one by one.
    """

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    blocks: str

    def loss(self, model: nn.Module | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward; return the scalar loss and the float outputs."""
        result = (model or self.model)(**self.inputs)
        outputs = _outputs(result)
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


def _outputs(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"output": result}
    items = result.items() if isinstance(result, Mapping) else enumerate(result)
    return {str(k): v for k, v in items if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad}


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Tiny:
    """Build a tiny model by name.

    Args:
        name: One of ``NAMES``.
        dtype: Dtype of weights and float inputs.
        seed: Seed of weights and batch; the caller's random state is left as it was.
        changes: Further fields of the transformers configuration, such as ``attention_dropout=0.1``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs, blocks = _BUILDERS[name](changes)
        model.to(dtype).train()
        for key, value in inputs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                inputs[key] = value.to(dtype).requires_grad_()
    return Tiny(name=name, model=model, inputs=inputs, blocks=blocks)


Built = tuple[nn.Module, dict[str, Any], str]


def _tokens() -> Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, SEQUENCE))


def _images() -> Tensor:
    return torch.randn(BATCH, 3, 16, 16)


def _causal(class_name: str, blocks: str, **fields: Any) -> Callable[[dict[str, Any]], Built]:
    """A decoder: tokens in, next-token loss."""

    def make(changes: dict[str, Any]) -> Built:
        ids = _tokens()
        model = _transformers(class_name, vocab_size=VOCABULARY, use_cache=False, **(fields | changes))
        return model, {"input_ids": ids, "labels": ids.clone()}, blocks

    return make


def _encoder(
    class_name: str, blocks: str, batch: Callable[[], dict[str, Any]], **fields: Any
) -> Callable[[dict[str, Any]], Built]:
    """Any other transformers model: its batch is made by ``batch``."""
    return lambda changes: (_transformers(class_name, **(fields | changes)), batch(), blocks)


def _transformers(class_name: str, **fields: Any) -> nn.Module:
    # Imported late: most tests need no transformers, which takes seconds to import.
    import transformers

    cls = getattr(transformers, class_name)
    return cls(cls.config_class(**fields))


def _seq2seq() -> dict[str, Any]:
    return {"input_ids": _tokens(), "labels": _tokens()}


_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEAD = {"head_dim": 16}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_BERT = {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"} | {"vocab_size": VOCABULARY}
_MIXTRAL = _LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN3_MOE = _LLAMA_LIKE | _HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_MAMBA = {"hidden_size": WIDTH, "num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4}


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
    """Blocks one after another under the name ``layers``, as most models have them."""

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


def _plain(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[dict[str, Any]], Built]:
    def build_plain(changes: dict[str, Any]) -> Built:
        if changes:
            raise TypeError(f"plain modules take no configuration: {sorted(changes)}")
        return make(), {"x": torch.randn(shape)}, "layers"

    return build_plain


_BUILDERS: dict[str, Callable[[dict[str, Any]], Built]] = {
    "mlp": _plain(lambda: Stack(*(Mlp() for _ in range(3))), (BATCH, SEQUENCE, WIDTH)),
    "attention": _plain(lambda: Stack(*(Attention() for _ in range(3))), (BATCH, SEQUENCE, WIDTH)),
    "block": _plain(lambda: Stack(*(Block() for _ in range(3))), (BATCH, SEQUENCE, WIDTH)),
    "dropout": _plain(lambda: Stack(*(Block(0.2) for _ in range(3))), (BATCH, SEQUENCE, WIDTH)),
    "conv": _plain(lambda: Stack(*(Conv() for _ in range(3))), (BATCH, 8, 10, 10)),
    "lstm": _plain(Recurrent, (BATCH, SEQUENCE, WIDTH)),
    "llama": _causal("LlamaForCausalLM", "model.layers", **_LLAMA_LIKE),
    "qwen3": _causal("Qwen3ForCausalLM", "model.layers", **_LLAMA_LIKE, **_HEAD),
    "gemma3": _causal("Gemma3ForCausalLM", "model.layers", **_LLAMA_LIKE, **_HEAD, sliding_window=8),
    "gpt2": _causal("GPT2LMHeadModel", "transformer.h", n_embd=WIDTH, n_layer=3, n_head=4, n_positions=64),
    "mixtral": _causal("MixtralForCausalLM", "model.layers", **_MIXTRAL),
    "qwen3_moe": _causal("Qwen3MoeForCausalLM", "model.layers", **_QWEN3_MOE),
    "mamba": _causal("MambaForCausalLM", "backbone.layers", **_MAMBA),
    "bert": _encoder("BertForMaskedLM", "bert.encoder.layer", _seq2seq, **_BERT),
    "t5": _encoder("T5ForConditionalGeneration", "encoder.block", _seq2seq, **_T5),
    "vit": _encoder("ViTModel", "layers", lambda: {"pixel_values": _images()}, **_VISION),
}
PLAIN = tuple(name for name in _BUILDERS if name in {"mlp", "attention", "block", "dropout", "conv", "lstm"})
TRANSFORMERS = tuple(name for name in _BUILDERS if name not in PLAIN)
NAMES = (*PLAIN, *TRANSFORMERS)
