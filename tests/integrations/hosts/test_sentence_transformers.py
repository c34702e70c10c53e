"""The trainer of sentence-transformers with the callback of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import STEPS, Trained, check_bitwise, seeded, trained

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: pip install sentence-transformers"
)

# From the package and its imports (scikit-learn, transformers' old names).
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def make_bert(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    seeded()
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def train(options: dict[str, Any] | None, bert: Path, folder: Path) -> Trained:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    from ebbtide.integrations.transformers import OffloadCallback

    seeded()
    model = SentenceTransformer(str(bert), device="cpu")
    texts = [" ".join(f"w{(i * j) % 60}" for j in range(1, 20)) for i in range(1, 2 * STEPS * 4 + 1)]
    rows = Dataset.from_dict({"anchor": texts[::2], "positive": texts[1::2]})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, seed=1, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callback = None if options is None else OffloadCallback(**options)
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=rows, loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trained(logged, model, None if callback is None else callback.handle)


def test_the_trainer_is_bitwise_the_same(tmp_path: Path) -> None:
    bert = make_bert(tmp_path / "bert")
    check_bitwise(lambda options: train(options, bert, tmp_path / "out"))
