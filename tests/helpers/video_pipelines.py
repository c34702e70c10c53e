"""Tiny pipelines of random weights in diffusers' layout, one for each family of video transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
TEXT = 32

FAMILIES = ("wan", "hunyuan_video", "ltx", "cogvideox", "cosmos")


def write(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a pipeline and return its folder. Its weights depend only on the seed."""
    import diffusers

    print(f"seed {seed}")
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        parts = _PARTS[family]()
    index: dict[str, Any] = {"_class_name": _PIPELINES[family], "_diffusers_version": diffusers.__version__}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        library = "transformers" if "text" in name or "token" in name else "diffusers"
        index[name] = [library, type(part).__name__ if library == "diffusers" else _transformers_name(part)]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _transformers_name(part: Any) -> str:
    return "PreTrainedTokenizerFast" if "Token" in type(part).__name__ else type(part).__name__


def _tokenizer() -> Any:
    """A tokenizer whose tokens are bytes."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", model_max_length=64)


def _t5(kind: str) -> Any:
    import transformers

    config = getattr(transformers, kind.replace("EncoderModel", "Config"))(
        vocab_size=VOCABULARY, d_model=TEXT, d_kv=8, d_ff=64, num_layers=1, num_heads=4
    )
    return getattr(transformers, kind)(config)


def _wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, attn_scales=[],
        latents_mean=[0.1, -0.1, 0.2, 0.0], latents_std=[1.5, 2.0, 1.0, 0.5],
    )  # fmt: skip


def _wan() -> dict[str, Any]:
    from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

    return {
        "transformer": WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=TEXT, freq_dim=16,
            ffn_dim=64, num_layers=2, rope_max_seq_len=64,
        ),
        "vae": _wan_vae(),
        "text_encoder": _t5("UMT5EncoderModel"),
        "tokenizer": _tokenizer(),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    }  # fmt: skip


def _hunyuan_video() -> dict[str, Any]:
    from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, HunyuanVideoTransformer3DModel
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    llama = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=TEXT,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    clip = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    return {
        "transformer": HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=TEXT, pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6), guidance_embeds=True,
        ),
        "vae": AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
            mid_block_add_attention=False, scaling_factor=0.48,
        ),
        "text_encoder": LlamaModel(llama),
        "tokenizer": _tokenizer(),
        "text_encoder_2": CLIPTextModel(clip),
        "tokenizer_2": _tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }  # fmt: skip


def _ltx() -> dict[str, Any]:
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel

    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        patch_size=1,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        encoder_causal=True,
        decoder_causal=False,
    )
    vae.latents_mean += 0.1
    vae.latents_std *= 1.5
    return {
        "transformer": LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64,
            num_layers=2, caption_channels=TEXT,
        ),
        "vae": vae,
        "text_encoder": _t5("T5EncoderModel"),
        "tokenizer": _tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift_terminal=0.1, max_shift=2.05, base_shift=0.95
        ),
    }  # fmt: skip


def _cogvideox() -> dict[str, Any]:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel

    return {
        "transformer": CogVideoXTransformer3DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=TEXT, num_layers=2, sample_width=4, sample_height=4, sample_frames=9, max_text_seq_length=24,
            use_rotary_positional_embeddings=True,
        ),
        "vae": AutoencoderKLCogVideoX(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        ),
        "text_encoder": _t5("T5EncoderModel"),
        "tokenizer": _tokenizer(),
        "scheduler": CogVideoXDDIMScheduler(
            prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True,
        ),
    }  # fmt: skip


def _cosmos() -> dict[str, Any]:
    from diffusers import CosmosTransformer3DModel, UniPCMultistepScheduler
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'][0]['text'] }}"
    text = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": TEXT, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 4, "out_hidden_size": TEXT, "intermediate_size": 64},
    )  # fmt: skip
    return {
        "transformer": CosmosTransformer3DModel(
            in_channels=5, out_channels=4, num_attention_heads=4, attention_head_dim=24, num_layers=2,
            text_embed_dim=TEXT, adaln_lora_dim=8, max_size=(8, 16, 16), concat_padding_mask=False,
            extra_pos_embed_type=None, use_crossattn_projection=True, crossattn_proj_in_channels=2 * TEXT,
            encoder_hidden_states_channels=TEXT,
        ),
        "vae": _wan_vae(),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, use_karras_sigmas=False, flow_shift=5.0,
        ),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(text),
        "tokenizer": tokenizer,
    }  # fmt: skip


_PARTS = {"wan": _wan, "hunyuan_video": _hunyuan_video, "ltx": _ltx, "cogvideox": _cogvideox, "cosmos": _cosmos}
_PIPELINES = {
    "wan": "WanPipeline",
    "hunyuan_video": "HunyuanVideoPipeline",
    "ltx": "LTXPipeline",
    "cogvideox": "CogVideoXPipeline",
    "cosmos": "Cosmos2_5_PredictBasePipeline",
}
