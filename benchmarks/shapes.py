"""Models of well-known shapes with random weights, made on the device, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LORA_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's shape.

    Attributes:
        make: Return the module, under the default device and dtype at the time of the call.
        feed: Return the arguments of a forward for some tokens, sequences and a device.
    """

    make: Callable[[], nn.Module]
    feed: Callable[[int, int, torch.device], dict[str, torch.Tensor]]

    def build(self, device: torch.device, tuning: str) -> nn.Module:
        """Return the model with random weights in bfloat16 (on a CPU, which is slow at that, in float32).

        Args:
            device: The device of the weights.
            tuning: ``"full"`` or ``"lora"``.
        """
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model = self.make()
        finally:
            torch.set_default_dtype(before)
        if tuning == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear", init_lora_weights=False))
            model.to(device)
        elif tuning != "full":
            raise ValueError(f"tuning is {tuning!r}; expected 'full' or 'lora'")
        return model

    def inputs(self, tokens: int, batch: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments of a forward."""
        torch.manual_seed(1)
        return self.feed(tokens, batch, device)


def qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, head: int = 128, words: int) -> Shape:
    """Return a decoder with Qwen3's architecture."""

    def make() -> nn.Module:
        from transformers import Qwen3Config, Qwen3Model

        config = Qwen3Config(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=head, vocab_size=words, max_position_embeddings=1 << 20,
            use_cache=False,
        )  # fmt: skip
        return Qwen3Model(config)

    def feed(tokens: int, batch: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(0, words, (batch, tokens), device=device)}

    return Shape(make=make, feed=feed)


def wan(heads: int, inner: int, layers: int) -> Shape:
    """Return a video transformer with Wan's architecture; tokens are rounded up to whole frames of 30 x 52."""
    rows, columns, text, channels = 30, 52, 512, 16

    def make() -> nn.Module:
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=128, ffn_dim=inner, num_layers=layers, in_channels=channels,
            out_channels=channels, text_dim=text,
        )  # fmt: skip

    def feed(tokens: int, batch: int, device: torch.device) -> dict[str, Any]:
        frames, kind = -(-tokens // (rows * columns)), torch.float32 if device.type == "cpu" else torch.bfloat16
        latents = torch.randn(batch, channels, frames, 2 * rows, 2 * columns, device=device, dtype=kind)
        return {
            "hidden_states": latents,
            "timestep": torch.full((batch,), 500, device=device),
            "encoder_hidden_states": torch.randn(batch, text, text, device=device, dtype=kind),
            "return_dict": False,
        }

    return Shape(make=make, feed=feed)


SHAPES = {
    "tiny": qwen3(256, 768, 4, 4, 2, head=64, words=512),
    "small": qwen3(512, 1536, 8, 8, 4, head=64, words=1000),
    "SmolLM2-12": qwen3(576, 1536, 12, 9, 3, head=64, words=1000),  # SmolLM2 135M has 30 such blocks
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, 8, words=151_936),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, 8, words=151_936),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, 8, words=151_936),
    "Wan-1.3B": wan(12, 8960, 30),
}
