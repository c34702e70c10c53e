"""Built-in pipelines, to try everything without downloads.

[Note: pixels as latents]
The VAE rearranges each block of 4 x 4 pixels into the channels of one latent, and back: nothing is learned or lost, so
samples can be viewed. The text encoder gives each word a fixed vector that is derived from the word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from ebbtide_recipes.skeleton.rows import check_builtin
from ebbtide_recipes.video.families import Text, family_of
from ebbtide_recipes.video.source import Source

SIDE = 4
CHANNELS = 3 * SIDE * SIDE
WORDS, WIDTH = 16, 32

_SIZES: Mapping[str, Mapping[str, int]] = {
    "builtin:tiny-wan": {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 256, "num_layers": 3},
    "builtin:small-wan": {"num_attention_heads": 8, "attention_head_dim": 32, "ffn_dim": 1024, "num_layers": 8},
}
NAMES = tuple(_SIZES)


class PixelBlocks(torch.nn.Module):
    """Rearranges blocks of pixels into channels, and back. See [Note: pixels as latents]."""

    config: Mapping[str, Any] = {"_class_name": "PixelBlocks", "z_dim": CHANNELS}
    dtype = torch.float32

    def encode(self, pixels: torch.Tensor, return_dict: bool = False) -> tuple[Any]:
        """Return latents ``[B, 48, F, H/4, W/4]`` of pixels, as a VAE's distribution."""
        frames = functional.pixel_unshuffle(pixels.transpose(1, 2), SIDE).transpose(1, 2).contiguous()
        return (SimpleNamespace(mode=lambda: frames),)

    def decode(self, latents: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """Return the pixels of latents."""
        return (functional.pixel_shuffle(latents.transpose(1, 2), SIDE).transpose(1, 2),)


class BuiltinSource(Source):
    """A Wan transformer with new weights, pixels as latents, words as embeddings.

    Args:
        name: ``builtin:tiny-wan`` or ``builtin:small-wan``.
        seed: Seed of the weights.
    """

    ratios = (1, SIDE)
    default_size = (9, 32, 32)

    def __init__(self, name: str, *, seed: int) -> None:
        self.name, self._seed = name, seed
        self.index = {}
        self.transformer_config = {
            **_SIZES[name],
            "_class_name": "WanTransformer3DModel",
            "patch_size": (1, 1, 1),  # narrower than the transformer, which must pass the noise through
            "in_channels": CHANNELS,
            "out_channels": CHANNELS,
            "text_dim": WIDTH,
            "freq_dim": 64,
            "rope_max_seq_len": 256,
        }
        self.vae_config = dict(PixelBlocks.config)
        self.family = family_of("WanTransformer3DModel", None)

    def transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return a new transformer; its weights depend on the seed alone."""
        from diffusers import WanTransformer3DModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            fields = {key: value for key, value in self.transformer_config.items() if not key.startswith("_")}
            made = WanTransformer3DModel(**fields)
        for parameter in made.parameters():
            parameter.data = parameter.data.to(dtype)
        return made

    def vae(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return the module that rearranges pixels."""
        return PixelBlocks()

    def scheduler(self) -> Any:
        """Return flow matching's scheduler."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=3.0)

    def encode(
        self, captions: Sequence[str], *, length: int | None, device: torch.device, dtype: torch.dtype
    ) -> list[Text]:
        """Return a vector for each word of a caption, zeros after the last."""
        return [{"prompt_embeds": _embedded(caption)} for caption in captions]

    def vae_identity(self) -> str:
        """Return the name: there is one such VAE."""
        return f"builtin:pixel-blocks-{SIDE}"

    def text_identity(self) -> str:
        """Return the name: there is one such encoder."""
        return f"builtin:words-{WIDTH}"


def source(name: str, *, seed: int) -> Source:
    """Return a built-in pipeline.

    Raises:
        DataError: There is none of that name.
    """
    check_builtin("model", name, NAMES, "a pipeline folder or a hub name will do too")
    return BuiltinSource(name, seed=seed)


def _embedded(caption: str) -> torch.Tensor:
    embedded = torch.zeros(WORDS, WIDTH)
    for place, word in enumerate(caption.lower().split()[:WORDS]):
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") >> 1
        embedded[place] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return embedded
