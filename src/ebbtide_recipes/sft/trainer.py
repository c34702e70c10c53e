"""TRL's trainer for supervised fine-tuning, with arguments under which every mode computes the same numbers."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from trl import SFTConfig as TrlConfig
from trl import SFTTrainer as TrlTrainer

from ebbtide.base.errors import DataError, first_line
from ebbtide_recipes.language.models import tokens_of
from ebbtide_recipes.language.tables import as_dataset, check_known
from ebbtide_recipes.language.templates import refused_by_template
from ebbtide_recipes.sft.roles import with_texts
from ebbtide_recipes.skeleton.sharding import check_classes
from ebbtide_recipes.skeleton.trainer import RecordedTrainer, made, name_present_blocks, shared_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from ebbtide_recipes.sft.collator import MediaCollator
    from ebbtide_recipes.sft.config import SftConfig

LOGGER = logging.getLogger("ebbtide.sft")

_THOUGHTS = {"reasoning", "reasoning_content", "thinking"}
_FIRST_ROWS = 100
"""The rows that are searched for thoughts: those of one file have them, or have not."""


class SftTrainer(RecordedTrainer, TrlTrainer):
    """TRL's trainer, recorded and with sealed checkpoints."""

    def accuracy(self) -> float | None:
        """Return the share of tokens that the last micro-batch predicted right."""
        return (self._metrics["train"].get("mean_token_accuracy") or [None])[-1]


def arguments(config: SftConfig, *, multimodal: bool = False, files: bool = False) -> TrlConfig:
    """Return the trainer's arguments.

    Args:
        config: As ``sharding.resolved`` returned it.
        multimodal: Whether the model takes more than text.
        files: Whether rows have images, videos or sounds, which are read when a batch is made.
    """
    own = {
        # To see which rows are longer, none may be cut.
        "max_length": sys.maxsize if config.truncation == "error" else config.max_length,
        "packing": config.packing,
        "completion_only_loss": config.completion_only_loss,
        "assistant_only_loss": config.assistant_only_loss,
        # Other strategies need flash attention.
        "packing_strategy": "wrapped",
        "padding_free": False,
        "activation_offloading": False,
        "dataset_num_proc": config.dataset_num_proc,
        # Rows of a multimodal model may be text only; other models use all parameters in every batch.
        "ddp_find_unused_parameters": multimodal,
        "dataset_kwargs": {"skip_prepare_dataset": files},
        "remove_unused_columns": not files,  # the collator reads all
    }
    return made(TrlConfig, shared_arguments(config) | own)


def build(
    config: SftConfig,
    model: PreTrainedModel | PeftModel,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    dataset: Dataset,
    evaluation: Dataset | None = None,
    collator: MediaCollator | None = None,
) -> SftTrainer:
    """Make the trainer; tokenise and pack the data, or leave rows with files to the collator.

    Raises:
        DataError: The data has no full sequence (with packing), no token to learn from, or a row that may not be cut.
        ConfigError: FSDP's settings name a class of blocks that the model lacks.
    """
    from jinja2 import TemplateError
    from transformers import ProcessorMixin

    if config.fsdp_strategy != "none":
        name_present_blocks(model)
        check_classes(config, model)
    if collator is None:
        _warn_of_thoughts(dataset, processor)
    own = arguments(config, multimodal=isinstance(processor, ProcessorMixin), files=collator is not None)
    made_of = partial(SftTrainer, model, own, collator, processing_class=processor)
    parts = (dataset, evaluation)
    try:
        try:
            trainer = made_of(train_dataset=dataset, eval_dataset=evaluation)
        except TypeError:  # as of a template that joins text and a call's arguments
            parts = (_with_texts(dataset, config), evaluation and _with_texts(evaluation, config))
            trainer = made_of(train_dataset=parts[0], eval_dataset=parts[1])
    except (TemplateError, TypeError) as error:
        where = _refused(parts, processor)
        if where is None and isinstance(error, TypeError):
            raise
        raise refused_by_template(where or "a row", error) from error
    except (ValueError, RuntimeError) as error:
        if not (config.assistant_only_loss and "chat template" in str(error)):
            raise
        raise _unmarked(error) from error
    for part, names in ((trainer.train_dataset, config.dataset), (trainer.eval_dataset, config.eval_dataset)):
        if part is not None and collator is None:
            tokenizer = getattr(processor, "tokenizer", processor)
            check_known(part["input_ids"], names or config.dataset, tokenizer, tokens_of(model.config))
            _check_lengths(part, names or config.dataset, config)
    named = ", ".join(config.dataset)
    if config.packing:
        # Packing cuts whole batches of rows and leaves a short rest of each.
        packed = len(trainer.train_dataset)
        trainer.train_dataset = trainer.train_dataset.filter(lambda row: len(row["input_ids"]) == config.max_length)
        if (short := packed - len(trainer.train_dataset)) and packed > short:
            LOGGER.info(
                "packing: %d of %d sequences are shorter than %d tokens and left out",
                *(short, packed, config.max_length),
            )
        if len(trainer.train_dataset) == 0:
            raise DataError(
                f"the {len(dataset)} rows of {named} fill no sequence of {config.max_length} tokens",
                expected="more text",
                hint="use a smaller --max_length or more rows",
            )
    trainer.train_dataset = _learned(config, trainer.train_dataset, dataset, named)
    if evaluation is not None:
        named = ", ".join(config.eval_dataset or config.dataset)
        trainer.eval_dataset = _learned(config, trainer.eval_dataset, evaluation, f"{named} to evaluate on")
    return trainer


def _unmarked(error: Exception) -> DataError:
    """Return the error of chats in which TRL does not find the assistant's messages."""
    return DataError(
        f"assistant_only_loss is true, and the assistant's messages are not found: {first_line(error)}",
        expected="a chat template with {% generation %} around them, and one in each row",
        hint="--completion_only_loss true learns a chat's last answer, by any template",
    )


def _learned(config: SftConfig, part: Any, rows: Dataset, named: str) -> Dataset:
    """Leave out sequences without a token to learn from, with a warning: their steps would only decay the weights."""
    made = len(part) if config.packing else len(rows)  # TRL has removed some of the rows, but none of packed ones
    if "labels" in part.column_names:  # the collator makes those of rows with files
        # Nothing predicts the first token.
        part = part.filter(lambda labels: any(label != -100 for label in labels[1:]), input_columns="labels")
    if len(part) == 0:
        raise DataError(
            f"the {len(rows)} rows of {named} leave no token to learn from",
            expected=f"completions within the first {config.max_length} tokens",
            hint="use a larger --max_length",
        )
    if len(part) < made:
        LOGGER.warning(
            "%d of %d %s of %s are left out: no token to learn from is within their first %d tokens; "
            "hint: a larger --max_length%s",
            *(made - len(part), made, "packed sequences" if config.packing else "rows", named, config.max_length),
            "" if config.packing else ", or --truncation error to refuse longer rows",
        )
    return part


def _with_texts(part: Dataset, config: SftConfig) -> Dataset:
    """Return rows whose calls of tools have their arguments as JSON in a text."""
    return as_dataset([{**row, **with_texts(row)} for row in part.to_list()], config.dataset)


def _warn_of_thoughts(rows: Dataset, processor: Any) -> None:
    """Warn if the chat template leaves out what the assistant thinks before its answer, by the first such row."""
    from jinja2 import TemplateError

    for row in rows.select(range(min(len(rows), _FIRST_ROWS))):
        chat = row.get("messages") or row.get("completion")
        thought = _THOUGHTS & chat[-1].keys() if isinstance(chat, list) else set[str]()
        if not any(chat[-1][name] for name in thought):
            continue
        before = row.get("prompt") or chat[:-1]
        answers = (chat[-1], {name: value for name, value in chat[-1].items() if name not in thought})
        try:
            one, other = (processor.apply_chat_template([*before, answer], tokenize=False) for answer in answers)
        except (TemplateError, TypeError):  # as the trainer finds
            return
        if one == other:
            LOGGER.warning(
                "the chat template leaves %s of messages out: it is not learned; hint: write it into content, or use "
                "another template",
                ", ".join(sorted(thought)),
            )
        return


def _refused(parts: Iterable[Dataset | None], processor: Any) -> str | None:
    """Return the number of the first chat that a template does not render, in words; ``None``: it renders all."""
    from jinja2 import TemplateError

    for part in parts:
        for number, row in enumerate(part or (), start=1):
            chat = row.get("messages") or [*row.get("prompt", ()), *row.get("completion", ())]
            if not chat or not isinstance(chat[0], dict):
                return None
            try:
                processor.apply_chat_template(chat, tools=json.loads(row.get("tools") or "null"), tokenize=False)
            except (TemplateError, TypeError):
                return f"row {number}"
    return None


def _check_lengths(rows: Dataset, names: Sequence[str], config: SftConfig) -> None:
    """Count tokenised rows that are cut, or refuse them."""
    most, named = config.max_length, ", ".join(names)
    lengths = [] if config.packing else list(map(len, rows["input_ids"]))
    longer = [length for length in lengths if length > most]
    if longer:
        raise DataError(
            f"{len(longer)} of {len(rows)} rows of {named} have more than {most} tokens, the longest "
            f"{max(longer)}, and truncation is 'error'",
            expected=f"at most {most}, the max_length",
            hint=f"--max_length {max(longer)}, or --truncation right cuts them at their end",
        )
    if config.truncation == "right" and (full := lengths.count(most)):
        LOGGER.warning(
            "%d of %d rows of %s fill max_length, %d tokens: longer ones are cut at their end; "
            "hint: a larger --max_length, or --truncation error, which counts and refuses them",
            *(full, len(rows), named, most),
        )
