"""Vision and audio families: vision transformers, conv nets, audio, and models that read text and images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.decoder_families import Fields, llama_like, without_groups
from tests.helpers.sizes import VOCABULARY, Built, Maker, Size, from_config
from tests.helpers.text_families import two_sides

Batch = Callable[[Size], dict[str, Any]]


def reader(class_name: str, blocks: str, batch: Batch, fields: Fields, *, once: str = "") -> Maker:
    """A model of transformers whose batch ``batch`` makes; ``once`` is the path of its blocks in older versions."""

    def make(size: Size, changes: dict[str, Any]) -> Built:
        model = from_config("transformers", class_name, **(fields(size) | changes))
        there = dict(model.named_modules())
        return model, batch(size), blocks if blocks in there else once

    return make


def _pictures(size: Size) -> dict[str, Any]:
    return {"pixel_values": size.image()}


def _vit(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "image_size": size.pixels,
        "patch_size": size.patch,
    }


def _dinov2(size: Size) -> dict[str, Any]:
    return {k: v for k, v in _vit(size).items() if k != "intermediate_size"} | {"drop_path_rate": 0.1}


def _swin(size: Size) -> dict[str, Any]:
    return {
        "image_size": size.pixels,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "drop_path_rate": 0.1,
    }


def _convnext(size: Size) -> dict[str, Any]:
    return {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "drop_path_rate": 0.1}


def _resnet(size: Size) -> dict[str, Any]:
    return {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}


def _wav2vec2(size: Size) -> dict[str, Any]:
    return {k: v for k, v in _vit(size).items() if k not in ("image_size", "patch_size")} | {
        "conv_dim": [16, 16, 16],
        "conv_kernel": [10, 3, 3],
        "conv_stride": [5, 2, 2],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "feat_extract_norm": "layer",
        "mask_time_prob": 0.0,  # masks are drawn by numpy, which no seed of torch repeats
        "layerdrop": 0.0,
    }


def _speech(size: Size) -> dict[str, Any]:
    return {"input_values": size.values(size.samples)}


def _hears_gradients(make: Maker) -> Maker:
    """Make the waveform require gradients: the feature encoder would set a flag that only leaves have."""

    def without_flag(size: Size, changes: dict[str, Any]) -> Built:
        model, batch, blocks = make(size, changes)
        model.get_submodule("feature_extractor")._requires_grad = False  # type: ignore[assignment]
        return model, batch, blocks

    return without_flag


def _whisper(size: Size) -> dict[str, Any]:
    return two_sides(size) | {
        "vocab_size": VOCABULARY,
        "d_model": size.width,
        "num_mel_bins": 8,
        "max_source_positions": size.tokens,
        "max_target_positions": max(64, size.tokens),
        "dropout": 0.1,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def _mel(size: Size) -> dict[str, Any]:
    return {"input_features": size.values(8, 2 * size.tokens), "labels": size.text()}


IMAGE = 3
"""The token that stands for a patch of a picture."""


def _reads(size: Size) -> dict[str, Any]:
    return llama_like(size) | {"vocab_size": VOCABULARY, "use_cache": False, "num_hidden_layers": 2}


def _llava(size: Size) -> dict[str, Any]:
    # Features come from the second to last layer: no gradient reaches the last block.
    sees = _vit(size) | {"model_type": "clip_vision_model", "num_hidden_layers": 3}
    return {
        "text_config": _reads(size) | {"model_type": "llama"},
        "vision_config": sees,
        "image_token_index": IMAGE,
        "vision_feature_layer": -2,
    }


def _llava_batch(size: Size) -> dict[str, Any]:
    patches = (size.pixels // size.patch) ** 2
    ids = torch.cat([torch.full((size.batch, patches), IMAGE), size.text().clamp_min(IMAGE + 1)], 1)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": size.image()}


def _qwen_vl(size: Size) -> dict[str, Any]:
    text = _reads(size) | {
        "hidden_size": 64,  # the heads of 16 that the rotary sections divide, four times
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_heads": size.heads,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    return {"text_config": text, "vision_config": vision, **tokens}


def _qwen2_5_vl(size: Size) -> dict[str, Any]:
    fields = _qwen_vl(size)
    fields["vision_config"] |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return fields


def _qwen3_vl(size: Size) -> dict[str, Any]:
    fields = _qwen_vl(size)
    fields["vision_config"] |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return fields


def _qwen_vl_batch(size: Size) -> dict[str, Any]:
    side = size.pixels // 4
    begin, picture = torch.full((size.batch, 1), 5), torch.full((size.batch, (side // 2) ** 2), IMAGE)
    ids = torch.cat([begin, picture, size.text().clamp_min(7)], 1)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(size.batch * side * side, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, side, side]] * size.batch),
    }


def _clip(size: Size) -> dict[str, Any]:
    text = without_groups(size) | {"vocab_size": VOCABULARY, "eos_token_id": 1}
    return {"text_config": text, "vision_config": _vit(size), "projection_dim": 32}


def _clip_batch(size: Size) -> dict[str, Any]:
    return {"input_ids": size.text(), "pixel_values": size.image(), "return_loss": True}


_DECODER = "model.language_model.layers"
MEDIA: dict[str, Maker] = {
    "vit": reader("ViTModel", "layers", _pictures, _vit, once="encoder.layer"),
    "dinov2": reader("Dinov2Model", "encoder.layer", _pictures, _dinov2),
    "swin": reader("SwinModel", "encoder.layers", _pictures, _swin),
    "convnext": reader("ConvNextModel", "encoder.stages", _pictures, _convnext),
    "resnet": reader("ResNetModel", "encoder.stages", _pictures, _resnet),
    "clip": reader("CLIPModel", "vision_model.encoder.layers", _clip_batch, _clip),
    "wav2vec2": _hears_gradients(reader("Wav2Vec2Model", "encoder.layers", _speech, _wav2vec2)),
    "whisper": reader("WhisperForConditionalGeneration", "model.encoder.layers", _mel, _whisper),
    "llava": reader("LlavaForConditionalGeneration", _DECODER, _llava_batch, _llava),
    "qwen2_5_vl": reader("Qwen2_5_VLForConditionalGeneration", _DECODER, _qwen_vl_batch, _qwen2_5_vl),
    "qwen3_vl": reader("Qwen3VLForConditionalGeneration", _DECODER, _qwen_vl_batch, _qwen3_vl),
}
