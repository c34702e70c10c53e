"""A video transformer to plan for: from its config alone, on the meta device, with or without adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide.base.files import json_object
from ebbtide_recipes.plan.model import Outline
from ebbtide_recipes.video import adapters
from ebbtide_recipes.video.families import Condition, check_size, family_of
from ebbtide_recipes.video.objective import Denoiser, Draws
from ebbtide_recipes.video.opening import open_source
from ebbtide_recipes.video.source import Source

if TYPE_CHECKING:
    from ebbtide_recipes.video.config import VideoConfig

_TEXT: Mapping[str, Mapping[str, str]] = {
    "wan": {"prompt_embeds": "text_dim"},
    "hunyuan_video": {"prompt_embeds": "text_embed_dim", "pooled_prompt_embeds": "pooled_projection_dim"},
    "ltx": {"prompt_embeds": "caption_channels"},
    "cogvideox": {"prompt_embeds": "text_embed_dim"},
    "cosmos": {"prompt_embeds": "text_embed_dim"},
}
"""For each family the settings of its transformer that say how wide the tensors of a caption are."""

PREFIX = "transformer."
"""Begins the paths of blocks in the module that computes a loss."""

_POOLED, _MASK = "pooled_prompt_embeds", "prompt_attention_mask"


class VideoSubject:
    """A video transformer to plan for.

    Args:
        config: Of the recipe that would train it.

    Raises:
        DataError: Its config cannot be found or read, or its family is not supported.
        ConfigError: Clips of this size do not make a whole number of tokens.
    """

    def __init__(self, config: VideoConfig) -> None:
        self._config = config
        self._source = _source(config.model, seed=config.seed)
        frames, height, width = self._source.default_size
        self._size = (config.num_frames or frames, config.height or height, config.width or width)
        check_size(*self._size, ratios=self._source.ratios, patch=self._source.patch)

    def outline(self, dtype: str) -> Outline:
        """Return the transformer without weights, inside a module that computes a loss from a batch.

        Args:
            dtype: Of its weights.

        Raises:
            DataError: The config describes no transformer.
            ConfigError: Adapters do not fit.
        """
        transformer = self._source.outline(getattr(torch, dtype))
        if self._config.train_type == "lora":
            with torch.device("meta"):
                adapters.put_on(transformer, self._config)
        clips, (frames, height, width) = self._config.per_device_train_batch_size, self._size
        in_time, along = self._source.patch
        condition = Condition(ratios=self._source.ratios)
        tokens = (self._latents[0] // in_time) * (self._latents[1] // along) * (self._latents[2] // along)
        return Outline(
            module=_Loss(transformer, self._source.family, condition, Draws(), scheduler=None).train(),
            dtype=dtype,
            tokens=clips * tokens,
            amount=f"{clips} x {frames} frames of {width} x {height} pixels ({tokens} tokens)",
        )

    def batch(self) -> dict[str, Any]:
        """Return a micro-batch without memory: latents, timesteps, and the tensors of captions."""
        clips, family = self._config.per_device_train_batch_size, self._source.family
        settings = self._source.transformer_config or {}
        length = self._config.text_length or family.text_length
        text: dict[str, torch.Tensor] = {}
        for name in family.text:
            if name == _MASK:
                text[name] = torch.ones(1, 1, dtype=torch.long).expand(clips, length)
                continue
            projected = settings.get("use_crossattn_projection")  # as in every published Cosmos 2.5
            width = int(settings["crossattn_proj_in_channels" if projected else _TEXT[family.name][name]])
            shape = (clips, width) if name == _POOLED else (clips, length, width)
            text[name] = torch.zeros(shape, device="meta")
        latents = torch.zeros(clips, self._source.channels, *self._latents, device="meta")
        return {"latents": latents, "timestep": torch.zeros(clips, device="meta"), "text": text}

    @property
    def _latents(self) -> tuple[int, int, int]:
        frames, height, width = self._size
        in_time, along = self._source.ratios
        return (frames - 1) // in_time + 1, height // along, width // along


class _Loss(Denoiser):
    """A transformer and a loss that reads its whole prediction, as flow matching's does."""

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.predict(self.transformer, latents, timestep, text), latents)


class _Alone(Source):
    """A transformer without a pipeline around it."""

    def __init__(self, path: Path) -> None:
        self.folder, self.name, self.index, self.vae_config = path.parent, str(path), {}, None
        expected = "the config.json of a transformer of diffusers"
        hint = "the folder transformer/ of a pipeline holds one"
        self.transformer_config = json_object(path, str(path), expected=expected, hint=hint)
        self.family = family_of(self.transformer_config.get("_class_name"), None)
        self.family.check(self.transformer_config, self.index)


def _source(name: str, *, seed: int) -> Source:
    """Return the facts about a pipeline; a transformer alone is assumed to have its family's usual VAE."""
    path = Path(name).expanduser()
    if path.is_file():
        return _Alone(path)
    if (path / "config.json").is_file() and not (path / "transformer").is_dir():
        return _Alone(path / "config.json")
    return open_source(name, seed=seed)
