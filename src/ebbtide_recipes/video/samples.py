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
from ebbtide_recipes.video.families import Text
from ebbtide_recipes.video.objective import STEPS, dynamic_shift, mix
from ebbtide_recipes.video.source import Source, phase

LOGGER = logging.getLogger("ebbtide.video")

FOLDER = "samples"
Predict = Callable[[torch.Tensor, torch.Tensor, Text], torch.Tensor]


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
    """The samples to make.

    Attributes:
        source: The pipeline; its VAE decodes them. Without one the first three channels of the latents are shown.
        prompts: The inputs; empty: no samples.
        every: Steps between two samplings; ``None``: only before training and at the end.
        steps: Steps of the sampler.
        guidance: Classifier-free guidance; 1 is none.
        rate: Frames per second of the videos.
        seed: Seed of the initial noise.
        dtype: Type of the VAE's weights.
    """

    source: Source
    prompts: Sequence[Prompt]
    every: int | None = None
    steps: int = 20
    guidance: float = 1.0
    rate: float = 16.0
    seed: int = 42
    dtype: torch.dtype = torch.float32


def sample(
    predict: Predict, scheduler: Any, empty: Text, prompt: Prompt, sampling: Sampling, device: torch.device
) -> torch.Tensor:
    """Return latents ``[1, C, F, H, W]`` that the pipeline's scheduler makes from noise.

    The noise has its own generator, so that all samples of a prompt begin with the same.

    Args:
        predict: Returns the transformer's prediction of latents, timesteps and text.
        scheduler: The pipeline's.
        empty: Tensors of the empty caption, for guidance.
        prompt: The input.
        sampling: The settings.
        device: The transformer's.
    """
    scheduler = type(scheduler).from_config(scheduler.config)  # a new one: schedulers are stateful
    _set_timesteps(scheduler, sampling, tokens=math.prod(prompt.shape[1:]), device=device)
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


def _set_timesteps(scheduler: Any, sampling: Sampling, *, tokens: int, device: torch.device) -> None:
    """Set a scheduler's timesteps as the pipeline does."""
    import numpy

    steps = sampling.steps
    if steps == 1 and scheduler.config.get("shift_terminal"):
        # Of levels that begin at 1, diffusers stretches the last one to the terminal: a single one cannot be both.
        scheduler.register_to_config(shift_terminal=None)
    mu = dynamic_shift(scheduler, tokens)
    shift = {} if mu is None else {"mu": mu}
    if sampling.source.family.even_levels and "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
        scheduler.set_timesteps(sigmas=numpy.linspace(1.0, 1 / steps, steps), device=device, **shift)
    else:
        scheduler.set_timesteps(steps, device=device, **shift)


def write(made: Sequence[torch.Tensor], sampling: Sampling, folder: Path, *, step: int, device: torch.device) -> None:
    """Decode samples, and write an .mp4 each and one contact sheet with the clips they should resemble.

    Args:
        made: Latents ``[1, C, F, H, W]`` of each prompt.
        sampling: The settings.
        folder: The run's output folder.
        step: Finished steps.
        device: Device of the VAE.
    """
    source, films = sampling.source, list[torch.Tensor]()
    rows: list[tuple[str, torch.Tensor]] = []
    with phase("vae"), torch.no_grad():
        vae = None if source.vae_config is None else source.vae(sampling.dtype).to(device)
        for latents, prompt in zip(made, sampling.prompts, strict=True):
            films.append(_film(latents, source, vae))
            if prompt.reference is not None:
                rows.append((f"clip: {prompt.caption}", _film(prompt.reference[None].to(device), source, vae)))
            rows.append((f"step {step}: {prompt.caption}", films[-1]))
        del vae
    places = [folder / FOLDER / f"step-{step:06d}-{number}.mp4" for number in range(len(films))]
    page = folder / FOLDER / f"step-{step:06d}.png"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        for path, film in zip(places, films, strict=True):
            clips.write(path, film, rate=sampling.rate)
        clips.sheet(page, rows)
    except OSError as error:  # such as a full disk, which must not end a training run
        LOGGER.warning("samples after step %d could not be written: %s", step, error)
        return
    if source.vae_config is None:
        LOGGER.warning("the pipeline has no VAE: samples show three channels of the latents")
    BUS.emit(
        "sample",
        step=step,
        sheet=f"{FOLDER}/{page.name}",
        videos=[f"{FOLDER}/{path.name}" for path in places],
        captions=[prompt.caption for prompt in sampling.prompts],
        decoded=source.vae_config is not None,
    )
    LOGGER.info("samples after step %d are in %s", step, page)


def _film(latents: torch.Tensor, source: Source, vae: Any) -> torch.Tensor:
    if vae is not None:
        return clips.as_bytes(source.family.decode(vae, latents.to(next(iter(vae.parameters()), latents).device))[0])
    shown = latents[0, :3].float()
    if len(shown) == 1:
        shown = shown.expand(3, -1, -1, -1)
    shown = torch.nn.functional.pad(shown, (0,) * 7 + (3 - len(shown),))
    return clips.as_bytes(shown / shown.abs().amax().clamp_min(1e-6))
