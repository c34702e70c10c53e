"""verl's keys: their names here, and hints for those without a counterpart. No torch here.

Keys whose values set several flags are in ``translate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"

ALIASES: Mapping[str, str] = {
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_completion_length",
    "data.filter_overlong_prompts": "filter_overlong_prompts",
    "data.shuffle": "dataset_shuffle",
    "data.dataloader_num_workers": "dataloader_num_workers",
    "actor_rollout_ref.model.use_remove_padding": "padding_free",
    f"{_ACTOR}.strategy": "fsdp_strategy",
    f"{_ACTOR}.ppo_epochs": "num_iterations",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size",
    f"{_ACTOR}.clip_ratio_c": "delta",
    f"{_ROLLOUT}.n": "num_generations",
    f"{_ROLLOUT}.val_kwargs.n": "num_generations_eval",
    f"{_ROLLOUT}.temperature": "temperature",
    f"{_ROLLOUT}.tensor_model_parallel_size": "vllm_tensor_parallel_size",
    f"{_ROLLOUT}.top_p": "top_p",
    f"{_ROLLOUT}.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "trainer.max_actor_ckpt_to_keep": "save_total_limit",
}
"""verl's keys whose meaning is that of a flag here."""

_LOG_PROBS = "log-probabilities are computed in batches of --per_device_train_batch_size: leave it out"
_VALIDATION = "completions of an evaluation are sampled as in training: leave it out"
_OFFLOAD = "--fsdp_config with a JSON file that says cpu_offload; for activations --activation_cpu_offload true"
_REWARD = "--reward_funcs path.py:function takes a function of verl's kind too"
_VLLM = "vLLM's own choice is taken: leave it out"
_DYNAMIC = (
    "an update here is a fixed number of micro-batches of --per_device_train_batch_size sequences each, by which TRL "
    "counts steps; verl's varies with the tokens. actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu says how many, "
    "and actor_rollout_ref.model.use_remove_padding=True leaves their padding out"
)
_NO_CRITIC = "GRPO has no critic: leave it out"
_AS_ACTOR = "leave it out: the reference is sharded like the trained model"

UNSUPPORTED: Mapping[str, str] = {
    "data.val_batch_size": "--per_device_eval_batch_size",
    "data.truncation": "no prompt is ever cut: --filter_overlong_prompts drops the long ones, or refuses them",
    "data.prompt_key": "the column is `prompt`, `messages`, `question` or `problem`",
    "data.reward_fn_key": _REWARD,
    "data.return_raw_chat": "leave it out: reward functions get the prompts as the rows have them",
    "data.filter_overlong_prompts_workers": "prompts are measured in one process: leave it out",
    "data.train_max_samples": "NAME#1000 in data.train_files takes the first thousand rows",
    "data.val_max_samples": "NAME#1000 in data.val_files takes the first thousand rows",
    "data.image_key": "language models alone are trained here: leave it out",
    f"{_ACTOR}.use_dynamic_bsz": _DYNAMIC,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _DYNAMIC,
    f"{_ACTOR}.shuffle": "the completions of a rollout are dealt to its updates at random: leave it out",
    f"{_ACTOR}.kl_loss_type": "the loss has the low-variance estimate of the KL divergence (low_var_kl): leave it out",
    f"{_ACTOR}.entropy_coeff": "there is no entropy bonus: leave it out",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "sequences are not cut over processes: leave it out",
    **{f"{_ACTOR}.fsdp_config.{part}_offload": _OFFLOAD for part in ("param", "optimizer", "grad")},
    f"{_ACTOR}.fsdp_config.fsdp_size": "--fsdp_strategy hybrid_shard shards within a node and copies across nodes",
    f"{_ACTOR}.fsdp_config.model_dtype": "--torch_dtype",
    f"{_ACTOR}.fsdp_config.reshard_after_forward": "--fsdp_strategy shard_grad_op is verl's false",
    f"{_ACTOR}.use_torch_compile": "nothing is compiled: leave it out",
    f"{_REF}.strategy": _AS_ACTOR,
    f"{_REF}.fsdp_config.param_offload": "the reference stays on the device; with adapters it is the model itself",
    f"{_REF}.log_prob_micro_batch_size": _LOG_PROBS,
    f"{_REF}.ulysses_sequence_parallel_size": _AS_ACTOR,
    f"{_REF}.model.path": "the reference is the initial model",
    f"{_ROLLOUT}.mode": "generation and training take turns: leave it out",
    f"{_ROLLOUT}.do_sample": "completions are always sampled: --temperature",
    f"{_ROLLOUT}.log_prob_micro_batch_size": _LOG_PROBS,
    f"{_ROLLOUT}.enforce_eager": "leave it out",
    f"{_ROLLOUT}.free_cache_engine": "leave it out",
    f"{_ROLLOUT}.load_format": "the weights that are trained are the weights that generate: leave it out",
    f"{_ROLLOUT}.dtype": "transformers generates in the type of the weights (--torch_dtype), vLLM in config.json's",
    f"{_ROLLOUT}.max_num_batched_tokens": _VLLM,
    f"{_ROLLOUT}.max_num_seqs": _VLLM,
    f"{_ROLLOUT}.max_model_len": "it is --max_prompt_length and --max_completion_length together: leave it out",
    f"{_ROLLOUT}.enable_chunked_prefill": _VLLM,
    f"{_ROLLOUT}.layered_summon": "weights are gathered once for vLLM: leave it out",
    f"{_ROLLOUT}.multi_turn.enable": "a rollout is one answer to one prompt",
    f"{_ROLLOUT}.multi_turn.format": "a rollout is one answer to one prompt",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": _LOG_PROBS,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _LOG_PROBS,
    f"{_REF}.log_prob_use_dynamic_bsz": _LOG_PROBS,
    f"{_REF}.log_prob_max_token_len_per_gpu": _LOG_PROBS,
    **{f"{_ROLLOUT}.val_kwargs.{name}": _VALIDATION for name in ("do_sample", "temperature", "top_p", "top_k")},
    "actor_rollout_ref.model.external_lib": "--model names a folder or a hub name",
    "actor_rollout_ref.model.use_shm": "files are read where they are: leave it out",
    "actor_rollout_ref.model.use_liger": "leave it out",
    "actor_rollout_ref.model.trust_remote_code": "models that transformers knows are trained here: leave it out",
    "actor_rollout_ref.hybrid_engine": "one set of processes generates and trains: leave it out",
    "algorithm.adv_estimator": "GRPO's advantages are what this verb is about",
    "algorithm.kl_penalty": "the reward has log p - log p_reference of each token (kl): leave it out",
    "algorithm.kl_ctrl.type": "its weight in the reward is fixed: leave it out",
    "critic.": _NO_CRITIC,
    "reward_model.": _REWARD,
    "trainer.critic_warmup": _NO_CRITIC,
    "trainer.max_critic_ckpt_to_keep": _NO_CRITIC,
    "trainer.default_hdfs_dir": "checkpoints stay in --output_dir: copy them afterwards",
    "trainer.val_before_train": "evaluations come every --eval_steps steps and at the end",
    "trainer.resume_mode": "--resume_from_checkpoint latest",
    "trainer.resume_from_path": "--resume_from_checkpoint FOLDER",
    "trainer.balance_batch": "leave it out",
    "ray_kwargs.": "leave it out: torchrun starts the processes, not Ray",
}
"""verl's keys without a counterpart, and what to do instead; a name that ends in a dot means all keys of a section."""

GRANTED: Mapping[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ("grpo",),
    "algorithm.kl_penalty": ("kl", "k1"),
    "algorithm.kl_ctrl.type": ("fixed",),
    "data.truncation": ("error",),
    "data.prompt_key": ("prompt",),
    "data.reward_fn_key": ("data_source",),
    "data.train_max_samples": ("-1",),
    "data.val_max_samples": ("-1",),
    f"{_ACTOR}.kl_loss_type": ("low_var_kl", "k3"),
    f"{_ACTOR}.entropy_coeff": ("0", "0.0"),
    f"{_ACTOR}.shuffle": ("true",),
    f"{_ACTOR}.ulysses_sequence_parallel_size": ("1",),
    f"{_ACTOR}.fsdp_config.fsdp_size": ("-1",),
    f"{_ACTOR}.fsdp_config.reshard_after_forward": ("true",),
    f"{_REF}.ulysses_sequence_parallel_size": ("1",),
    f"{_ROLLOUT}.do_sample": ("true",),
    f"{_ROLLOUT}.enable_chunked_prefill": ("true",),
    f"{_ROLLOUT}.mode": ("sync",),
    f"{_ROLLOUT}.val_kwargs.do_sample": ("true",),
    **{f"{_ROLLOUT}.val_kwargs.{name}": () for name in ("temperature", "top_p", "top_k")},
    "actor_rollout_ref.hybrid_engine": ("true",),
    "trainer.critic_warmup": ("0",),
    "trainer.resume_mode": ("disable",),
}
"""Values of these that request what is always done here; values of the others are refused unless they are off."""
