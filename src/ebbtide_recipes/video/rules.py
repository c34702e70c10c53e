"""Checks of ``VideoConfig``, each with a hint. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.skeleton.rules import at_least

if TYPE_CHECKING:
    from ebbtide_recipes.video.config import VideoConfig

_COUNTS: Mapping[str, str] = {
    "num_frames": "1 trains on single images",
    "height": "leave it out for the family's default",
    "width": "leave it out for the family's default",
    "text_length": "leave it out for the family's default",
    "sample_steps": "leave it out to sample only before training and at the end",
    "sampler_steps": "20 is the default",
    "student_interval": "1: the student learns in every step",
    "hsdp_shard_dim": "leave it out, or 1 for whole weights on each device",
    "hsdp_replicate_dim": "leave it out, or 1 for one copy",
}
_POSITIVE = ("frame_rate", "logit_std", "flow_shift", "critic_learning_rate", "embedded_guidance")
_FIXED: Mapping[str, str] = {
    "eval_dataset": "use samples instead: --samples, --sample_steps, --sample_prompts",
    "memory_efficient_init": "each process loads the transformer whole before it is sharded",
    "fp16": "--bf16 true needs no loss scaling",
}
"""Flags of other recipes that this one cannot serve."""


def check_mesh(config: VideoConfig) -> None:
    """Reject FastVideo's numbers of shards and copies if another flag contradicts them.

    Raises:
        ConfigError: They contradict each other.
    """
    if config.hsdp_shard_dim == 1 and config.fsdp_strategy != "none":
        raise ConfigError(
            f"hsdp_shard_dim is 1 with fsdp_strategy {config.fsdp_strategy}",
            expected="more than one shard, or no FSDP",
            hint="leave one of the two out",
        )
    if (config.hsdp_replicate_dim or 1) > 1 and (config.hsdp_shard_dim or 1) == 1:
        return  # copies alone are DDP
    if (config.hsdp_replicate_dim or 1) > 1 and config.fsdp_strategy not in ("none", "hybrid_shard"):
        raise ConfigError(
            f"hsdp_replicate_dim is {config.hsdp_replicate_dim} with fsdp_strategy {config.fsdp_strategy}",
            expected="hybrid_shard, which has copies of shards",
            hint="leave --fsdp_strategy out",
        )


def check(config: VideoConfig) -> None:
    """Reject invalid values of the recipe's own flags.

    Raises:
        ConfigError: There is one.
    """
    for name, hint in _COUNTS.items():
        at_least(name, getattr(config, name), 1, hint)
    at_least("samples", config.samples, 0, "0 makes no samples")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} is {value!r}", expected="a number above zero", hint=f"leave {name} out")
    if not 0 <= config.caption_dropout <= 1:
        raise ConfigError(
            f"caption_dropout is {config.caption_dropout!r}", expected="a share from 0 to 1", hint="0.1 is usual"
        )
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        raise ConfigError(
            f"ema_decay is {config.ema_decay!r}", expected="a share from 0 to below 1", hint="0.999 is usual"
        )
    if config.split_dataset_ratio:
        raise ConfigError("split_dataset_ratio is given", expected="no evaluation", hint=_FIXED["eval_dataset"])
    for name, hint in _FIXED.items():
        if getattr(config, name):
            raise ConfigError(f"{name} is {getattr(config, name)!r}", expected="it left out in this recipe", hint=hint)
    if config.ema_decay is not None and config.fsdp_strategy != "none" and config.fsdp_version == 1:
        raise ConfigError(
            "ema_decay is set with fsdp_version 1",
            expected="FSDP2",
            hint="leave --fsdp_version out",
        )
    _check_distillation(config)


def _check_distillation(config: VideoConfig) -> None:
    """Reject a student without timesteps, and flags that distillation cannot be combined with."""
    words = config.student_timesteps.replace(",", " ").split()
    if not words or not all(word.isdigit() and 1 <= int(word) <= 1000 for word in words):
        raise ConfigError(
            f"student_timesteps is {config.student_timesteps!r}",
            expected="numbers from 1 to 1000 with commas between them",
            hint="1000,757,522 are three steps of the student",
        )
    if config.backwards not in (1, 2):
        raise ConfigError(f"backwards is {config.backwards}", expected="1 or 2", hint="both give the same gradients")
    if not config.distill and (config.teacher is not None or config.critic is not None):
        raise ConfigError(
            "teacher or critic is set without distill",
            expected="--distill true with them",
            hint="leave them out to fine-tune",
        )
    if config.distill and config.train_type == "lora":
        raise ConfigError(
            "train_type is 'lora' with distill",
            expected="full: student and critic are complete transformers",
            hint="leave --train_type out",
        )
