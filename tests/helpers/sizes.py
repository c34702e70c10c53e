"""The sizes of families: the smallest that runs every code path, or wide enough that activations dominate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any], str]
"""A model, keyword arguments of its forward, and the path of the module that holds its repeated blocks."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes from which a family's configuration is made.

    Attributes:
        batch: Samples in a batch.
        tokens: Length of a text.
        width: Hidden size; a multiple of 16.
        inner: Width inside feed-forward layers.
        layers: Number of repeated blocks, if the family has a choice.
        pixels: Height and width of images and latents; a multiple of 8.
        frames: Frames of a latent video.
        samples: Length of a waveform.
    """

    batch: int = 2
    tokens: int = 12
    width: int = 48
    inner: int = 80
    layers: int = 3
    pixels: int = 16
    frames: int = 2
    samples: int = 800

    @property
    def heads(self) -> int:
        """Attention heads: 4 everywhere."""
        return 4

    @property
    def patch(self) -> int:
        """Height and width of a vision transformer's patches: few tokens from a small image, more from a larger."""
        return 4 if self.pixels <= 16 else 2

    def text(self) -> Tensor:
        """Return token ids [batch, tokens]; 0 and 1 are reserved for special tokens."""
        return torch.randint(2, VOCABULARY, (self.batch, self.tokens))

    def image(self, channels: int = 3, pixels: int | None = None) -> Tensor:
        """Return an image [batch, channels, pixels, pixels]."""
        side = pixels or self.pixels
        return torch.randn(self.batch, channels, side, side)

    def values(self, *shape: int) -> Tensor:
        """Return random numbers [batch, *shape]."""
        return torch.randn(self.batch, *shape)

    def times(self) -> Tensor:
        """Return a diffusion time step for each sample [batch]."""
        return torch.randint(0, 1000, (self.batch,))


VOCABULARY = 61
TINY = Size()
WIDE = Size(tokens=128, width=64, inner=160, layers=2, pixels=24, frames=3, samples=3200)

Maker = Callable[[Size, dict[str, Any]], Built]
"""Makes a family at a size, with further fields of its configuration."""


def from_config(module: str, class_name: str, **fields: Any) -> nn.Module:
    """Build a model of ``transformers`` from its configuration, or of ``diffusers`` from keyword arguments."""
    # Imported here: most tests need neither, and each takes seconds to import.
    import importlib

    cls = getattr(importlib.import_module(module), class_name)
    return cls(**fields) if module == "diffusers" else cls(cls.config_class(**fields))
