"""Flags of ``ebbtide plan``. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from ebbtide.base.checks import check_fields
from ebbtide.base.errors import ConfigError
from ebbtide.base.units import parse_size
from ebbtide.config import Auto
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton.rules import at_least, check_texts
from ebbtide_recipes.video.config import VideoConfig

UNSUPPORTED: Mapping[str, str] = {
    "dataset": "leave it out: every sequence has --max_length tokens",
    "packing": "every sequence is taken to be --max_length tokens long, as packing makes them",
    "activation_cpu_offload": "leave it out: the table has a row with it and rows without",
    "gradient_checkpointing": "leave it out: the table has a row with it and rows without",
    "policy": "leave it out: the table has a row for each",
    "fsdp_strategy": "--gpus above 1 means full_shard",
    "nproc_per_node": "the flag is --gpus here",
    "fp16": "--bf16 true plans mixed precision whose halves are as large",
    "adapters": "--train_type lora with the same --lora_rank and --target_modules is as large",
    "adapter_config": "--train_type lora is the kind of adapter that can be planned",
}
"""Flags that ``sft`` has and that mean nothing here, or nothing yet."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Predict whether training fits on a device, and with which plan, from the model's config alone.

    No weights are read, and no GPU is needed: one step of the model is simulated with fake tensors. Without --gpu, this
    machine is measured.

    Attributes:
        recipe: Recipe: sft for a language model, video for a video transformer.
        model: Model to plan for: a folder with config.json, such a file, a hub name, or a built-in name; for video a
            pipeline's folder, a transformer's config.json, or the folder of one. Left out, builtin:smollm2 or
            builtin:small-wan.
        gpu: Device to plan for: b200, h200, h100, h20, gh200, a100, a100-40g, l40s, a10, a10g, 5090,
            4090, mi300x, or a JSON file that describes a machine.
        gpus: Devices to train on; with more than one, FSDP shards weights, gradients and optimizer state over all.
        host_memory: Host memory of a node, such as 2TiB; default: from the table of machines.
        train_type: Train all weights (full), low-rank adapters (lora), or low-rank adapters on 4-bit weights (qlora).
        lora_rank: Rank of the adapters.
        target_modules: Modules that get adapters; all-linear is every linear module but the head.
        freeze_vit: Freeze the vision and audio parts of a multimodal model.
        per_device_train_batch_size: Sequences or clips in a micro-batch.
        gradient_accumulation_steps: Micro-batches in a step; above 1, earlier gradients use memory too.
        optim: Optimizer whose state is counted: adamw has two numbers for each trained weight, adamw_8bit two of 8
            bits, sgd_momentum one, sgd none, adafactor one for each row and column of a matrix.
        max_length: Tokens in a sequence.
        num_frames: For video: frames of a clip; default, as for the next three: the family's.
        height: For video: pixels.
        width: For video: pixels.
        text_length: For video: tokens of a caption.
        torch_dtype: Type of weights and arithmetic; auto is float32 on a CPU and for full training with --bf16, else
            bfloat16.
        bf16: Compute in bfloat16 where it is safe (mixed precision); trained weights are float32.
        attn_impl: Attention implementation.
        memory_budget: Largest peak, such as 40GiB; default: nine tenths of the device's memory.
        max_slowdown: Largest slowdown of a step of ebbtide-auto; 0.05 is 5 %.
        out: File for the best plan that fits, other than checkpointing; policy="plan.json" then starts with it.
        svg: File for a picture of slowdown over peak memory, of all options and of ebbtide-auto at several budgets.
        json: Print the result as JSON, with the points of that picture.
    """

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED
    aliases: ClassVar[Mapping[str, str]] = {"tuner_type": "train_type"}

    recipe: Literal["sft", "video"] = "sft"
    model: str | None = None
    gpu: str | None = None
    gpus: int = 1
    host_memory: str | None = None
    train_type: Literal["full", "lora", "qlora"] = "full"
    lora_rank: int = 8
    target_modules: tuple[str, ...] = ("all-linear",)
    freeze_vit: bool = True
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    optim: Literal["adamw", "adamw_8bit", "sgd", "sgd_momentum", "adafactor"] = "adamw"
    max_length: int = 1024
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    text_length: int | None = None
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    bf16: bool = False
    attn_impl: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    memory_budget: str | None = None
    max_slowdown: float = 0.05
    out: str | None = None
    svg: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        at_least("gpus", self.gpus, 1, "1 is the default")
        check_texts({name: getattr(self, name) for name in ("gpu", "out", "svg", "model")})
        _ = self.host_bytes, self.budget_bytes
        self._check_together()
        self.as_recipe()

    def _check_together(self) -> None:
        if self.train_type == "qlora" and (self.gpus > 1 or self.recipe == "video" or self.bf16):
            other = "recipe video" if self.recipe == "video" else "bf16 true" if self.bf16 else f"gpus {self.gpus}"
            raise ConfigError(
                f"train_type is 'qlora' with {other}",
                expected="a language model in bfloat16 on one device: other 4-bit weights cannot be planned yet",
                hint="--train_type lora plans for the same adapters on weights of 16 bits, which take more memory",
            )
        if self.bf16 and self.torch_dtype == "bfloat16":
            raise ConfigError(
                "bf16 is true with torch_dtype bfloat16",
                expected="float32 weights for mixed precision",
                hint="leave --torch_dtype out for mixed precision, or --bf16 for weights in bfloat16 too",
            )

    @cached_property
    def budget_bytes(self) -> int | None:
        """``memory_budget`` in bytes; ``None``: the default."""
        _ = Auto(max_slowdown=self.max_slowdown)  # checks it; the page has an option for each
        return Auto(memory_budget=self.memory_budget).budget_bytes

    @cached_property
    def host_bytes(self) -> int | None:
        """``host_memory`` in bytes; ``None``: from the machine."""
        return None if self.host_memory is None else parse_size(self.host_memory, name="host_memory")

    @property
    def name(self) -> str:
        """The model, or the recipe's default."""
        return self.model or ("builtin:small-wan" if self.recipe == "video" else "builtin:smollm2")

    @property
    def length_flag(self) -> str:
        """The flag that sets how long a sequence or clip is."""
        return "--num_frames" if self.recipe == "video" else "--max_length"

    def as_recipe(self) -> SftConfig | VideoConfig:
        """Return the config of the recipe that would train this.

        Raises:
            ConfigError: A value cannot be used there.
        """
        kind = VideoConfig if self.recipe == "video" else SftConfig
        names = {field.name for field in dataclasses.fields(kind)} - {"max_slowdown", "memory_budget", "model"}
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        return kind(model=self.name, **values)

    def without_effect(self) -> list[str]:
        """Return the given flags that have no effect in combination with the others."""
        idle = ("lora_rank", "target_modules") if self.train_type == "full" else ()
        video = ("num_frames", "height", "width", "text_length")
        idle += ("max_length", "attn_impl", "freeze_vit") if self.recipe == "video" else video
        return [name for name in idle if getattr(self, name) != getattr(PlanConfig, name)]
