"""Samples of the transformer's current state, as videos and a contact sheet."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.events import BUS
from ebbtide_recipes.video import clips
from ebbtide_recipes.video.families import Family, Text
from ebbtide_recipes.video.objective import STEPS, dynamic_shift, mix
from ebbtide_recipes.video.source import Source, phase

LOGGER = logging.getLogger("ebbtide.video")

FOLDER = "samples"
Predict = Callable[[torch.Tensor, torch.Tensor, Text], torch.Tensor]
Films = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The input of a sample.

    Attributes:
        caption: The caption.
        text: Its tensors, without a batch.
        shape: Of the latents: ``[C, F, H, W]``.
        reference: Latents of the caption's clip; ``None`` for the user's own prompt.
    """

    caption: str
    text: Text
    shape: tuple[int, int, int, int]
    reference: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of sampling.

    Attributes:
        steps: Steps of the sampler.
        guidance: Classifier-free guidance; 1 is none.
        rate: Frames per second of the videos.
        seed: Seed of the initial noise.
    """

    steps: int = 20
    guidance: float = 1.0
    rate: float = 16.0
    seed: int = 42


def sample(
    predict: Predict,
    family: Family,
    scheduler: Any,
    empty: Text,
    prompt: Prompt,
    sampling: Sampling,
    device: torch.device,
) -> torch.Tensor:
    """Return latents ``[1, C, F, H, W]`` that the pipeline's scheduler makes from noise.

    The noise has its own generator, so that all samples of a prompt begin with the same.

    Args:
        predict: Returns the transformer's prediction of latents, timesteps and text.
        family: The transformer's.
        scheduler: The pipeline's.
        empty: Tensors of the empty caption, for guidance.
        prompt: The input.
        sampling: The settings.
        device: The transformer's.
    """
    scheduler = type(scheduler).from_config(scheduler.config)  # a new one: schedulers are stateful
    set_timesteps(scheduler, family, sampling.steps, tokens=math.prod(prompt.shape[1:]), device=device)
    generator, latents, text = _beginning(prompt, sampling, device)
    without = {name: value[None].to(device) for name, value in empty.items()}
    previous: Any = None
    for number, timestep in enumerate(scheduler.timesteps):
        times = timestep.expand(1)
        scaled = scheduler.scale_model_input(latents, timestep) if hasattr(scheduler, "scale_model_input") else latents
        predicted = predict(scaled, times, text)
        if sampling.guidance != 1.0:
            plain = predict(scaled, times, without)
            predicted = plain + sampling.guidance * (predicted - plain)
        if type(scheduler).__name__ == "CogVideoXDPMScheduler":
            before = scheduler.timesteps[number - 1] if number else None
            latents, previous = scheduler.step(
                predicted, previous, timestep, before, latents, generator=generator, return_dict=False
            )
        else:
            latents = scheduler.step(predicted, timestep, latents, return_dict=False)[0]
    return latents


def sample_student(
    predict: Predict, steps: Sequence[int], prompt: Prompt, sampling: Sampling, device: torch.device
) -> torch.Tensor:
    """Return latents ``[1, C, F, H, W]`` that a distilled student makes from noise, in as many calls as it has steps.

    Each call estimates the clean latents, which get new noise of the next step's level. An ODE sampler of many steps
    would call the student at noise levels that it never saw.

    Args:
        predict: Returns the student's prediction of latents, timesteps and text.
        steps: The student's timesteps, from 1000 down.
        prompt: The input.
        sampling: Rate and seed of its settings; the student has neither guidance nor another number of steps.
        device: The student's.
    """
    generator, latents, text = _beginning(prompt, sampling, device)
    for number, step in enumerate(steps):
        if number:
            noise = torch.randn(latents.shape, generator=generator).to(device)
            latents = mix(latents, noise, torch.full((1,), step / STEPS, device=device))
        latents = latents - step / STEPS * predict(latents, torch.full((1,), float(step), device=device), text)
    return latents


def _beginning(prompt: Prompt, sampling: Sampling, device: torch.device) -> tuple[torch.Generator, torch.Tensor, Text]:
    """Return the samples' generator, the first noise, and the text with a batch."""
    generator = torch.Generator().manual_seed(sampling.seed)
    noise = torch.randn(1, *prompt.shape, generator=generator).to(device)
    return generator, noise, {name: value[None].to(device) for name, value in prompt.text.items()}


def set_timesteps(scheduler: Any, family: Family, steps: int, *, tokens: int, device: torch.device) -> None:
    """Set a scheduler's timesteps as its family's pipeline does."""
    import numpy

    mu = dynamic_shift(scheduler, tokens)
    shift = {} if mu is None else {"mu": mu}
    if family.even_levels and "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
        scheduler.set_timesteps(sigmas=numpy.linspace(1.0, 1 / steps, steps), device=device, **shift)
    else:
        scheduler.set_timesteps(steps, device=device, **shift)


def decode(
    made: Sequence[torch.Tensor], prompts: Sequence[Prompt], source: Source, *, device: torch.device, dtype: torch.dtype
) -> list[Films]:
    """Return each sample's frames ``[F, H, W, 3]``, and those of the clip that it should resemble, if there is one.

    Args:
        made: Latents ``[1, C, F, H, W]`` of each prompt.
        prompts: The prompts.
        source: Has the VAE; without one the first three channels of the latents are shown.
        device: Device of the VAE.
        dtype: Type of its weights.
    """
    with phase("vae"), torch.no_grad():
        vae = None if source.vae_config is None else source.vae(dtype).to(device)
        films: list[Films] = []
        for latents, prompt in zip(made, prompts, strict=True):
            clip = None if prompt.reference is None else prompt.reference[None].to(device)
            films.append((_film(latents, source, vae), None if clip is None else _film(clip, source, vae)))
        del vae
    return films


def write(
    films: Sequence[Films], prompts: Sequence[Prompt], folder: Path, rate: float, *, step: int, decoded: bool
) -> None:
    """Write samples: an .mp4 each, and one contact sheet with the clips they should resemble.

    Args:
        films: As ``decode`` returned them.
        prompts: The prompts.
        folder: The run's output folder.
        rate: Frames per second.
        step: Finished steps.
        decoded: Whether a VAE decoded them.
    """
    places = folder / FOLDER
    places.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, torch.Tensor]] = []
    videos: list[str] = []
    for number, ((film, clip), prompt) in enumerate(zip(films, prompts, strict=True)):
        path = places / f"step-{step:06d}-{number}.mp4"
        clips.write(path, film, rate=rate)
        videos.append(f"{FOLDER}/{path.name}")
        rows += [] if clip is None else [(f"clip: {prompt.caption}", clip)]
        rows.append((f"step {step}: {prompt.caption}", film))
    page = places / f"step-{step:06d}.png"
    clips.sheet(page, rows)
    if not decoded:
        LOGGER.warning("the pipeline has no VAE: samples show three channels of the latents")
    BUS.emit(
        "sample",
        step=step,
        sheet=f"{FOLDER}/{page.name}",
        videos=videos,
        captions=[prompt.caption for prompt in prompts],
        decoded=decoded,
    )
    LOGGER.info("samples after step %d are in %s", step, page)


def _film(latents: torch.Tensor, source: Source, vae: Any) -> torch.Tensor:
    if vae is not None:
        return clips.as_bytes(source.family.decode(vae, latents.to(next(iter(vae.parameters()), latents).device))[0])
    shown = latents[0, :3].float()
    shown = (
        shown.expand(3, -1, -1, -1) if len(shown) == 1 else torch.nn.functional.pad(shown, (0,) * 7 + (3 - len(shown),))
    )
    return clips.as_bytes(shown / shown.abs().amax().clamp_min(1e-6))
