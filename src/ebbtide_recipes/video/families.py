"""The families of video transformers: calls, layout of latents, and outputs of the text encoders.

[Note: one prediction for training and sampling]
``Family.predict`` takes latents ``[B, C, F, H, W]``, a timestep ``[B]`` in the scheduler's units and the tensors of the
captions, and returns the transformer's prediction in the layout of the latents. The training objective and the sampler
both go through it, and a test compares it bitwise with diffusers' own pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ebbtide.base.errors import ConfigError, DataError

Text = dict[str, torch.Tensor]
Config = Mapping[str, Any]


GUIDANCE = 6.0
"""Guidance scale given to transformers that embed it, unless the user gives one."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The inputs of a prediction besides latents, timestep and text.

    Attributes:
        frame_rate: Frames per second of the clips.
        guidance: Embedded guidance scale, for guidance-distilled transformers.
        ratios: Pixels per latent: in time, and along each side.
    """

    frame_rate: float = 16.0
    guidance: float = GUIDANCE
    ratios: tuple[int, int] = (4, 8)


class Family:
    """A family of transformers; the base class is called as Wan's is."""

    name: ClassVar[str]
    transformer: ClassVar[str]
    pipeline: ClassVar[str]
    text: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    """Names of the first tensors that the pipeline's ``encode_prompt`` returns, in its order."""
    text_length: ClassVar[int] = 512
    frame_rate: ClassVar[float] = 16.0
    """Frames per second that clips are taken to have, unless the user says how many."""
    size: ClassVar[tuple[int, int, int]] = (81, 480, 832)
    """Frames, height and width that its pipeline makes by default."""
    captions_need_vae: ClassVar[bool] = False
    """Whether the pipeline that embeds captions cannot be made without its VAE."""
    velocity: ClassVar[bool] = True
    """Whether the target is flow matching's velocity; else the v-prediction of a diffusion scheduler."""
    even_levels: ClassVar[bool] = False
    """Whether its pipeline gives the scheduler noise levels at equal distances; else the scheduler chooses them."""

    def predict(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text, condition: Condition
    ) -> torch.Tensor:
        """Return the transformer's prediction, ``[B, C, F, H, W]``; see the note at the head of this file."""
        return _called(transformer, latents, timestep, text)

    def ratios(self, vae: Config) -> tuple[int, int]:
        """Return the frames, and the pixels along a side, per latent, from the VAE's config, under either name."""
        in_time = vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio") or 4
        return int(in_time), int(vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio") or 8)

    def vae_channels(self, vae: Config) -> int:
        """Return the channels of the VAE's latents."""
        return int(vae["z_dim"] if "z_dim" in vae else vae["latent_channels"])

    def channels(self, transformer: Config) -> int:
        """Return the channels of the latents that a transformer takes."""
        return int(transformer["in_channels"])

    def patch(self, transformer: Config) -> tuple[int, int]:
        """Return the latents, in time and along a side, per token."""
        size = transformer["patch_size"]
        if isinstance(size, int):
            return int(transformer.get("patch_size_t") or 1), size
        return int(size[0]), int(size[1])

    def embeds_guidance(self, transformer: Config) -> bool:
        """Whether a transformer takes a guidance scale as an input."""
        return False

    def check(self, transformer: Config, index: Config) -> None:
        """Reject transformers of the family that this recipe cannot train.

        Raises:
            DataError: The pipeline has one.
        """

    def encode(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return latents in the transformer's scale: the mean of the VAE's distribution, not a sample.

        Args:
            vae: The pipeline's VAE.
            pixels: ``[B, 3, F, H, W]`` from -1 to 1.
        """
        latents = vae.encode(pixels, return_dict=False)[0].mode().float()
        mean, std, factor = _statistics(latents, vae)
        return (latents - mean) * factor / std

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Return pixels of latents that ``encode`` or the sampler returned."""
        mean, std, factor = _statistics(latents, vae)
        return self._decode(vae, (latents * std / factor + mean).to(vae.dtype)).float()

    def _decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        return vae.decode(latents, return_dict=False)[0]


class Wan(Family):
    """Wan 2.1 and 2.2 text-to-video."""

    name = "wan"
    transformer = "WanTransformer3DModel"
    pipeline = "WanPipeline"

    def check(self, transformer: Config, index: Config) -> None:
        """Refuse Wan 2.2's pair of transformers, one for each half of the noise levels."""
        if index.get("boundary_ratio") is not None:
            raise DataError(
                f"the pipeline has two transformers (boundary_ratio {index['boundary_ratio']})",
                expected="a pipeline with one transformer",
                hint="Wan 2.1 and Wan 2.2 TI2V-5B have one; Wan 2.2 A14B has two, which this release does not support",
            )


class HunyuanVideo(Family):
    """HunyuanVideo text-to-video."""

    name = "hunyuan_video"
    transformer = "HunyuanVideoTransformer3DModel"
    pipeline = "HunyuanVideoPipeline"
    text = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
    text_length = 256
    size = (129, 720, 1280)
    even_levels = True

    def predict(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text, condition: Condition
    ) -> torch.Tensor:
        """Return the prediction; the guidance is embedded in thousandths, as the timestep is."""
        guidance = torch.full((len(latents),), condition.guidance * 1000.0, dtype=latents.dtype, device=latents.device)
        mask, pooled = text["prompt_attention_mask"], text["pooled_prompt_embeds"]
        own = {"encoder_attention_mask": mask, "pooled_projections": pooled, "guidance": guidance}
        return _called(transformer, latents, timestep, text, **own)

    def embeds_guidance(self, transformer: Config) -> bool:
        """Whether the config says so; diffusers' default is yes."""
        return bool(transformer.get("guidance_embeds", True))


class Ltx(Family):
    """LTX-Video text-to-video; latents travel as a sequence of tokens."""

    name = "ltx"
    transformer = "LTXVideoTransformer3DModel"
    pipeline = "LTXPipeline"
    text = ("prompt_embeds", "prompt_attention_mask")
    text_length = 128
    frame_rate = 25.0
    size = (161, 512, 704)
    even_levels = True

    def predict(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text, condition: Condition
    ) -> torch.Tensor:
        """Return the prediction; latents are packed for the call and unpacked after it."""
        from diffusers import LTXPipeline

        frames, height, width = latents.shape[-3:]
        in_time, along = condition.ratios
        own = {
            "encoder_attention_mask": text["prompt_attention_mask"],
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (in_time / condition.frame_rate, along, along),
        }
        packed = _called(transformer, LTXPipeline._pack_latents(latents), timestep, text, **own)
        return LTXPipeline._unpack_latents(packed, frames, height, width)

    def ratios(self, vae: Config) -> tuple[int, int]:
        """Return the ratios that follow from patches and downsampling blocks."""
        halvings = sum(map(bool, vae.get("spatio_temporal_scaling") or ()))
        in_time = vae.get("temporal_compression_ratio") or int(vae.get("patch_size_t") or 1) * 2**halvings
        along = vae.get("spatial_compression_ratio") or int(vae.get("patch_size") or 1) * 2**halvings
        return int(in_time), int(along)

    def _decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        if not vae.config.timestep_conditioning:
            return vae.decode(latents, return_dict=False)[0]
        return vae.decode(latents, latents.new_zeros(len(latents)), return_dict=False)[0]


class CogVideoX(Family):
    """CogVideoX text-to-video: a diffusion model; its target is the v-prediction of its scheduler."""

    name = "cogvideox"
    transformer = "CogVideoXTransformer3DModel"
    pipeline = "CogVideoXPipeline"
    text_length = 226
    size = (49, 480, 720)
    velocity = False

    def predict(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text, condition: Condition
    ) -> torch.Tensor:
        """Return the prediction; the call takes frames before channels."""
        from diffusers import CogVideoXPipeline

        frames, height, width = latents.shape[-3:]
        along = condition.ratios[1]
        rotary = None
        if transformer.config.use_rotary_positional_embeddings:
            rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
                _Sized(transformer, along), height * along, width * along, frames, latents.device
            )
        predicted = _called(transformer, latents.transpose(1, 2), timestep, text, image_rotary_emb=rotary)
        return predicted.transpose(1, 2)

    def ratios(self, vae: Config) -> tuple[int, int]:
        """Return the ratios; every block but the last halves the sides."""
        return int(vae.get("temporal_compression_ratio") or 4), 2 ** (len(vae["block_out_channels"]) - 1)


class Cosmos(Family):
    """Cosmos-Predict 2.5: rectified flow from text; earlier Cosmos pipelines precondition their noise in other ways."""

    name = "cosmos"
    transformer = "CosmosTransformer3DModel"
    pipeline = "Cosmos2_5_PredictBasePipeline"
    size = (93, 704, 1280)
    captions_need_vae = True

    def predict(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text, condition: Condition
    ) -> torch.Tensor:
        """Return the prediction; there is no conditioning frame, so the condition's mask is zero."""
        along = condition.ratios[1]
        height, width = latents.shape[-2:]
        padding = latents.new_zeros(1, 1, height * along, width * along)
        own = {"condition_mask": torch.zeros_like(latents[:, :1]), "padding_mask": padding}
        return _called(transformer, latents, timestep / 1000.0, text, **own)

    def channels(self, transformer: Config) -> int:
        """Return the channels of the latents; one more is the condition's mask."""
        return int(transformer["in_channels"]) - 1

    def check(self, transformer: Config, index: Config) -> None:
        """Refuse a mask that is padded by torchvision where that is not installed."""
        from ebbtide.base.extras import check_installed

        if transformer.get("concat_padding_mask", True):
            check_installed("torchvision", extra="video", use="a Cosmos transformer with a padding mask")


FAMILIES: tuple[Family, ...] = (Wan(), HunyuanVideo(), Ltx(), CogVideoX(), Cosmos())


def family_of(transformer_class: str | None, pipeline_class: str | None) -> Family:
    """Return the family of a pipeline.

    Args:
        transformer_class: ``_class_name`` of the transformer's config.
        pipeline_class: ``_class_name`` of ``model_index.json``; ``None``: a transformer alone.

    Raises:
        DataError: The transformer or the pipeline is not supported.
    """
    family = next((one for one in FAMILIES if one.transformer == transformer_class), None)
    if family is None:
        names = [one.transformer for one in FAMILIES]
        raise DataError(
            f"the transformer is a {transformer_class}" if transformer_class else "config.json has no _class_name",
            expected=f"one of {', '.join(names)}",
            hint="train other transformers with a script of your own: `ebbtide run -- python train.py`",
        )
    if pipeline_class is not None and pipeline_class != family.pipeline:
        raise DataError(
            f"the pipeline is a {pipeline_class}",
            expected=f"{family.pipeline}: text to video",
            hint="pipelines that start from images, or that scale noise in another way, are not supported",
        )
    return family


def check_size(frames: int, height: int, width: int, *, ratios: tuple[int, int], patch: tuple[int, int]) -> None:
    """Reject a clip's size that does not make a whole number of tokens.

    Raises:
        ConfigError: A side is not divisible, or the frames do not make whole latents.
    """
    multiple = ratios[1] * patch[1]
    for name, value in (("height", height), ("width", width)):
        if value % multiple:
            near = max(multiple, round(value / multiple) * multiple)
            raise ConfigError(
                f"{name} is {value}",
                expected=f"a multiple of {multiple} ({ratios[1]} pixels per latent, {patch[1]} latents per token)",
                hint=f"--{name} {near} is the nearest",
            )
    in_time = ratios[0]
    if (frames - 1) % in_time or ((frames - 1) // in_time + 1) % patch[0]:
        near = nearest_frames(frames, ratios=ratios, patch=patch)
        raise ConfigError(
            f"num_frames is {frames}",
            expected=f"1 and a multiple of {in_time}" + (f", {patch[0]} latents per token" if patch[0] > 1 else ""),
            hint=f"--num_frames {near} is the nearest",
        )


def nearest_frames(frames: int, *, ratios: tuple[int, int], patch: tuple[int, int]) -> int:
    """Return the nearest number of frames that makes whole tokens; never 0."""
    tokens = max(1, round(((frames - 1) / ratios[0] + 1) / patch[0]))
    return (tokens * patch[0] - 1) * ratios[0] + 1


def _called(transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, text: Text, **own: object) -> torch.Tensor:
    embeds = text["prompt_embeds"]
    return transformer(
        hidden_states=latents, timestep=timestep, encoder_hidden_states=embeds, return_dict=False, **own
    )[0]


@dataclass(frozen=True)
class _Sized:
    """The attributes that CogVideoX's pipeline reads to make rotary embeddings."""

    transformer: Any
    vae_scale_factor_spatial: int


def _statistics(latents: torch.Tensor, vae: Any) -> tuple[torch.Tensor | float, torch.Tensor | float, float]:
    """Return mean, standard deviation and factor of a VAE's latents; LTX keeps the first two among its weights."""
    buffers = dict(vae.named_buffers(recurse=False))

    def shaped(name: str, absent: float) -> torch.Tensor | float:
        values = buffers.get(name, vae.config.get(name))
        if values is None:
            return absent
        return torch.as_tensor(values).to(latents).view(1, -1, 1, 1, 1)

    return shaped("latents_mean", 0.0), shaped("latents_std", 1.0), float(vae.config.get("scaling_factor") or 1.0)
