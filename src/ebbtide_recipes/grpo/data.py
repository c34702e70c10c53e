"""The prompts of ``grpo``: read by ``rows.py``, normalized by ``prompts.py``, measured in tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.grpo import prompts
from ebbtide_recipes.grpo.rewards import ANSWERS
from ebbtide_recipes.language.models import tokens_of
from ebbtide_recipes.language.tables import as_dataset, check_known, named_once
from ebbtide_recipes.language.templates import rendering
from ebbtide_recipes.skeleton.rows import Reader

if TYPE_CHECKING:
    from datasets import Dataset

    from ebbtide_recipes.grpo.config import GrpoConfig
    from ebbtide_recipes.grpo.rewards import Reward
    from ebbtide_recipes.language.models import ModelSource

LOGGER = logging.getLogger("ebbtide.grpo")

READER = Reader(
    builtin={"builtin:arithmetic": prompts.arithmetic},
    example='{"question": "What is 9 + 9?", "answer": "#### 18"}',
)
"""Reads the data sets that ``grpo`` knows."""


def check(names: Iterable[str]) -> None:
    """Refuse data sets that do not exist, and files whose first rows cannot be read or hold no prompts.

    Args:
        names: As ``load`` takes them.

    Raises:
        EbbtideError: As ``load``; what depends on the model or the rewards is left to it.
    """
    for name, rows in READER.check(names).items():
        prompts.shaped(rows, name, chat=True)  # a model without a chat template takes no others


def load(names: Sequence[str], config: GrpoConfig, source: ModelSource, rewards: Sequence[Reward]) -> Dataset:
    """Read data sets and concatenate their prompts.

    Args:
        names: Built-in names, files or hub names, as ``rows.parsed`` takes them.
        config: Has the longest allowed prompt.
        source: Has the tokenizer.
        rewards: Reward functions; each knows the columns it needs.

    Raises:
        DataError: A data set cannot be used, or has no prompt of the right length.
        ConfigError: The columns of several data sets differ.
    """
    made: list[prompts.Row] = []
    for name in named_once(names):
        rows = READER.read(name, seed=config.seed, use_hf=config.use_hf)
        part = prompts.shaped(rows, name, chat=source.chats, system=config.system)
        for reward in rewards:
            reward.check_columns([column for column in part[0] if column != "prompt"])
        judged = [reward.judges(part, name) for reward in rewards]
        if not any(judged):
            raise DataError(
                f"no row of {name} has an answer that a reward function judges by",
                expected="a right answer in some rows; a number for closeness",
                hint=f"fill the column ({', '.join(ANSWERS)}), or choose another of --reward_funcs",
            )
        if made and made[0].keys() != part[0].keys():
            raise ConfigError(
                f"{name} has the columns {', '.join(sorted(part[0]))}, and the data sets before it "
                f"{', '.join(sorted(made[0]))}",
                expected="data sets with equal columns",
                hint="train on one after the other, or give them the same columns",
            )
        made += _short(part, name, config, source)
    return as_dataset(made, names)


def check_count(dataset: Dataset, config: GrpoConfig, processes: int) -> None:
    """Raise if there are fewer prompts than in one rollout; log how many are left over from the last of an epoch.

    Raises:
        DataError: There are fewer.
    """
    wanted = config.completions(processes) // config.num_generations
    if len(dataset) < wanted:
        raise DataError(
            f"{', '.join(config.dataset)} has {len(dataset)} prompts",
            expected=f"{wanted} or more, for one rollout",
            hint="more rows, a smaller --per_device_train_batch_size, or a larger --num_generations",
        )
    if over := len(dataset) % wanted:
        LOGGER.log(
            logging.INFO if config.dataset_shuffle else logging.WARNING,
            "%d of the %d prompts are left out of each epoch, because a rollout has %d; %s",
            *(over, len(dataset), wanted),
            "others in every epoch" if config.dataset_shuffle else "always the last ones: --dataset_shuffle is false",
        )


def _short(rows: list[prompts.Row], name: str, config: GrpoConfig, source: ModelSource) -> list[prompts.Row]:
    """Return the rows with short enough prompts; log the number of dropped rows, or raise."""
    tokens = [
        _tokens(row["prompt"], source.tokenizer, f"row {number} of data set {name!r}")
        for number, row in enumerate(rows, start=1)
    ]
    check_known(tokens, [name], source.tokenizer, tokens_of(source.config))
    kept = [row for row, ids in zip(rows, tokens, strict=True) if len(ids) <= config.max_prompt_length]
    long = len(rows) - len(kept)
    found = f"{long} of the {len(rows)} prompts of {name} are longer than {config.max_prompt_length} tokens"
    if long and not config.filter_overlong_prompts:
        raise DataError(
            found,
            expected="prompts of at most max_prompt_length tokens",
            hint="a larger --max_prompt_length, or --filter_overlong_prompts true leaves them out",
        )
    if not kept:
        raise DataError(found, expected="some shorter prompts", hint="a larger --max_prompt_length")
    if long:
        LOGGER.warning("%s: they are left out; no prompt is cut", found)
    return kept


def _tokens(prompt: Any, tokenizer: Any, where: str) -> list[int]:
    """Return the tokens of a prompt, as the trainer makes them."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    with rendering(where):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return ids["input_ids"]
