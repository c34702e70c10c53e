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
        within(name, values[name], "(0, inf)", "a number above zero", hint)
    for name, hint in _SHARES.items():
        within(name, values[name], "[0, 1)", "a share from 0 to below 1", hint)
    for name in ("weight_decay", "max_grad_norm"):
        within(name, values[name], "[0, inf)", "0 or more", f"0 switches {name} off")
    within("fsdp_version", values["fsdp_version"], "[1, 2]", "1 or 2", "2 is the default")
    within("seed", values["seed"], "[0, 4294967295]", "0 to 4294967295", "42 is the default")


def at_least(name: str, value: int | None, least: int, hint: str) -> None:
    """Reject a number below its minimum."""
    within(name, value, f"[{least}, inf)", f"{least} or more", hint)


def within(name: str, value: float | None, interval: str, expected: str, hint: str) -> None:
    """Reject a number outside of an interval such as ``[0, 1)``, which has 0 and has not 1; and NaN."""
    low, high = map(float, interval[1:-1].split(","))
    above = value is None or value > low or (value == low and interval[0] == "[")
    below = value is None or value < high or (value == high and interval[-1] == "]")
    if not (above and below):
        raise ConfigError(f"{name} is {value!r}", expected=expected, hint=hint)
