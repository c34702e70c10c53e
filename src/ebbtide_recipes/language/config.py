"""The flags of recipes that train language models. No torch here: the command line reads this for ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.language.adapter_kinds import settings_in, settings_of
from ebbtide_recipes.skeleton.config import RecipeConfig

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "rich", "psutil")
"""What must be installed to train a language model."""


def loss_scaling_refused(weights: str) -> ConfigError:
    """Return the error of ``--fp16`` for adapters on weights that bitsandbytes quantised; ``weights``: in words."""
    # TRL converts such adapters to bfloat16, and torch scales no gradients of this type: pytorch#127176.
    return ConfigError(
        f"fp16 is true with {weights}",
        expected="weights whose adapters are float32: on these they are bfloat16, without loss scaling",
        hint="leave --fp16 out, or --bf16 true in its place",
    )


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(RecipeConfig):
    """The flags of recipes that train language models.

    Attributes:
        model: Model to train: a local path, a hub name, or builtin:smollm2 (SmolLM2-135M-Instruct).
        train_type: Train all weights (full), low-rank adapters (lora), the same on 4-bit weights (qlora), or the
            adapters of --adapter_config (adapter).
        adapter_config: PEFT adapters for --train_type adapter: boft, vera, ia3, ..., or a JSON file like PEFT's
            adapter_config.json.
        adapters: Folder of adapters to continue.
        attn_impl: Attention implementation.
        freeze_vit: Freeze the vision and audio parts of a multimodal model.
        system: System message put before every chat that has none.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        **RecipeConfig.unsupported,
        "quant_bits": "--train_type qlora loads the weights in 4 bits",
        "quant_method": "--train_type qlora uses bitsandbytes",
        "model_author": "rows are trained as they are: write the name into the data set",
        "model_name": "rows are trained as they are: write the name into the data set",
    }
    """Flags that users of other trainers of language models know, and that this release refuses."""
    aliases: ClassVar[Mapping[str, str]] = {
        **RecipeConfig.aliases,
        "actor_rollout_ref.model.enable_activation_offload": "activation_cpu_offload",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
        "actor_rollout_ref.model.path": "model",
        "model.enable_activation_offload": "activation_cpu_offload",
        "model.enable_gradient_checkpointing": "gradient_checkpointing",
        "model.path": "model",
        "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
        "actor_rollout_ref.actor.optim.lr": "learning_rate",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "warmup_ratio",
        "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
        "actor_rollout_ref.model.lora_alpha": "lora_alpha",
        "actor_rollout_ref.model.target_modules": "target_modules",
        "data.seed": "seed",
        "data.train_files": "dataset",
        "data.val_files": "eval_dataset",
        "trainer.default_local_dir": "output_dir",
        "trainer.n_gpus_per_node": "nproc_per_node",
        "trainer.nnodes": "nnodes",
        "trainer.total_epochs": "num_train_epochs",
    }
    """What users of ms-swift and verl call some of these."""
    length_flags: ClassVar[tuple[str, ...]] = ("max_length",)
    """Flags whose sum is the number of tokens in the longest sequence."""
    always_ends: ClassVar[bool] = True
    """Whether every text ends with the tokenizer's ``eos_token``."""

    model: str = "builtin:smollm2"
    train_type: Literal["full", "lora", "qlora", "adapter"] = "full"
    adapter_config: str | None = None
    adapters: str | None = None
    attn_impl: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    freeze_vit: bool = True
    system: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_adapters()

    @property
    def pads(self) -> bool:
        """Whether sequences of a batch may differ in length."""
        return True

    @cached_property
    def _named_adapters(self) -> dict[str, Any] | None:
        """The settings in the folder or file of adapters, read once: later it may be changed or removed."""
        if self.adapters is not None:
            return settings_in(Path(self.adapters).expanduser())
        return None if self.adapter_config is None else settings_of(self.adapter_config)

    @property
    def adapter_kind(self) -> str | None:
        """PEFT's name for the kind of adapters that are trained; ``None``: none.

        Raises:
            EbbtideError: A file or folder has a setting that cannot be used.
        """
        if not self.trains_adapters:
            return None
        return "LORA" if self._named_adapters is None else self._named_adapters["peft_type"]

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """Settings of the adapters that are trained, as PEFT names them, and ``freeze_vit``: values of JSON.

        Raises:
            EbbtideError: A file or folder has a setting that cannot be used.
        """
        if self._named_adapters is None:
            return {**super().adapter_settings, "freeze_vit": self.freeze_vit}
        made = {"target_modules": None if self.adapters is not None else [*self.target_modules], **self._named_adapters}
        names = made["target_modules"]
        made["target_modules"] = sorted(names) if isinstance(names, list) else names
        return {**made, "freeze_vit": self.freeze_vit}

    def without_effect(self) -> list[str]:
        """Return the flags that were set but have no effect in this mode."""
        idle = super().without_effect()
        if self.trains_adapters and self.adapters is not None:
            made = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules")
            idle += [name for name in made if name not in idle and self.is_set(name)]
        return idle

    def _check_adapters(self) -> None:
        """Reject adapters that are named twice, unused or without loss scaling, and unsupported empty models."""
        if self.train_type == "adapter" and self.adapter_config is None and self.adapters is None:
            raise ConfigError(
                "train_type is 'adapter' without a kind",
                expected="--adapter_config with a kind or a file, or --adapters with a folder to continue",
                hint="--adapter_config boft, vera or ia3; --train_type lora is the usual kind",
            )
        if self.adapter_config is not None and (self.train_type != "adapter" or self.adapters is not None):
            other = "adapters" if self.adapters is not None else f"train_type {self.train_type}"
            raise ConfigError(
                f"adapter_config is set with {other}",
                expected="it only with train_type adapter",
                hint="leave --adapter_config out" if self.adapters is not None else "--train_type adapter",
            )
        if self.adapters is not None and not self.trains_adapters:
            raise ConfigError(
                "adapters is set with train_type full",
                expected="a train_type that trains adapters",
                hint="--train_type lora, qlora or adapter continues them",
            )
        if self.fp16 and self.train_type == "qlora":
            raise loss_scaling_refused("train_type qlora")
        sharded = self.fsdp_strategy != "none"
        if self.memory_efficient_init and self.train_type == "qlora" and sharded and self.fsdp_version == 1:
            raise ConfigError(
                "memory_efficient_init is true with train_type qlora and FSDP1",
                expected="FSDP2, which shards 4-bit weights while they are read",
                hint="leave --fsdp_version out, or --memory_efficient_init",
            )
