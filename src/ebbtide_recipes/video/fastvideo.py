"""The flags of FastVideo's trainers: their names here, and the unsupported ones. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide_recipes.skeleton.config import RecipeConfig

_OWN_FIELDS = ("activation_offloading", "hsdp_shard_dim", "hsdp_replicate_dim", "enable_gradient_checkpointing_type")

ALIASES: Mapping[str, str] = {
    **RecipeConfig.aliases,
    "activation_offloading": "activation_cpu_offload",
    "pretrained_model_name_or_path": "model",
    "model_path": "model",
    "data": "dataset",
    "data_path": "dataset",
    "num_height": "height",
    "num_width": "width",
    "train_fps": "frame_rate",
    "num_gpus": "nproc_per_node",
    "tracker_project_name": "project_name",
    "train_batch_size": "per_device_train_batch_size",
    "max_train_steps": "max_steps",
    "lr_scheduler": "lr_scheduler_type",
    "training_state_checkpointing_steps": "save_steps",
    "checkpointing_steps": "save_steps",
    "checkpoints_total_limit": "save_total_limit",
    "training_cfg_rate": "caption_dropout",
    "weighting_scheme": "timestep_sampling",
    "embedded_cfg_scale": "embedded_guidance",
    "validation_steps": "sample_steps",
    "validation_sampling_steps": "sampler_steps",
    "validation_guidance_scale": "guidance_scale",
    "validation_prompts": "sample_prompts",
    "wandb_run_name": "run_name",
    "real_score_model_path": "teacher",
    "fake_score_model_path": "critic",
    "fake_score_learning_rate": "critic_learning_rate",
    "generator_update_interval": "student_interval",
    "dmd_denoising_steps": "student_timesteps",
}
"""What FastVideo calls some of the flags."""

UNSUPPORTED: Mapping[str, str] = {
    **{name: hint for name, hint in RecipeConfig.unsupported.items() if name not in _OWN_FIELDS},
    "lora_training": "--train_type lora",
    "mixed_precision": "--bf16 true computes in bfloat16 on float32 weights; --torch_dtype bfloat16 holds those",
    "dit_precision": "--torch_dtype float32 or bfloat16",
    "vae_precision": "the VAE runs in --torch_dtype",
    "num_latent_t": "--num_frames counts frames: for Wan 4 * (num_latent_t - 1) + 1",
    "lr_warmup_steps": "--warmup_ratio is the share of the steps in which the learning rate rises",
    "weight_only_checkpointing_steps": "--save_steps writes whole checkpoints; the end of a run saves the transformer",
    "use_ema": "--ema_decay 0.999 keeps a moving average",
    "ema_start_step": "--ema_decay averages from the first step on: leave it out",
    "num_euler_timesteps": "--sampler_steps is for samples, --student_timesteps for distillation",
    "multi_phased_distill_schedule": "--distill true has one phase: leave it out",
    "not_apply_cfg_solver": "--distill true has no solver: leave it out",
    "log_validation": "samples are made unless --samples is 0",
    "validation_dataset_file": "--sample_prompts takes captions",
    "validation_sampling_methods": "samples are made by the pipeline's own scheduler",
    "sp_size": "a clip stays on one device: leave it out",
    "tp_size": "weights are sharded by FSDP: --hsdp_shard_dim",
    "train_sp_batch_size": "a clip stays on one device: leave it out",
    "real_score_guidance_scale": "the teacher is called without guidance",
    "simulate_generator_forward": "the student begins from noisy data",
    "min_timestep_ratio": "--timestep_sampling and --flow_shift say which noise levels are trained",
    "max_timestep_ratio": "--timestep_sampling and --flow_shift say which noise levels are trained",
    "data_merge_path": "--dataset takes a folder, or a .json, .jsonl or .csv file with path and cap",
    "inference_mode": "`ebbtide video` trains",
    "workload_type": "from text to video",
}
"""Flags that FastVideo's users know, and that this release refuses."""

GRANTED: Mapping[str, tuple[str, ...]] = {
    "sp_size": ("1",),
    "tp_size": ("1",),
    "train_sp_batch_size": ("1",),
}
"""Values of these that request what is always done here."""
