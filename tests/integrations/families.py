"""Tiny models beside the Llama: a mixture of experts, and vision-language models with their own processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEING_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} <|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_moe(folder: Path, text_model: Path) -> Path:
    """Save a random mixture of experts beside the tokenizer of another tiny model."""
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


def make_qwen_vl(folder: Path, text_model: Path) -> tuple[Path, Any]:
    """Save a random Qwen2-VL; return it with its processor.

    The processor is Qwen2-VL's own class less the part for videos, which needs torchvision.
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

    place = "<|vision_start|><|image_pad|><|vision_end|>"
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    return folder, Images(images, tokenizer, chat_template=SEEING_TEMPLATE.replace("IMAGE", place))


def make_pictures(folder: Path, count: int = 6) -> Path:
    """Write rows with an image each, as ms-swift's are; the images lie beside the file."""
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
