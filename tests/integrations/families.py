"""Tiny models besides the Llama: a mixture of experts, and vision and audio models with their own processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEING_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'video' %}VIDEO{% elif part['type'] == 'audio' %}AUDIO"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} <|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_moe(folder: Path, text_model: Path) -> Path:
    """Save a random mixture of experts with the tokenizer of another tiny model."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(text_model)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=256,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_llava(folder: Path, text_model: Path) -> Path:
    """Save a random LLaVA with its processor: CLIP's image processor and the tokenizer of another tiny model."""
    import torch
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _with_tokens(text_model, ["<image>"])
    text = _text_config(tokenizer)
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=32, **VISION),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=SEEING_TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_qwen_vl(folder: Path, text_model: Path, films: Any = None) -> tuple[Path, Any]:
    """Save a random Qwen2-VL; return it with its processor.

    Args:
        folder: Folder of the model.
        text_model: Has the tokenizer.
        films: The processor's part for videos; transformers' own needs torchvision. ``None``: none.
    """
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _with_tokens(text_model, names)
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    torch.manual_seed(0)
    text = _text_config(tokenizer).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Qwen2VLConfig(
        text_config={
            **{name: text[name] for name in (*kept, "num_key_value_heads", "max_position_embeddings")},
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
        vision_start_token_id=start, vision_end_token_id=end, image_token_id=image, video_token_id=video,
    )  # fmt: skip
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)

    class Images(Qwen2VLProcessor):
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
        ) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = image, video
            super(Qwen2VLProcessor, self).__init__(image_processor, tokenizer, chat_template=chat_template)
            if films is not None:
                self.video_processor = films

    place = "<|vision_start|><|image_pad|><|vision_end|>"
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    return folder, Images(images, tokenizer, chat_template=_placed(place))


def _placed(image: str) -> str:
    """Return Qwen's chat template, with its tokens where images and videos stand."""
    return SEEING_TEMPLATE.replace("IMAGE", image).replace("VIDEO", image.replace("image_pad", "video_pad"))


class Films:
    """Samples two frames per second of a video like Qwen2-VL, in patches of 14 pixels, without torchvision."""

    do_sample_frames, fps, num_frames, merge_size = True, 2, None, 2

    def sample_frames(self, metadata: Any, fps: float | None = None) -> Any:
        """Return the indices of the frames; their count is even."""
        import numpy as np

        if fps is None:  # like InternVL's: its own choice is ignored
            raise TypeError("no fps")
        count = int(metadata.total_num_frames / metadata.fps * fps) // 2 * 2
        if count == 0:
            raise ValueError(f"cannot sample {fps} frames a second of {metadata.total_num_frames} frames")
        return np.linspace(0, metadata.total_num_frames - 1, count).round().astype(int)

    def __call__(self, videos: list[Any], **kwargs: Any) -> dict[str, Any]:
        """Return patches and their grids."""
        import torch

        patches, grids = [], []
        for video in videos:
            frames, height, width, _ = video.shape
            t, h, w = frames // 2, height // 14, width // 14
            pixels = torch.as_tensor(video[: 2 * t, : 14 * h, : 14 * w]).permute(0, 3, 1, 2).float() / 255
            cut = pixels.reshape(t, 2, 3, h // 2, 2, 14, w // 2, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
            patches.append(cut.reshape(t * h * w, 3 * 2 * 14 * 14))
            grids.append([t, h, w])
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


def make_qwen_audio(folder: Path, text_model: Path) -> Path:
    """Save a random Qwen2-Audio with its processor; sounds last a second at most."""
    import torch
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    names = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer = _with_tokens(text_model, names)
    torch.manual_seed(0)
    text = _text_config(tokenizer).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "d_model": 32,
            "max_source_positions": 50,
        },
        text_config={name: text[name] for name in (*kept, "num_key_value_heads", "max_position_embeddings")},
        audio_token_index=tokenizer.convert_tokens_to_ids(names[0]),
    )  # fmt: skip
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    ears = WhisperFeatureExtractor(feature_size=16, sampling_rate=16_000, chunk_length=1)
    template = SEEING_TEMPLATE.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    Qwen2AudioProcessor(ears, tokenizer, chat_template=template).save_pretrained(folder)
    return folder


def make_films(folder: Path, count: int = 4, *, frames: int = 8, rate: float = 8) -> Path:
    """Write rows with a video each, in ms-swift's format."""
    import torch

    from ebbtide_recipes.video import clips

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        film = torch.randint(0, 255, (frames, 56, 56, 3), dtype=torch.uint8, generator=torch.manual_seed(number))
        clips.write(folder / f"{number}.mp4", film, rate=rate)
    return write_rows(folder, [{"videos": [f"{number}.mp4"]} for number in range(count)])


def make_sounds(folder: Path, count: int = 4, *, rate: int = 8_000, seconds: float = 0.5) -> Path:
    """Write rows with a sound each; two channels at half the processor's rate."""
    import math
    import struct
    import wave

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(rate)
            for index in range(int(rate * seconds)):
                level = int(9000 * math.sin(2 * math.pi * (220 + 110 * number) * index / rate))
                file.writeframes(struct.pack("<hh", level, level))
    return write_rows(folder, [{"audios": [f"{number}.wav"]} for number in range(count)])


def write_rows(folder: Path, files: list[dict[str, Any]]) -> Path:
    """Write a question and its answer for each row of files."""
    turns = {"query": "What does this function do?", "response": "It returns the value of the argument. " * 3}
    (folder / "rows.jsonl").write_text("".join(json.dumps({**turns, **row}) + "\n" for row in files))
    return folder / "rows.jsonl"


def make_pictures(folder: Path, count: int = 6) -> Path:
    """Write rows with an image each, in ms-swift's format; the images are next to the file."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        Image.new("RGB", (40, 30), (40 * number % 256, 10, 200)).save(folder / f"{number}.png")
        question = {"role": "user", "content": "<image>What does this function do?"}
        rows.append(
            {
                "messages": [question, {"role": "assistant", "content": "It returns the value of the argument."}],
                "images": [f"{number}.png"],
            }
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def _with_tokens(text_model: Path, tokens: list[str]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_model)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = None
    return tokenizer


def _text_config(tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
