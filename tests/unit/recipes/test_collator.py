"""Rows with files, in cases that need no model's own processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from jinja2 import TemplateError
from PIL import ExifTags, Image
from tokenizers import Tokenizer, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft import collator, data, decode
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.media import WHERE

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    "{{ '</s>' if m['role'] == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Processor:
    """Has a tokenizer whose tokens are letters, and that puts a space before any text, like Llama's."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        letters = [chr(code) for code in range(ord("!"), ord("~"))]
        vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", "▁", *letters, ":▁"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
        )
        self.apply_chat_template = self.tokenizer.apply_chat_template

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


CHAT = {"messages": [said("user", "Why?"), said("assistant", "It is.")], WHERE: "row 1"}
PAIR = {"prompt": [said("user", "Why?")], "completion": [said("assistant", "It is.")], WHERE: "row 2"}


def learned(*rows: dict[str, Any], completion_only: bool = True, merges: Any = ()) -> list[str]:
    """Return the learned text of each row."""
    processor: Any = Processor(list(merges))
    batch = collator.MediaCollator(processor=processor, max_length=99, completion_only=completion_only)(rows)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["labels"].shape
    kept = [[token for token in labels.tolist() if token != -100] for labels in batch["labels"]]
    return ["".join(processor.tokenizer.convert_ids_to_tokens(tokens)) for tokens in kept]


def test_an_answer_has_the_tokens_that_it_has_after_its_question() -> None:
    assert learned(PAIR) == ["▁It▁is.</s>"]
    assert learned(PAIR, merges=[(":", "▁")]) == [":▁It▁is.</s>"]
    for merges in ([], [(":", "▁")]):
        both = learned(PAIR, CHAT, completion_only=False, merges=merges)
        assert both == ["▁user:▁Why?▁assistant:▁It▁is.</s>"] * 2


def test_a_placeholder_of_a_file_in_an_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processor, "image_token_id", 0, raising=False)
    learned(PAIR)
    with pytest.raises(DataError, match=r"row 2 has '<unk>' in its answer.*\nhint: "):
        learned({**PAIR, "completion": [said("assistant", "an \u00e9")]})


def test_chats_are_learned_beside_questions_and_answers() -> None:
    assert learned(CHAT, PAIR) == ["▁user:▁Why?▁assistant:▁It▁is.</s>", "▁It▁is.</s>"]


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_no_prompt_is_learned_whoever_has_its_last_word(role: str) -> None:
    assert learned({**PAIR, "prompt": [*PAIR["prompt"], said(role, "Well.")]}) == ["▁It▁is.</s>"]


def test_a_chat_that_the_template_refuses_is_named_by_its_row() -> None:
    def refuses(*given: object, **options: object) -> Any:
        raise TemplateError("roles must alternate")

    processor: Any = SimpleNamespace(apply_chat_template=refuses)
    made = collator.MediaCollator(processor=processor, max_length=8, completion_only=False)
    with pytest.raises(DataError, match=r"refuses row 3 of data set 'a': roles must alternate.*\nhint: "):
        made([{"messages": [], WHERE: "row 3 of data set 'a'"}])


@pytest.mark.parametrize("named_by", ["processor", "config"])
def test_places_of_files_that_only_a_list_or_the_config_names_are_not_learned(
    named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processor, "image_token_id", 0, raising=False)  # like Gemma 3's: it begins an image
    processor: Any = Processor([])
    place = processor.tokenizer.convert_tokens_to_ids("?")
    config: Any = SimpleNamespace(image_token_id=place) if named_by == "config" else None
    if named_by == "processor":
        monkeypatch.setattr(Processor, "image_token_ids", [place], raising=False)

    def batch(length: int) -> Any:
        source: Any = SimpleNamespace(processor=processor, tokenizer=processor.tokenizer, config=config)
        options = SftConfig(max_length=length, completion_only_loss=False)
        return collator.made(options, source, Dataset.from_list([CHAT]))([CHAT])

    made = batch(99)
    at = made["input_ids"] == place
    assert at.sum() == 1 and torch.equal(made["labels"] == -100, at)
    end = int(at[0].nonzero()) + 1
    batch(end)
    with pytest.raises(DataError, match=rf"row 1 has \d+ tokens with its files; expected at most {end - 1}"):
        batch(end - 1)


@pytest.mark.parametrize("template", ["", "{{ bos_token }}"])
def test_a_row_begins_as_its_prompt_does_in_inference(template: str) -> None:
    processor: Any = Processor([])
    tokenizer = processor.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    tokenizer.chat_template = template + TEMPLATE
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    batch = collator.MediaCollator(processor=processor, max_length=99, completion_only=True)([PAIR, CHAT])
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert ids[0] == 0 and ids.count(0) == 1
        assert tokenizer.decode([label for label in labels if label != -100]).endswith("▁ I t ▁ i s . </s>")


def test_an_answer_sees_the_images_that_its_question_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeing(self: Processor, text: list[str], **options: Any) -> Any:
        batch = self.tokenizer(text, **options)
        seen = batch["attention_mask"][:, :, None, None].repeat(1, 1, 1, 2)
        seen[:, :3] = 0  # the tokens before the image
        return {**batch, "cross_attention_mask": seen, "moe_mm_token_type_ids": torch.zeros_like(batch["input_ids"])}

    monkeypatch.setattr(Processor, "__call__", seeing)
    processor: Any = Processor([])
    batch = collator.MediaCollator(processor=processor, max_length=99, completion_only=True)([PAIR, CHAT])
    seen = batch["attention_mask"].clone()
    seen[:, :3] = 0
    assert torch.equal(batch["cross_attention_mask"], seen[:, :, None, None].repeat(1, 1, 1, 2))
    assert batch["moe_mm_token_type_ids"].shape == seen.shape


def test_a_processor_that_divides_by_zero_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processor, "__call__", lambda *args, **options: 1 / 0)  # as for a video of one frame
    with pytest.raises(DataError, match=r"does not take row 2: division by zero.*\nhint: "):
        learned(PAIR)


def picture(path: Path, height: int, width: int, **options: Any) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, **options)
    return path


@pytest.mark.parametrize("left", [0, 8, 0.6])
def test_a_damaged_image_is_named(tmp_path: Path, left: float) -> None:
    content = picture(tmp_path / "a.png", 64, 64).read_bytes()
    (tmp_path / "a.png").write_bytes(content[: int(left if left >= 1 else left * len(content))])
    (tmp_path / "rows.jsonl").write_text('{"query": "Why?", "response": "It is.", "images": ["a.png"]}\n')
    table = data.load_both(SftConfig(dataset=(str(tmp_path / "rows.jsonl"),)), chat=True, takes=("image",))[0]
    processor: Any = Processor([])
    made = collator.MediaCollator(processor=processor, max_length=99, completion_only=True)
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image: .*; expected .*\nhint: "):
        made([table[0]])


def test_images_are_turned_as_they_are_shown(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stored = np.asarray(Image.open(picture(tmp_path / "a.png", 32, 48)))
    assert np.array_equal(np.asarray(decode.image(str(tmp_path / "a.png"))), stored)
    path = str(picture(tmp_path / "turned.png", 32, 48, exif=exif))
    assert np.array_equal(np.asarray(decode.image(path)), np.rot90(stored, -1))
    assert decode.size(path) == (48, 32) and decode.size(str(tmp_path / "a.png")) == (32, 48)


@pytest.mark.parametrize("refuses", [True, False])
def test_an_image_that_the_processor_refuses_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    def count(self: Processor, image_sizes: list[tuple[int, int]]) -> Any:
        if (8, 240) in image_sizes:
            raise ValueError("absolute aspect ratio must be smaller than 29")
        return SimpleNamespace(num_image_tokens=[1] * len(image_sizes))

    def process(self: Processor, text: list[str], images: Any = (), **options: Any) -> Any:
        if refuses:
            count(self, [image.size[::-1] for row in images for image in row])
        return self.tokenizer(text, **options)

    monkeypatch.setattr(Processor, "_get_num_multimodal_tokens", count, raising=False)
    monkeypatch.setattr(Processor, "__call__", process)
    paths = [str(picture(tmp_path / f"{number}.png", *size)) for number, size in enumerate([(8, 8), (8, 240), (8, 8)])]
    rows = [{**CHAT, "images": [path], WHERE: f"row {number}"} for number, path in enumerate(paths)]
    processor: Any = Processor([])
    made = collator.MediaCollator(processor=processor, max_length=99, completion_only=False)
    if refuses:
        with pytest.raises(DataError, match=r"does not take row 1: absolute aspect ratio .*\nhint: "):
            made.check(Dataset.from_list(rows))
    else:
        made.check(Dataset.from_list(rows))
