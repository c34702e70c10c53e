"""Checks of ``RecipeConfig``, each with a hint. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig

COUNTS: Mapping[str, str] = {
    "per_device_train_batch_size": "1 takes the least memory",
    "per_device_eval_batch_size": "1 takes the least memory",
    "gradient_accumulation_steps": "1 makes each micro-batch a step",
    "nproc_per_node": "leave it out for one process a visible device",
    "nnodes": "leave it out for NNODES, or one",
    "lora_rank": "8 is the default",
    "lora_alpha": "32 is the default",
    "save_steps": "leave it out to write no checkpoints",
    "save_total_limit": "leave it out to keep all checkpoints",
    "eval_steps": "leave it out to evaluate at the end alone",
    "logging_steps": "1 logs every step; --log_level warning logs none",
}
"""Numbers that are 1 or more, each with what to do about a smaller one."""

_POSITIVE: Mapping[str, str] = {
    "num_train_epochs": "1 passes over the data once, 0.5 over half of it; --max_steps N counts steps instead",
    "learning_rate": "leave it out for 1e-5 (full training) or 1e-4 (adapters)",
}
"""Numbers above zero, each with what to do about another."""

_SHARES: Mapping[str, str] = {
    "split_dataset_ratio": "0.01 keeps back one row in a hundred",
    "warmup_ratio": "0.05 takes the first twentieth of the steps",
    "lora_dropout": "0 is no dropout",
}
"""Numbers from 0 to below 1."""


def check_texts(config: RecipeConfig) -> None:
    """Reject empty text.

    Raises:
        ConfigError: A name is empty.
    """
    for field in dataclasses.fields(config):
        value: object = getattr(config, field.name)
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, tuple) and not all(not isinstance(t, str) or t.strip() for t in texts or ("",)):
            raise ConfigError(
                f"{field.name} is empty", expected="a name", hint=f"leave {field.name} out for its default"
            )


def check_numbers(config: RecipeConfig) -> None:
    """Reject numbers out of range.

    Raises:
        ConfigError: A number is too small, too large, or NaN.
    """
    for name, hint in COUNTS.items():
        at_least(name, getattr(config, name), 1, hint)
    at_least("dataloader_num_workers", config.dataloader_num_workers, 0, "0 prepares batches in the training process")
    if config.max_steps != -1 and config.max_steps < 1:
        raise ConfigError(
            f"max_steps is {config.max_steps}",
            expected="1 or more, or -1",
            hint="-1, the default, means --num_train_epochs",
        )
    for name, hint in _POSITIVE.items():
        if getattr(config, name) is not None and not 0 < getattr(config, name) < float("inf"):
            raise ConfigError(f"{name} is {getattr(config, name)!r}", expected="a number above zero", hint=hint)
    for name, hint in _SHARES.items():
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)!r}", expected="a share from 0 to below 1", hint=hint)
    for name in ("weight_decay", "max_grad_norm"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}", expected="0 or more", hint=f"0 switches {name} off"
            )
    if config.fsdp_version not in (1, 2):
        raise ConfigError(f"fsdp_version is {config.fsdp_version}", expected="1 or 2", hint="2 is the default")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed is {config.seed}", expected="0 to 4294967295", hint="42 is the default")


def check_together(config: RecipeConfig) -> None:
    """Reject contradictory values.

    Raises:
        ConfigError: Two values contradict each other.
    """
    if config.gradient_checkpointing and config.activation_cpu_offload and config.policy not in (None, "minimal"):
        raise ConfigError(
            f"policy is {config.policy!r} with gradient_checkpointing true",
            expected="no policy, or 'minimal': the two flags together mean checkpointing's memory",
            hint="leave --gradient_checkpointing out to use another policy",
        )
    if config.policy not in (None, "auto") and (config.max_slowdown is not None or config.memory_budget is not None):
        raise ConfigError(
            f"max_slowdown or memory_budget is set with policy {config.policy!r}",
            expected="policy auto",
            hint="leave --policy out, or --max_slowdown and --memory_budget",
        )
    if config.bf16 and config.fp16:
        raise ConfigError("bf16 and fp16 are both true", expected="one of the two", hint="bf16 needs no loss scaling")
    if config.fp16 and config.torch_dtype == "bfloat16":
        raise ConfigError(
            "fp16 is true with torch_dtype bfloat16",
            expected="float32 weights for float16 arithmetic",
            hint="--torch_dtype float32, or --bf16 true in place of --fp16",
        )
    if config.eval_dataset is not None and config.split_dataset_ratio > 0:
        raise ConfigError(
            "eval_dataset and split_dataset_ratio are both set",
            expected="one of the two",
            hint="leave --split_dataset_ratio out",
        )
    if config.fsdp is not None and config.fsdp_config is not None:
        raise ConfigError(
            "fsdp and fsdp_config are both set",
            expected="one of the two: both name FSDP's settings",
            hint="leave --fsdp out; --fsdp_strategy says what is sharded",
        )


def at_least(name: str, value: int | None, least: int, hint: str) -> None:
    """Reject a number below its minimum."""
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}", expected=f"{least} or more", hint=hint)
