"""What ``ebbtide sft`` can be told. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ebbtide.base.checks import check_fields
from ebbtide.base.errors import ConfigError
from ebbtide.config import Auto, Policy, policy_named

Mode = Literal["plain", "checkpointing", "ebbtide"]

_COUNTS: Mapping[str, str] = {
    "per_device_train_batch_size": "1 takes the least memory",
    "gradient_accumulation_steps": "1 makes each micro-batch a step",
    "lora_rank": "8 is the default",
    "lora_alpha": "32 is the default",
    "logging_steps": "1 logs every step; --log_level warning logs none",
}
"""Numbers that are 1 or more, each with what to do about a smaller one."""

_POSITIVE: Mapping[str, str] = {
    "num_train_epochs": "1 passes over the data once, 0.5 over half of it; --max_steps N counts steps instead",
    "learning_rate": "leave it out for 1e-5 (full training) or 1e-4 (LoRA)",
}
"""Numbers above zero, each with what to do about another."""

_SINGLE = "this release trains in one process: leave the flag out, or set it to none"

UNSUPPORTED: Mapping[str, str] = {
    "deepspeed": "this release trains in one process; leave --deepspeed out",
    "fsdp_strategy": _SINGLE,
    "fsdp_version": _SINGLE,
    "fsdp_config": _SINGLE,
    "nproc_per_node": _SINGLE,
    "memory_efficient_init": "models are loaded whole in this release: leave the flag out",
    "resume_from_checkpoint": "training writes no checkpoints yet: start from a saved model with --model PATH",
    "freeze_vit": "this release trains text models only",
    "bf16": "for bfloat16 weights and arithmetic use --torch_dtype bfloat16",
    "fp16": "float16 needs loss scaling, which this release does not do: use --torch_dtype bfloat16",
    "enable_activation_offload": "the flag is --activation_cpu_offload here",
    "enable_gradient_checkpointing": "the flag is --gradient_checkpointing here",
    "activation_offloading": "the flag is --activation_cpu_offload here",
}
"""Flags that users of this and other trainers know, and that this release refuses."""


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Fine-tune a language model; see where its activation memory goes.

    --activation_cpu_offload and --gradient_checkpointing together choose the mode: neither is plain training, the
    second alone is the trainer's own checkpointing, the first alone is ebbtide with the policy Auto, both together are
    ebbtide with the policy Minimal.

    Attributes:
        model: Model to train: a local path, a hub name, or builtin:smollm2 (SmolLM2-135M-Instruct).
        dataset: Data set: builtin:pydoc, a .jsonl, .json or .parquet file, or a hub name; NAME#1000 takes
            the first thousand rows. Several may be given.
        train_type: Train all weights, or low-rank adapters (LoRA).
        activation_cpu_offload: Let ebbtide keep, offload or recompute each saved tensor.
        gradient_checkpointing: Alone: the trainer's checkpointing. Beside --activation_cpu_offload: the memory of
            checkpointing, by ebbtide.
        policy: What ebbtide does with saved tensors; left out, the two flags above decide.
        max_slowdown: For the policy auto: how much slower a step may be; 0.05 is 5 %.
        memory_budget: For the policy auto: the peak to stay below, such as 40GiB.
        offload_target: Where offloaded bytes wait; auto is host memory with an accelerator, disk without.
        disk_path: Directory for offloaded bytes on disk; left out, the system's temporary directory.
        verify: Compare every restored and recomputed tensor with what was saved. Slow.
        per_device_train_batch_size: Sequences in a micro-batch.
        gradient_accumulation_steps: Micro-batches in a step.
        num_train_epochs: Passes over the data, unless --max_steps is given.
        max_steps: Steps to train; -1 leaves it to --num_train_epochs.
        learning_rate: Peak learning rate; left out, 1e-5 for full training and 1e-4 for LoRA.
        max_length: Tokens in a sequence; longer rows are cut.
        packing: Concatenate rows and cut them into sequences of exactly max_length tokens.
        attn_impl: Attention implementation.
        torch_dtype: Type of weights and arithmetic; auto is float32 on a CPU, bfloat16 on an accelerator.
        lora_rank: Rank of the adapters.
        lora_alpha: Scale of the adapters.
        target_modules: Module names that get adapters; all-linear takes every linear module but the head.
        output_dir: Folder for the run file, training.log and the trained model.
        overwrite_output_dir: Replace an earlier run in the output folder.
        save: Save the trained model into the output folder.
        logging_steps: Steps between two log lines.
        log_level: debug shows the engine's lines, and tracebacks.
        report_to: Trackers to report to, as transformers names them; none for no tracker.
        seed: Seed of data order and of new weights.
    """

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED

    model: str = "builtin:smollm2"
    dataset: tuple[str, ...] = ("builtin:pydoc",)
    train_type: Literal["full", "lora", "qlora", "adapter"] = "full"
    activation_cpu_offload: bool = False
    gradient_checkpointing: bool = False
    policy: Literal["auto", "offload", "inputs", "minimal", "keep"] | None = None
    max_slowdown: float | None = None
    memory_budget: str | None = None
    offload_target: Literal["auto", "host", "disk"] = "auto"
    disk_path: str | None = None
    verify: bool = False
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 1.0
    max_steps: int = -1
    learning_rate: float | None = None
    max_length: int = 1024
    packing: bool = False
    attn_impl: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lora_rank: int = 8
    lora_alpha: int = 32
    target_modules: tuple[str, ...] = ("all-linear",)
    output_dir: str = "runs/sft"
    overwrite_output_dir: bool = False
    save: bool = True
    logging_steps: int = 5
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    report_to: tuple[str, ...] = ("none",)
    seed: int = 42

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_texts()
        self._check_numbers()
        self._check_together()

    def _check_texts(self) -> None:
        """Refuse empty text, and training types of later releases."""
        texts = {"model": (self.model,), "output_dir": (self.output_dir,), "disk_path": (self.disk_path,)}
        for name in ("dataset", "target_modules", "report_to"):
            texts[name] = getattr(self, name) or ("",)
        for name, values in texts.items():
            if any(value is not None and not value.strip() for value in values):
                raise ConfigError(f"{name} is empty", expected="a name", hint=f"leave {name} out for its default")
        if self.train_type in ("qlora", "adapter"):
            raise ConfigError(
                f"train_type is {self.train_type!r}",
                expected="'full' or 'lora' in this release",
                hint="--train_type lora trains adapters on unquantised weights",
            )

    def _check_numbers(self) -> None:
        """Refuse numbers that make no run."""
        for name, hint in _COUNTS.items():
            _at_least(name, getattr(self, name), 1, hint)
        _at_least("max_length", self.max_length, 2, "1024 is the default; a token is learned from the one before it")
        if self.max_steps != -1 and self.max_steps < 1:
            raise ConfigError(
                f"max_steps is {self.max_steps}",
                expected="1 or more, or -1",
                hint="-1, or leaving it out, leaves the length to --num_train_epochs",
            )
        for name, hint in _POSITIVE.items():
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)!r}", expected="a number above zero", hint=hint)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(
                f"seed is {self.seed}", expected="0 to 4294967295", hint="42 is the default; any such number will do"
            )

    def _check_together(self) -> None:
        """Refuse flags that contradict one another, and bad values also where they would have no use."""
        if self.gradient_checkpointing and self.activation_cpu_offload and self.policy not in (None, "minimal"):
            raise ConfigError(
                f"policy is {self.policy!r} beside gradient_checkpointing true",
                expected="no policy, or 'minimal': the two flags together mean checkpointing's memory",
                hint="leave --gradient_checkpointing out to use another policy",
            )
        self.chosen_policy()
        if self.policy not in (None, "auto") and (self.max_slowdown is not None or self.memory_budget is not None):
            raise ConfigError(
                f"max_slowdown or memory_budget is given beside policy {self.policy!r}",
                expected="the policy auto, which alone weighs memory against time",
                hint="leave --policy out, or --max_slowdown and --memory_budget",
            )

    @property
    def mode(self) -> Mode:
        """What the two flags together mean."""
        if self.activation_cpu_offload:
            return "ebbtide"
        return "checkpointing" if self.gradient_checkpointing else "plain"

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate given, or the default of the training type."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if self.train_type == "lora" else 1e-5

    def chosen_policy(self) -> Policy:
        """Return the policy that the flags name.

        Raises:
            ConfigError: The policy cannot be had with these values.
        """
        if self.policy not in (None, "auto"):
            return policy_named(str(self.policy))
        if self.max_slowdown is None:
            return Auto(memory_budget=self.memory_budget)
        return Auto(memory_budget=self.memory_budget, max_slowdown=self.max_slowdown)

    def without_effect(self) -> list[str]:
        """Return the flags that were given but do nothing in this mode."""
        ours = ("policy", "max_slowdown", "memory_budget", "offload_target", "disk_path", "verify")
        lora = ("lora_rank", "lora_alpha", "target_modules")
        idle = (*(ours if self.mode != "ebbtide" else ()), *(lora if self.train_type != "lora" else ()))
        if self.mode == "ebbtide" and self.gradient_checkpointing:
            idle = (*idle, "max_slowdown", "memory_budget")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in idle if getattr(self, name) != defaults[name]]


def _at_least(name: str, value: int, least: int, hint: str) -> None:
    """Refuse a number below the least that makes sense."""
    if value < least:
        raise ConfigError(f"{name} is {value}", expected=f"{least} or more", hint=hint)


def refuse_several_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to run under a launcher that started several processes.

    Raises:
        ConfigError: ``WORLD_SIZE`` or ``NPROC_PER_NODE`` is above one.
    """
    for name in ("WORLD_SIZE", "NPROC_PER_NODE"):
        if environment.get(name, "1").strip() not in ("", "1"):
            raise ConfigError(
                f"{name} is {environment[name]!r} in the environment",
                expected="1: this release trains in one process",
                hint="start `ebbtide sft` without torchrun and without NPROC_PER_NODE",
            )
