"""Families that generate images and video: U-Nets, an autoencoder, and diffusion transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.sizes import Built, Maker, Size, from_config

Parts = tuple[dict[str, Any], dict[str, Any]]
CAPTION = 24
"""Width of the text that conditions a picture."""


def diffusion(class_name: str, blocks: str, parts: Callable[[Size], Parts]) -> Maker:
    """A model of diffusers: ``parts`` gives its configuration and its batch."""

    def make(size: Size, changes: dict[str, Any]) -> Built:
        fields, batch = parts(size)
        return from_config("diffusers", class_name, **(fields | changes)), batch, blocks

    return make


def _heads(size: Size) -> dict[str, Any]:
    return {"num_attention_heads": 4, "attention_head_dim": size.width // 4, "num_layers": 2}


def _words(size: Size) -> int:
    return min(size.tokens, 24)


def _caption(size: Size) -> Tensor:
    return size.values(_words(size), CAPTION)


def _latent(size: Size) -> Tensor:
    return size.image(4)


def _unet(size: Size) -> dict[str, Any]:
    return {
        "sample_size": size.pixels // 2,
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }


def _noise(size: Size, channels: int) -> dict[str, Any]:
    return {"sample": size.image(channels, size.pixels // 2), "timestep": size.times()}


def _unet2d(size: Size) -> Parts:
    kinds = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    }
    return _unet(size) | kinds | {"dropout": 0.1}, _noise(size, 3)


def _unet2d_condition(size: Size) -> Parts:
    kinds = {
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    }
    fields = _unet(size) | kinds | {"cross_attention_dim": CAPTION, "attention_head_dim": 4}
    return fields, _noise(size, 4) | {"encoder_hidden_states": _caption(size)}


def _vae(size: Size) -> Parts:
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    return _unet(size) | kinds, {"sample": _noise(size, 3)["sample"]}


def _dit(size: Size) -> Parts:
    fields = _heads(size) | {
        "sample_size": size.pixels,
        "norm_num_groups": 4,
        "num_embeds_ada_norm": 10,
        "dropout": 0.1,
    }
    batch = {"hidden_states": _latent(size), "timestep": size.times() % 10, "class_labels": size.times() % 10}
    return fields, batch


def _pixart(size: Size) -> Parts:
    fields = _heads(size) | {
        "sample_size": size.pixels,
        "cross_attention_dim": size.width,
        "caption_channels": CAPTION,
        "norm_num_groups": 4,
        "use_additional_conditions": False,
    }
    batch = {"hidden_states": _latent(size), "timestep": size.times(), "encoder_hidden_states": _caption(size)}
    return fields, batch


def _flux(size: Size) -> Parts:
    fields = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": CAPTION,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
        "guidance_embeds": True,
    }
    patches, words = (size.pixels // 2) ** 2, _words(size)
    batch = {
        "hidden_states": size.values(patches, 16),
        "encoder_hidden_states": size.values(words, CAPTION),
        "pooled_projections": size.values(16),
        "timestep": torch.rand(size.batch),
        "guidance": torch.rand(size.batch),
        "img_ids": torch.arange(3 * patches).view(patches, 3) % 8,
        "txt_ids": torch.zeros(words, 3, dtype=torch.long),
    }
    return fields, batch


def _sd3(size: Size) -> Parts:
    fields = _heads(size) | {
        "sample_size": size.pixels,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": CAPTION,
        "caption_projection_dim": size.width,
        "pooled_projection_dim": 16,
        "pos_embed_max_size": 32,
        "qk_norm": "rms_norm",
        "num_layers": 3,
    }
    batch = {
        "hidden_states": _latent(size),
        "encoder_hidden_states": _caption(size),
        "pooled_projections": size.values(16),
        "timestep": size.times(),
    }
    return fields, batch


def _sana(size: Size) -> Parts:
    fields = _heads(size) | {
        "in_channels": 4,
        "out_channels": 4,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": size.width // 4,
        "cross_attention_dim": size.width,
        "caption_channels": CAPTION,
        "sample_size": size.pixels,
        "patch_size": 2,
    }
    batch = {"hidden_states": _latent(size), "timestep": size.times(), "encoder_hidden_states": _caption(size)}
    return fields, batch


def _film(size: Size) -> Tensor:
    return size.values(4, size.frames, size.pixels // 2, size.pixels // 2)


def _wan(size: Size) -> Parts:
    fields = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": CAPTION,
        "freq_dim": 16,
        "ffn_dim": size.inner,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    batch = {"hidden_states": _film(size), "timestep": size.times(), "encoder_hidden_states": _caption(size)}
    return fields, batch


def _ltx(size: Size) -> Parts:
    fields = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "cross_attention_dim": 64,
        "num_layers": 2,
        "caption_channels": CAPTION,
    }
    side, words = size.pixels // 2, _words(size)
    batch = {
        "hidden_states": size.values(size.frames * side * side, 8),
        "encoder_hidden_states": _caption(size),
        "timestep": size.times(),
        "encoder_attention_mask": torch.ones(size.batch, words, dtype=torch.long),
        "num_frames": size.frames,
        "height": side,
        "width": side,
    }
    return fields, batch


def _cogvideox(size: Size) -> Parts:
    side, words = size.pixels // 2, _words(size)
    fields = {
        "num_attention_heads": 4,
        "attention_head_dim": size.width // 4,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": CAPTION,
        "num_layers": 2,
        "sample_width": side,
        "sample_height": side,
        "sample_frames": 4 * size.frames - 3,
        "max_text_seq_length": words,
        "dropout": 0.1,
    }
    batch = {
        "hidden_states": size.values(size.frames, 4, side, side),
        "encoder_hidden_states": _caption(size),
        "timestep": size.times(),
    }
    return fields, batch


def _hunyuan_video(size: Size) -> Parts:
    fields = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": CAPTION,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    }
    words = _words(size)
    batch = {
        "hidden_states": _film(size),
        "timestep": size.times(),
        "encoder_hidden_states": _caption(size),
        "encoder_attention_mask": torch.ones(size.batch, words, dtype=torch.long),
        "pooled_projections": size.values(16),
        "guidance": torch.rand(size.batch),
    }
    return fields, batch


DIFFUSION: dict[str, Maker] = {
    "unet2d": diffusion("UNet2DModel", "down_blocks", _unet2d),
    "unet2d_condition": diffusion("UNet2DConditionModel", "down_blocks", _unet2d_condition),
    "vae": diffusion("AutoencoderKL", "encoder.down_blocks", _vae),
    "dit": diffusion("DiTTransformer2DModel", "transformer_blocks", _dit),
    "pixart": diffusion("PixArtTransformer2DModel", "transformer_blocks", _pixart),
    "flux": diffusion("FluxTransformer2DModel", "transformer_blocks", _flux),
    "sd3": diffusion("SD3Transformer2DModel", "transformer_blocks", _sd3),
    "sana": diffusion("SanaTransformer2DModel", "transformer_blocks", _sana),
    "wan": diffusion("WanTransformer3DModel", "blocks", _wan),
    "ltx": diffusion("LTXVideoTransformer3DModel", "transformer_blocks", _ltx),
    "cogvideox": diffusion("CogVideoXTransformer3DModel", "transformer_blocks", _cogvideox),
    "hunyuan_video": diffusion("HunyuanVideoTransformer3DModel", "transformer_blocks", _hunyuan_video),
}
