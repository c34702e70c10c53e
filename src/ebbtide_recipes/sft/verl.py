"""verl's keys: their names in ``ebbtide sft``, and hints for those without a counterpart. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

_ACTOR = "actor_rollout_ref.actor"

ALIASES: Mapping[str, str] = {
    "data.train_files": "dataset",
    "data.val_files": "eval_dataset",
    "data.max_length": "max_length",
    "data.micro_batch_size_per_gpu": "per_device_train_batch_size",
    "data.seed": "seed",
    "actor_rollout_ref.model.lora_alpha": "lora_alpha",
    "actor_rollout_ref.model.target_modules": "target_modules",
    f"{_ACTOR}.strategy": "fsdp_strategy",
    f"{_ACTOR}.grad_clip": "max_grad_norm",
    f"{_ACTOR}.optim.lr": "learning_rate",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "warmup_ratio",
    f"{_ACTOR}.optim.weight_decay": "weight_decay",
    "model.partial_pretrain": "model",
    "model.strategy": "fsdp_strategy",
    "model.lora_alpha": "lora_alpha",
    "model.target_modules": "target_modules",
    "optim.lr": "learning_rate",
    "optim.warmup_steps_ratio": "warmup_ratio",
    "optim.lr_warmup_steps_ratio": "warmup_ratio",
    "optim.weight_decay": "weight_decay",
    "optim.clip_grad": "max_grad_norm",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.total_training_steps": "max_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.n_gpus_per_node": "nproc_per_node",
    "trainer.experiment_name": "run_name",
    "trainer.default_local_dir": "output_dir",
}
"""verl's keys whose meaning is that of a flag here: of its trainer for fine-tuning, and of the model in its others."""

_NO_CRITIC = "one model is trained, and there is no critic: leave it out; --activation_cpu_offload is the model's"
_BATCH = "--per_device_train_batch_size x processes x --gradient_accumulation_steps is the batch of a step"
_OFFLOAD = "--fsdp_config '{\"cpu_offload\": true}'; for activations --activation_cpu_offload true"
_REINFORCE = "`ebbtide grpo` trains by rewards"

UNSUPPORTED: Mapping[str, str] = {
    "critic.strategy": _NO_CRITIC,
    "critic.model.path": _NO_CRITIC,
    "critic.model.enable_activation_offload": _NO_CRITIC,
    "critic.model.enable_gradient_checkpointing": _NO_CRITIC,
    "critic.optim.lr": _NO_CRITIC,
    "critic.ppo_micro_batch_size_per_gpu": _NO_CRITIC,
    "data.train_batch_size": _BATCH,
    "data.micro_batch_size": _BATCH,
    "data.truncation": "longer rows are cut at --max_length: leave it out",
    "data.prompt_key": "the columns are `question` and `answer`, `prompt` and `completion`, ...: rename them",
    "data.response_key": "the columns are `question` and `answer`, `prompt` and `completion`, ...: rename them",
    "data.max_prompt_length": f"--max_length counts all tokens of a row; {_REINFORCE}",
    "data.max_response_length": f"--max_length counts all tokens of a row; {_REINFORCE}",
    "actor_rollout_ref.model.use_remove_padding": "--packing true",
    "actor_rollout_ref.model.lora_rank": "--train_type lora --lora_rank N",
    "model.lora_rank": "--train_type lora --lora_rank N",
    "model.use_liger": "leave it out",
    "model.trust_remote_code": "models that transformers knows are trained here: leave it out",
    "actor_rollout_ref.model.trust_remote_code": "models that transformers knows are trained here: leave it out",
    "model.fsdp_config.cpu_offload": _OFFLOAD,
    f"{_ACTOR}.fsdp_config.param_offload": _OFFLOAD,
    f"{_ACTOR}.fsdp_config.optimizer_offload": _OFFLOAD,
    f"{_ACTOR}.fsdp_config.grad_offload": _OFFLOAD,
    f"{_ACTOR}.ppo_mini_batch_size": _BATCH,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": f"--per_device_train_batch_size; {_REINFORCE}",
    "actor_rollout_ref.rollout.name": _REINFORCE,
    "actor_rollout_ref.rollout.n": _REINFORCE,
    "algorithm.adv_estimator": _REINFORCE,
    "use_remove_padding": "--packing true",
    "ulysses_sequence_parallel_size": "sequences are not cut over processes: leave it out",
    "trainer.logger": "--report_to wandb, tensorboard, ...",
    "trainer.project_name": "--run_name names the run for trackers",
    "trainer.nnodes": "NNODES, NODE_RANK and MASTER_ADDR in the environment, or torchrun",
}
"""verl's keys with no twin, and what to do instead."""

GRANTED: Mapping[str, tuple[str, ...]] = {
    "data.truncation": ("right",),
    "actor_rollout_ref.model.lora_rank": ("0",),
    "model.lora_rank": ("0",),
    "ulysses_sequence_parallel_size": ("1",),
    "trainer.nnodes": ("1",),
    "trainer.logger": ("console",),
}
"""Values of these that ask for what is done here in any case."""
