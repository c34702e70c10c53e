"""The flags that every recipe has. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ebbtide.base.actions import Plan
from ebbtide.base.checks import check_fields
from ebbtide.base.errors import ConfigError
from ebbtide.config import Auto, Minimal, Policy, policy_named
from ebbtide.planner import load_plan
from ebbtide_recipes.skeleton import rules

Mode = Literal["plain", "checkpointing", "ebbtide"]
Strategy = Literal["none", "full_shard", "shard_grad_op", "hybrid_shard", "native_fsdp", "accelerate", "fsdp", "fsdp2"]


OFFLOADING = ("min_bytes", "host_budget", "window", "blocks", "synchronous", "tensor_filter")
"""Flags that are parameters of ``enable_activation_offloading`` under the same names."""
OF_OFFLOADING = ("policy", "max_slowdown", "memory_budget", "offload_target", "disk_path", "verify", *OFFLOADING)
"""Flags that have an effect with ``activation_cpu_offload`` only."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The flags that every recipe has; a recipe's own config adds to them.

    Attributes:
        model: Model to train: a local path or a hub name.
        use_hf: Look names up on Hugging Face; false: on ModelScope (needs its package).
        dataset: Data sets to train on; NAME#1000 uses the first thousand rows. Several may be given.
        eval_dataset: Data set for evaluation; values as for --dataset, such as NAME::test for a hub's test split.
        split_dataset_ratio: Share of the rows held out for evaluation; 0.01 is 1 %.
        train_type: Train all weights (full) or adapters.
        activation_cpu_offload: Let ebbtide keep, offload or recompute each saved tensor.
        gradient_checkpointing: Alone: the trainer's checkpointing. With --activation_cpu_offload: the memory of
            checkpointing, by ebbtide.
        policy: auto, offload, inputs, minimal, keep, or a plan file (.json); default: set by the two flags above.
        max_slowdown: Largest slowdown of a step under --policy auto; default: 0.05, which is 5 %.
        memory_budget: Largest peak under --policy auto, such as 40GiB.
        offload_target: Store of offloaded bytes; auto is host memory with an accelerator, disk without.
        disk_path: Directory for offloaded bytes on disk; default: the first of the temporary directory, /var/tmp and
            ~/.cache/ebbtide that is on a disk.
        min_bytes: Smaller storages stay, such as 1MiB; 0 treats every storage; default: 64KiB.
        host_budget: Largest host memory for offloaded bytes, such as 200GiB; default: a fair share of the machine's.
        window: Bytes in flight each way, such as 1GiB; default: follows the model's largest block.
        blocks: Paths of the blocks, with *; default: found by structure. Several may be given.
        synchronous: Copy in order with compute: for devices with unreliable asynchronous copies.
        tensor_filter: path.py:function, which returns false for a tensor that is never offloaded. Without :function,
            the file's tensor_filter or custom_tensor_filter.
        verify: Compare every restored and recomputed tensor with what was saved. Slow.
        fsdp_strategy: none is DDP; full_shard shards weights, gradients and optimizer state; shard_grad_op keeps
            weights gathered between forward and backward; hybrid_shard is full_shard within a node and copies across
            nodes. twinkle's native_fsdp and accelerate are full_shard; so are verl's fsdp2, and fsdp with
            fsdp_version 1.
        fsdp_version: 2 is fully_shard, 1 is FullyShardedDataParallel.
        fsdp_config: FSDP settings as for transformers and ms-swift: a JSON file, JSON, or a mapping in YAML.
        fsdp: As --fsdp_config, or fsdp2, or words such as "full_shard auto_wrap".
        memory_efficient_init: Read only each process's part of the weights, straight into place.
        nproc_per_node: Processes to start on this node; default: NPROC_PER_NODE, or one per visible device.
        nnodes: Nodes that the run is meant for; an error if NNODES or torchrun names another number.
        ddp_timeout: Seconds that a process waits for the others, such as for one that tokenizes long data sets.
        deepspeed: Accepted with FSDP, without effect (a warning is logged); an error otherwise.
        per_device_train_batch_size: Sequences in a micro-batch.
        per_device_eval_batch_size: Sequences in a batch of the evaluation.
        gradient_accumulation_steps: Micro-batches in a step.
        num_train_epochs: Passes over the data, unless --max_steps is given.
        max_steps: Steps to train; -1 leaves it to --num_train_epochs.
        learning_rate: Peak learning rate; default: 1e-5 for full training, 1e-4 for adapters.
        lr_scheduler_type: Decay of the learning rate.
        warmup_ratio: Share of the steps in which the learning rate rises; 0.05 is 5 %.
        weight_decay: Weight decay of AdamW.
        max_grad_norm: Gradient clipping norm; 0 is off.
        nan_loss: If the loss or its gradients are not finite: stop the run, or skip the step.
        torch_dtype: Type of weights and arithmetic; auto is float32 on a CPU, with --fp16, and with --bf16 for weights
            that are trained; else bfloat16.
        bf16: Compute in bfloat16 where it is safe, on weights of --torch_dtype (mixed precision); adapters are float32,
            on 4-bit weights bfloat16.
        fp16: Compute in float16 where it is safe, with loss scaling; needs an accelerator.
        lora_rank: Rank of the adapters.
        lora_alpha: Scale of the adapters.
        lora_dropout: Dropout before the adapters.
        target_modules: Modules that get adapters; all-linear is every linear module but the head.
        output_dir: Folder for the run file, training.log, checkpoints and the trained model.
        overwrite_output_dir: Replace an earlier run in the output folder.
        save: Save the trained model into the output folder.
        save_steps: Steps between two checkpoints; default: no checkpoints.
        save_total_limit: Checkpoints to keep; older ones are removed once a newer one is complete.
        resume_from_checkpoint: Checkpoint folder, or latest: the newest complete one in output_dir.
        eval_steps: Steps between two evaluations; default: one at the end.
        logging_steps: Steps between two log lines.
        log_level: debug shows the engine's lines, and tracebacks.
        report_to: Trackers, named as in transformers; none: no tracker.
        run_name: Name of the run for trackers.
        project_name: Project of the run for trackers; default: the tracker's variable, such as WANDB_PROJECT.
        dataloader_num_workers: Processes that prepare batches; 0: the training process.
        seed: Seed of data order and of new weights.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "activation_offloading": "the flag is --activation_cpu_offload here",
        "device_map": "leave it out: a recipe trains one whole model, or one FSDP shard, per device",
        "hsdp_shard_dim": "--fsdp_strategy hybrid_shard: shards within a node, copies across nodes",
        "hsdp_replicate_dim": "--fsdp_strategy hybrid_shard: shards within a node, copies across nodes",
        "enable_gradient_checkpointing_type": "--gradient_checkpointing true, or --policy for another choice",
    }
    """Flags that users of other trainers know, and that no recipe of this release takes."""
    aliases: ClassVar[Mapping[str, str]] = {
        "tuner_type": "train_type",
        "val_dataset": "eval_dataset",
        "strategy": "fsdp_strategy",
        "enable_activation_offload": "activation_cpu_offload",
        "enable_gradient_checkpointing": "gradient_checkpointing",
        "external_plugins": "tensor_filter",
    }
    """What users of other trainers call some of these; a dotted name is a key inside a section of a YAML file."""
    groups: ClassVar[Mapping[str, str]] = {}
    """First parts of another program's dotted keys, and its name."""
    page: ClassVar[str] = ""
    """Lists all names that the recipe knows; empty: only its help does."""
    mappings: ClassVar[tuple[str, ...]] = ("fsdp_config", "fsdp")
    """Flags that also take a mapping; it is kept as JSON."""
    default_rates: ClassVar[tuple[float, float]] = (1e-5, 1e-4)
    """Default learning rates of full training, and of adapters."""

    model: str
    use_hf: bool = True
    dataset: tuple[str, ...]
    eval_dataset: tuple[str, ...] | None = None
    split_dataset_ratio: float = 0.0
    train_type: Literal["full", "lora", "qlora", "adapter"] = "full"
    activation_cpu_offload: bool = False
    gradient_checkpointing: bool = False
    policy: str | None = None
    max_slowdown: float | None = None
    memory_budget: str | None = None
    offload_target: Literal["auto", "host", "disk"] = "auto"
    disk_path: str | None = None
    min_bytes: str | None = None
    host_budget: str | None = None
    window: str | None = None
    blocks: tuple[str, ...] | None = None
    synchronous: bool = False
    tensor_filter: str | None = None
    verify: bool = False
    fsdp_strategy: Strategy = "none"
    fsdp_version: int = 2
    fsdp_config: str | None = None
    fsdp: str | None = None
    memory_efficient_init: bool = False
    nproc_per_node: int | None = None
    nnodes: int | None = None
    ddp_timeout: int = 1800
    deepspeed: str | None = None
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 1.0
    max_steps: int = -1
    learning_rate: float | None = None
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    nan_loss: Literal["stop", "skip"] = "stop"
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    bf16: bool = False
    fp16: bool = False
    lora_rank: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)
    output_dir: str
    overwrite_output_dir: bool = False
    save: bool = True
    save_steps: int | None = None
    save_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    eval_steps: int | None = None
    logging_steps: int = 5
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    report_to: tuple[str, ...] = ("none",)
    run_name: str | None = None
    project_name: str | None = None
    dataloader_num_workers: int = 0
    seed: int = 42

    def __post_init__(self) -> None:
        for name in self.mappings:
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, json.dumps(value))
        check_fields(self)
        rules.check_texts(vars(self))
        rules.check_numbers(vars(self))
        self.chosen_policy()
        self._check_together()

    @property
    def mode(self) -> Mode:
        """The mode that the two flags together choose."""
        if self.activation_cpu_offload:
            return "ebbtide"
        return "checkpointing" if self.gradient_checkpointing else "plain"

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.train_type != "full"

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.eval_dataset is not None or self.split_dataset_ratio > 0

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate given, or the default of the training type."""
        return self.default_rates[self.trains_adapters] if self.learning_rate is None else self.learning_rate

    @property
    def adapter_kind(self) -> str | None:
        """PEFT's name for the kind of adapters that are trained; ``None``: none."""
        return "LORA" if self.trains_adapters else None

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """Settings of the adapters that are trained, as PEFT names them: values of JSON."""
        made = {"r": self.lora_rank, "lora_alpha": self.lora_alpha, "lora_dropout": self.lora_dropout}
        return {**made, "target_modules": sorted(self.target_modules)}

    def chosen_policy(self) -> Policy | Plan:
        """Return the policy that the flags name, or the plan of the file.

        Raises:
            ConfigError: There is no such policy, or it does not allow these values.
            DataError: The plan file cannot be read.
        """
        if self.policy is not None and self.policy.endswith(".json"):
            return load_plan(self.policy)
        if self.policy not in (None, "auto"):
            return policy_named(str(self.policy))
        if self.max_slowdown is None:
            return Auto(memory_budget=self.memory_budget)
        return Auto(memory_budget=self.memory_budget, max_slowdown=self.max_slowdown)

    def without_effect(self) -> list[str]:
        """Return the flags that were set but have no effect in this mode."""
        rank = ("lora_rank", "lora_alpha", "lora_dropout")
        idle = OF_OFFLOADING if self.mode != "ebbtide" else ()
        if self.train_type not in ("lora", "qlora"):
            idle = (*idle, *rank)
        if not self.trains_adapters:
            idle = (*idle, "target_modules")
        if self.mode == "ebbtide" and self.gradient_checkpointing:
            idle = (*idle, "max_slowdown", "memory_budget")
        if not self.evaluates:
            idle = (*idle, "eval_steps", "per_device_eval_batch_size")
        if self.save_steps is None:
            idle = (*idle, "save_total_limit")
        if self.fsdp_strategy == "none":
            idle = (*idle, "fsdp_version")
        if self.lr_scheduler_type == "constant":  # constant_with_warmup has one
            idle = (*idle, "warmup_ratio")
        return [name for name in idle if self.is_set(name)]

    def is_set(self, name: str) -> bool:
        """Whether a flag has another value than its default."""
        return getattr(self, name) != getattr(type(self), name)

    def _check_together(self) -> None:
        both = self.gradient_checkpointing and self.activation_cpu_offload
        if both and self.policy is not None and self.chosen_policy() != Minimal():
            raise ConfigError(
                f"policy is {self.policy!r} with gradient_checkpointing true",
                expected="no policy, or 'minimal': the two flags together mean checkpointing's memory",
                hint="leave --gradient_checkpointing out to use another policy",
            )
        if self.policy not in (None, "auto") and (self.max_slowdown is not None or self.memory_budget is not None):
            raise ConfigError(
                f"max_slowdown or memory_budget is set with policy {self.policy!r}",
                expected="policy auto",
                hint="leave --policy out, or --max_slowdown and --memory_budget",
            )
        if self.bf16 and self.fp16:
            raise ConfigError(
                "bf16 and fp16 are both true", expected="one of the two", hint="bf16 needs no loss scaling"
            )
        if self.fp16 and self.torch_dtype == "bfloat16":
            raise ConfigError(
                "fp16 is true with torch_dtype bfloat16",
                expected="float32 weights for float16 arithmetic",
                hint="--torch_dtype float32, or --bf16 true in place of --fp16",
            )
        if self.eval_dataset is not None and self.split_dataset_ratio > 0:
            raise ConfigError(
                "eval_dataset and split_dataset_ratio are both set",
                expected="one of the two",
                hint="leave --split_dataset_ratio out",
            )
        if self.fsdp is not None and self.fsdp_config is not None:
            raise ConfigError(
                "fsdp and fsdp_config are both set",
                expected="one of the two: both name FSDP's settings",
                hint="leave --fsdp out; --fsdp_strategy says what is sharded",
            )
