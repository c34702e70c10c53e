"""The recipe ``grpo``: prompts, rewards, model and trainer from a config."""

from __future__ import annotations

import importlib.util
import logging
from functools import partial
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError, counted
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.language.recipe import LanguageRecipe, adapters_for, built
from ebbtide_recipes.skeleton import launch

if TYPE_CHECKING:
    from ebbtide_recipes.grpo.trainer import GrpoTrainer

LOGGER = logging.getLogger("ebbtide.grpo")


class Grpo(LanguageRecipe[GrpoConfig]):
    """Reinforcement learning of a language model, with functions that reward its completions."""

    name = "grpo"

    def check_data(self, config: GrpoConfig) -> None:
        """Refuse data sets that do not exist, and files whose first rows hold no prompts.

        Raises:
            EbbtideError: A data set cannot be used.
        """
        from ebbtide_recipes.grpo import data

        data.check([*config.dataset, *(config.eval_dataset or ())])

    def check(self, config: GrpoConfig) -> None:
        """Refuse invalid rewards, adapters and models.

        Raises:
            EbbtideError: One of them is invalid.
        """
        from ebbtide_recipes.grpo import rewards

        if config.use_vllm and importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "use_vllm is true, and vllm is not installed",
                expected="the package vllm",
                hint="pip install vllm, on Linux with a GPU; without --use_vllm transformers generates",
            )
        in_4_bits = config.train_type == "qlora"
        sharded = config.fsdp_strategy != "none" and (config.fsdp_version == 1 or in_4_bits)
        if config.use_vllm and config.trains_adapters and sharded:
            what = "4-bit weights in shards" if in_4_bits else "FSDP1"
            raise ConfigError(
                f"use_vllm is true with adapters and {what}, which cannot be merged for vLLM",
                expected="DDP, full training, or lora with FSDP2",
                hint="leave the sharding out" if in_4_bits else "--fsdp_version 2",
            )
        rewards.load(config.reward_funcs)
        super().check(config)
        config.completions(launch.total(config))

    def prepare(self, config: GrpoConfig) -> GrpoTrainer:
        """Load model and prompts, and make the trainer. Checks come before slow steps.

        Raises:
            EbbtideError: The model or the data cannot be used.
        """
        from ebbtide_recipes.grpo import data, rewards, trainer
        from ebbtide_recipes.language import models, tables

        processes = trainer.arguments(config).world_size  # also joins the other ranks
        source = models.look_up(config)
        if source.multimodal:
            raise ConfigError(
                f"{config.model} is a multimodal model",
                expected="a language model",
                hint="`ebbtide sft` trains multimodal models",
            )
        made = adapters_for(config, source)
        if getattr(made, "bias", "none") != "none" and (config.kl_coefficient or config.kl_reward_coef):
            raise ConfigError(
                "the adapters train the model's biases, and there is a KL divergence from the model without adapters",
                expected="a reference that stays as it is",
                hint='"bias": "none" in --adapter_config, or neither --beta nor --kl_reward_coef',
            )
        functions = rewards.load(config.reward_funcs)
        dataset = data.load(config.dataset, config, source, functions)
        evaluation = None
        if config.eval_dataset is not None:
            evaluation = data.load(config.eval_dataset, config, source, functions)
        elif config.split_dataset_ratio > 0:
            dataset, evaluation = tables.split(
                dataset, config.split_dataset_ratio, seed=config.seed, in_order=not config.dataset_shuffle
            )
        data.check_count(dataset, config, processes)
        LOGGER.info("%s: %d prompts from %s", config.model, len(dataset), ", ".join(config.dataset))
        LOGGER.info(
            "a rollout: %s x %s, learned in updates of %s",
            counted(config.completions(processes) // config.num_generations, "prompt"),
            counted(config.num_generations, "completion"),
            counted(config.gradient_accumulation_steps, "micro-batch"),
        )
        build = partial(
            trainer.build,
            config,
            tokenizer=source.tokenizer,
            rewards=functions,
            dataset=dataset,
            evaluation=evaluation,
        )
        return built(config, source, made, build)


RECIPE = Grpo()
