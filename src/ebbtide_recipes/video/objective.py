"""The loss of fine-tuning: flow matching's velocity, or a diffusion scheduler's v-prediction.

[Note: draws]
Timesteps and noise are drawn inside the forward, from the device's generator. Every checkpoint has its state, so a
resumed run draws the same numbers; activation checkpointing repeats blocks, never this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ebbtide.wrap import find_blocks
from ebbtide_recipes.video.families import Condition, Family, Text

STEPS = 1000
"""Timesteps of a whole trajectory, in every scheduler that these families come with."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How timesteps are drawn and weighted.

    Attributes:
        scheme: ``uniform``, ``logit_normal`` or ``mode``: the density of the noise levels.
        logit_mean: Of the logit-normal density; above 0 there is less noise, as in diffusers' scripts.
        logit_std: Of the logit-normal density.
        mode_scale: Of the density ``mode``.
        shift: Moves noise levels up: ``shift * s / (1 + (shift - 1) * s)``; 1 leaves them, ``None``: the scheduler's.
        caption_dropout: Share of the clips that are trained with the empty caption.
    """

    scheme: str = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    shift: float | None = None
    caption_dropout: float = 0.0

    def sigmas(self, latents: torch.Tensor, scheduler: Any) -> torch.Tensor:
        """Draw a noise level between 0 and 1 for each clip of a batch ``[B, C, F, H, W]``, as float32."""
        from diffusers.training_utils import compute_density_for_timestep_sampling

        drawn = compute_density_for_timestep_sampling(
            self.scheme, len(latents), self.logit_mean, self.logit_std, self.mode_scale, device=latents.device
        )
        levels = 1.0 - drawn  # diffusers draws places in the scheduler's timesteps, which descend
        shift = shift_of(scheduler, latents.shape[2:].numel()) if self.shift is None else self.shift
        return shift * levels / (1 + (shift - 1) * levels)


class Denoiser(nn.Module):
    """The common part of fine-tuning and distillation: a transformer, its calls, and mixing of noise.

    Args:
        transformer: The trained transformer.
        family: Its family.
        condition: The inputs of predictions besides latents and text.
        draws: How timesteps are drawn.
        scheduler: The pipeline's scheduler.
        empty: Embeddings of the empty caption.
    """

    def __init__(
        self,
        transformer: nn.Module,
        family: Family,
        condition: Condition,
        draws: Draws,
        scheduler: Any,
        *,
        empty: Text | None = None,
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.family, self.condition, self.draws, self.scheduler = family, condition, draws, scheduler
        self.empty: Text = dict(empty or {})
        self._no_split_modules = block_classes(transformer)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Let diffusers checkpoint the blocks of the trained transformers; it is non-reentrant by default."""
        for part in self.children():
            if any(parameter.requires_grad for parameter in part.parameters()):
                part.enable_gradient_checkpointing()

    def leave_frozen_out(self) -> None:
        """Leave frozen parameters out of ``state_dict`` from now on; loading one leaves them as they are."""

        def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
            for name in _frozen(module):
                state.pop(f"{prefix}{name}", None)

        def forgive(module: nn.Module, keys: Any) -> None:
            frozen = _frozen(module)
            keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]

        self.register_state_dict_post_hook(drop)
        self.register_load_state_dict_post_hook(forgive)

    gradient_checkpointing_enable = activation_checkpointing_enable
    """What transformers before 5.20 calls it."""

    def predict(self, part: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text) -> torch.Tensor:
        """Return a transformer's prediction in float32."""
        dtype = part.dtype
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in text.items()}
        return self.family.predict(part, latents.to(dtype), timestep, cast, self.condition).float()

    def prediction_at(self, latents: torch.Tensor, timestep: Sequence[float], text: Text) -> dict[str, torch.Tensor]:
        """Return the trained transformer's prediction at given timesteps, as ``forward`` does for samples."""
        times = torch.tensor(timestep, device=latents.device)
        return {"prediction": self.predict(self.transformer, latents, times, text)}

    def flow_loss(self, part: Any, latents: torch.Tensor, text: Text) -> torch.Tensor:
        """Return flow matching's loss of a transformer, at noise levels that are drawn here."""
        sigmas = self.draws.sigmas(latents, self.scheduler)
        noise = torch.randn_like(latents)
        predicted = self.predict(part, mix(latents, noise, sigmas), sigmas * STEPS, text)
        return nn.functional.mse_loss(predicted, noise - latents)

    def dropped(self, text: Text) -> Text:
        """Replace some captions by the empty one."""
        if not self.draws.caption_dropout:
            return text
        some = next(iter(text.values()))
        without = torch.rand(len(some), device=some.device) < self.draws.caption_dropout
        return {
            name: torch.where(without.view(-1, *[1] * (value.dim() - 1)), self.empty[name].to(value), value)
            for name, value in text.items()
        }


def _frozen(module: nn.Module) -> set[str]:
    """Return the names of the frozen parameters."""
    return {name for name, part in module.named_parameters(remove_duplicate=False) if not part.requires_grad}


class FineTuning(Denoiser):
    """A transformer and its loss."""

    def forward(
        self, latents: torch.Tensor, text: Text, timestep: Sequence[float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the loss of a batch, or with a timestep the prediction.

        Sampling also calls this: under FSDP the outermost module gathers the weights outside of blocks.

        Args:
            latents: ``[B, C, F, H, W]``.
            text: The captions' tensors.
            timestep: ``[B]``; then ``latents`` are noisy already. Numbers: a tensor would be rounded to FSDP's type.
        """
        if timestep is not None:
            return self.prediction_at(latents, timestep, text)
        text = self.dropped(text)
        latents = latents.float()
        if self.family.velocity:
            return {"loss": self.flow_loss(self.transformer, latents, text)}
        return {"loss": self._diffusion(latents, text)}

    def _diffusion(self, latents: torch.Tensor, text: Text) -> torch.Tensor:
        """Return the loss of the v-prediction, at timesteps of the scheduler."""
        # diffusers' CogVideoX script weights the error of the clean latents by 1 / (1 - alphas_cumprod): the same loss.
        last = self.scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, last, (len(latents),), device=latents.device)
        noise = torch.randn_like(latents)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        target = self.scheduler.get_velocity(latents, noise, timesteps)
        return nn.functional.mse_loss(self.predict(self.transformer, noisy, timesteps, text), target)


def block_classes(transformer: nn.Module) -> list[str]:
    """Return the names of the classes of a transformer's blocks: FSDP shards by them, and adapters are put on them.

    They are those that diffusers names and the transformer has; LTX's names none, so its blocks are found by structure.
    """
    present = {type(module).__name__ for module in transformer.modules()}
    named = [name for name in getattr(transformer, "_no_split_modules", None) or () if name in present]
    return named or sorted({type(block).__name__ for block, _ in find_blocks(transformer)})


def mix(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Return ``(1 - sigma) * latents + sigma * noise``, with one sigma per clip."""
    level = sigmas.view(-1, *[1] * (latents.dim() - 1))
    return (1 - level) * latents + level * noise


def shift_of(scheduler: Any, tokens: int) -> float:
    """Return the shift of a pipeline's scheduler for a clip of so many latents."""
    mu, config = dynamic_shift(scheduler, tokens), scheduler.config
    if mu is None:
        return float(config.get("flow_shift") or config.get("shift") or 1.0)
    return mu if config.get("time_shift_type") == "linear" else math.exp(mu)


def dynamic_shift(scheduler: Any, tokens: int) -> float | None:
    """Return what diffusers calls ``mu``: a shift that grows with the latents of a clip; ``None``: it is fixed."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return None
    from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

    names = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    return calculate_shift(tokens, *(config.get(name, default) for name, default in names.items()))
