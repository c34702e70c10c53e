"""A tiny model and tokenizer made offline, and warnings of other packages that ebbtide cannot cause."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Narrow on purpose: a warning that ebbtide causes, or one about how ebbtide calls these packages, stays an error.
FOREIGN_WARNINGS = (
    # PEFT asks a transformers model by the name that transformers 5.2x deprecates.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for text in FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session", autouse=True)
def accelerate_knows_the_simulated_device() -> Iterator[None]:
    """Let trainers place models on the simulated device: accelerate falls back to the CPU for unknown kinds."""
    found = torch.accelerator.current_accelerator(check_available=True)
    with pytest.MonkeyPatch.context() as patch:
        if found is not None and found.type == "simdev":
            patch.setenv("ACCELERATE_TORCH_DEVICE", found.type)
        yield


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_tiny_model(folder: Path, *, layers: int = 2, positions: int = 128) -> Path:
    """Save a random Llama and a byte-level tokenizer trained on a few words, in transformers' format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What does this function do? It returns the value of the argument."], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama"))
