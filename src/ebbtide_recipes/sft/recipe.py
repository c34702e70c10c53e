"""The recipe ``sft``: data, model and trainer from a config."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.language.recipe import LanguageRecipe, adapters_for, built
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import launch, run

if TYPE_CHECKING:
    from ebbtide_recipes.sft.trainer import SftTrainer

LOGGER = logging.getLogger("ebbtide.sft")


class Sft(LanguageRecipe[SftConfig]):
    """Supervised fine-tuning of a language model, which may take images, videos and sounds."""

    name = "sft"

    def check_data(self, config: SftConfig) -> None:
        """Refuse data sets that do not exist, and files whose first rows cannot be read or have unknown columns.

        Raises:
            EbbtideError: A data set cannot be used.
        """
        from ebbtide_recipes.sft import data

        data.check(config)

    def prepare(self, config: SftConfig) -> SftTrainer:
        """Load model and data, and make the trainer. Checks come before slow steps.

        Raises:
            EbbtideError: The model or the data cannot be used.
        """
        from ebbtide_recipes.language import models, tables
        from ebbtide_recipes.sft import collator, data, media, trainer
        from ebbtide_recipes.sft.shapes import is_chat

        trainer.arguments(config)  # also joins the other ranks
        source = models.look_up(config)
        made = adapters_for(config, source)
        takes = collator.taken_by(source.processor)
        dataset, evaluation = data.load_both(config, chat=source.chats, takes=takes)
        if config.split_dataset_ratio > 0:
            dataset, evaluation = tables.split(dataset, config.split_dataset_ratio, seed=config.seed)
        if config.completion_only_loss is None:  # the trainer looks at the rows to train on alone
            columns = {*dataset.column_names, *(() if evaluation is None else evaluation.column_names)}
            config = replace(config, completion_only_loss="completion" in columns and not config.learns_prompts)
        named = ((dataset, config.dataset), (evaluation, config.eval_dataset or config.dataset))
        plain = next((names for part, names in named if part is not None and not is_chat(part[0])), None)
        batches = None
        if config.assistant_only_loss and (plain or media.WHERE in dataset.column_names):
            raise ConfigError(
                f"assistant_only_loss is true, and {', '.join(plain or config.dataset)} has "
                f"{'plain text' if plain else 'files'}",
                expected="chats of text: rows with messages",
                hint="leave --assistant_only_loss out; --completion_only_loss true learns only answers",
            )
        if media.WHERE in dataset.column_names:
            batches = collator.made(config, source, dataset)
            for part in (dataset, *(() if evaluation is None else (evaluation,))):
                batches.check(part)
                if config.fsdp_strategy != "none" and launch.world_size() > 1:
                    media.check_even(part)
        elif plain:
            models.check_end(config.model, source.tokenizer)
        LOGGER.info("%s: %d rows from %s", config.model, len(dataset), ", ".join(config.dataset))
        build = partial(
            trainer.build,
            config,
            processor=source.processor,
            dataset=dataset,
            evaluation=evaluation,
            collator=batches,
        )
        return built(config, source, made, build)


RECIPE = Sft()


def main(config: SftConfig) -> None:
    """Fine-tune a model, in this process: alone, or as one of torchrun's ranks.

    Args:
        config: What to train, on what, and how.

    Raises:
        EbbtideError: The config, the data, the model or the machine cannot be used.
        KeyboardInterrupt: Interrupted by the user; the run file is closed and records it.
    """
    run.main(RECIPE, config)
