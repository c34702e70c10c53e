"""Rows with files, where no model's own processor is needed to see what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft import collator
from ebbtide_recipes.sft.media import WHERE

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    "{{ '</s>' if m['role'] == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Processor:
    """Has a tokenizer whose tokens are letters, and that puts a space before any text, as Llama's does."""

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
    """Return the text that is learned of each row."""
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
