"""Checks of single flags, by name, each with a hint. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.base.errors import ConfigError

COUNTS: Mapping[str, str] = {
    "per_device_train_batch_size": "1 takes the least memory",
    "per_device_eval_batch_size": "1 takes the least memory",
    "gradient_accumulation_steps": "1 makes each micro-batch a step",
    "nproc_per_node": "leave it out for one process per visible device",
    "nnodes": "leave it out for NNODES, or one",
    "ddp_timeout": "1800 is the default; a process that prepares data for long needs more",
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
    "learning_rate": "leave it out for the default of the training type",
}
"""Numbers above zero, each with what to do about another."""

_SHARES: Mapping[str, str] = {
    "split_dataset_ratio": "0.01 keeps back one row in a hundred",
    "warmup_ratio": "0.05 takes the first twentieth of the steps",
    "lora_dropout": "0 is no dropout",
}
"""Numbers from 0 to below 1."""


def check_texts(values: Mapping[str, Any]) -> None:
    """Reject empty text.

    Raises:
        ConfigError: A name is empty.
    """
    for name, value in values.items():
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, tuple) and not all(not isinstance(t, str) or t.strip() for t in texts or ("",)):
            raise ConfigError(f"{name} is empty", expected="a name", hint=f"leave {name} out for its default")


def check_numbers(values: Mapping[str, Any]) -> None:
    """Reject numbers out of range.

    Raises:
        ConfigError: A number is too small, too large, or NaN.
    """
    for name, hint in COUNTS.items():
        at_least(name, values[name], 1, hint)
    at_least(
        "dataloader_num_workers", values["dataloader_num_workers"], 0, "0 prepares batches in the training process"
    )
    if values["max_steps"] != -1 and values["max_steps"] < 1:
        raise ConfigError(
            f"max_steps is {values['max_steps']}",
            expected="1 or more, or -1",
            hint="-1, the default, means --num_train_epochs",
        )
    for name, hint in _POSITIVE.items():
        if values[name] is not None and not 0 < values[name] < float("inf"):
            raise ConfigError(f"{name} is {values[name]!r}", expected="a number above zero", hint=hint)
    for name, hint in _SHARES.items():
        if not 0 <= values[name] < 1:
            raise ConfigError(f"{name} is {values[name]!r}", expected="a share from 0 to below 1", hint=hint)
    for name in ("weight_decay", "max_grad_norm"):
        if not 0 <= values[name] < float("inf"):
            raise ConfigError(f"{name} is {values[name]!r}", expected="0 or more", hint=f"0 switches {name} off")
    if values["fsdp_version"] not in (1, 2):
        raise ConfigError(f"fsdp_version is {values['fsdp_version']}", expected="1 or 2", hint="2 is the default")
    if not 0 <= values["seed"] < 2**32:
        raise ConfigError(f"seed is {values['seed']}", expected="0 to 4294967295", hint="42 is the default")


def at_least(name: str, value: int | None, least: int, hint: str) -> None:
    """Reject a number below its minimum."""
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}", expected=f"{least} or more", hint=hint)
