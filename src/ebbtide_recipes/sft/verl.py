"""verl's keys: their names in ``ebbtide sft``, and hints for those without a counterpart. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.base.errors import ConfigError
from ebbtide.cli.translation import Translation
from ebbtide_recipes.language import verl as common

_ACTOR = "actor_rollout_ref.actor"

ALIASES: Mapping[str, str] = {
    "data.max_length": "max_length",
    "data.truncation": "truncation",
    "data.micro_batch_size_per_gpu": "per_device_train_batch_size",
    f"{_ACTOR}.strategy": "fsdp_strategy",
    "model.partial_pretrain": "model",
    "model.strategy": "fsdp_strategy",
    "model.lora_alpha": "lora_alpha",
    "model.target_modules": "target_modules",
    "optim.lr": "learning_rate",
    "optim.warmup_steps_ratio": "warmup_ratio",
    "optim.lr_warmup_steps_ratio": "warmup_ratio",
    "optim.weight_decay": "weight_decay",
    "optim.clip_grad": "max_grad_norm",
    "trainer.total_training_steps": "max_steps",
    "trainer.seed": "seed",
    "trainer.max_ckpt_to_keep": "save_total_limit",
}
"""verl's keys whose meaning is that of a flag here: of its trainer for fine-tuning, and of the model in its others."""

_NO_CRITIC = "one model is trained, and there is no critic: leave it out; --activation_cpu_offload is the model's"
_BATCH = "--per_device_train_batch_size x processes x --gradient_accumulation_steps is the batch of a step"
_OFFLOAD = "--fsdp_config '{\"cpu_offload\": true}'; for activations --activation_cpu_offload true"
_REINFORCE = "`ebbtide grpo` trains by rewards"

UNSUPPORTED: Mapping[str, str] = {
    "critic.": _NO_CRITIC,
    "data.multiturn.enable": "rows with `messages` are chats: leave it out",
    "data.multiturn.messages_key": "the column is `messages`",
    "data.balance_dp_token": "leave it out",
    "data.chat_template": "the tokenizer's own is used: leave it out",
    "data.max_prompt_length": f"--max_length counts all tokens of a row; {_REINFORCE}",
    "data.max_response_length": f"--max_length counts all tokens of a row; {_REINFORCE}",
    "actor_rollout_ref.model.use_remove_padding": "leave it out: rows are padded to the longest of their batch",
    "model.use_liger": "leave it out",
    "model.trust_remote_code": "models that transformers knows are trained here: leave it out",
    "actor_rollout_ref.model.trust_remote_code": "models that transformers knows are trained here: leave it out",
    "model.fsdp_config.cpu_offload": _OFFLOAD,
    **{f"{_ACTOR}.fsdp_config.{part}_offload": _OFFLOAD for part in ("param", "optimizer", "grad")},
    f"{_ACTOR}.ppo_mini_batch_size": _BATCH,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": f"--per_device_train_batch_size; {_REINFORCE}",
    "actor_rollout_ref.rollout.name": _REINFORCE,
    "actor_rollout_ref.rollout.n": _REINFORCE,
    "algorithm.adv_estimator": _REINFORCE,
    "use_remove_padding": "leave it out: rows are padded to the longest of their batch",
    "optim.betas": "AdamW's are 0.9 and 0.999: leave it out",
    "ulysses_sequence_parallel_size": "sequences are not cut over processes: leave it out",
    "trainer.default_hdfs_dir": "checkpoints stay in --output_dir: copy them afterwards",
    "trainer.resume_path": "--resume_from_checkpoint FOLDER",
    "trainer.resume_mode": "--resume_from_checkpoint latest",
}
"""verl's keys without a counterpart, and what to do instead; a name that ends in a dot means all keys of a section."""

GRANTED: Mapping[str, tuple[str, ...]] = {
    "data.multiturn.messages_key": ("messages",),
    "ulysses_sequence_parallel_size": ("1",),
    "trainer.resume_mode": ("disable",),
}
"""Values of these that request what is always done here; values of the others are refused unless they are off."""

_TRAIN, _MICRO = "data.train_batch_size", "data.micro_batch_size"

TRANSLATED: Mapping[str, str] = {
    _TRAIN: "sequences in a step: `--gradient_accumulation_steps` is this / (processes x "
    "`--per_device_train_batch_size`)",
    _MICRO: "`--per_device_train_batch_size` x processes",
    "data.prompt_key": "`--prompt_key`",
    "data.prompt_dict_keys": "`--prompt_key COLUMN.KEY`, with the key before",
    "data.response_key": "`--response_key`",
    "data.response_dict_keys": "`--response_key COLUMN.KEY`, with the key before",
    "model.lora_rank": "`--train_type lora --lora_rank`; 0: no adapters",
    "actor_rollout_ref.model.lora_rank": "`--train_type lora --lora_rank`; 0: no adapters",
    "optim.lr_scheduler": "`--lr_scheduler_type`: cosine, or constant, which is constant_with_warmup",
    **common.TRANSLATED,
}
"""Keys whose values set one or more flags, in words for the page of flags."""


def translate(translation: Translation) -> None:
    """Set the fields that the keys of verl's trainer for fine-tuning mean. One of its steps is one here.

    Raises:
        ConfigError: Numbers do not fit one another, or a field is set twice.
    """
    common.share_names(translation)
    for key in ("model.lora_rank", "actor_rollout_ref.model.lora_rank"):
        common.set_adapters(translation, key)
    common.set_schedule(translation, "optim.lr_scheduler")
    common.every(translation, "trainer.save_freq", "save_steps")
    common.every(translation, "trainer.test_freq", "eval_steps")
    for side in ("prompt", "response"):
        _column(translation, side)
    _batches(translation)


def _column(translation: Translation, side: str) -> None:
    """Set where the question or the answer of a row is."""
    key, inner = f"data.{side}_key", f"data.{side}_dict_keys"
    column = translation.text(key)
    if column is not None:
        translation.set(f"{side}_key", ".".join([column, *translation.texts(inner)]), of=key)
    elif inner in translation.keys:
        translation.refuse(inner, f"{key} names the column that it looks into")


def _batches(translation: Translation) -> None:
    """Set the micro-batch and how many of them make a step."""
    common.micro_batch(translation, _MICRO)
    batch = translation.number(_TRAIN, least=1)
    if batch is None:
        return
    ranks, micro = common.processes(translation, _TRAIN), translation.field("per_device_train_batch_size", 1)
    if batch % (ranks * micro):
        if batch % ranks:
            hint = f"{_TRAIN}={common.next_divisible(batch, 1, ranks)}"
        else:
            hint = f"{_MICRO}_per_gpu={common.largest_divisor(batch // ranks, micro)}"
        raise ConfigError(
            f"{translation.shown(_TRAIN)}, and {ranks} processes with {micro} each take {ranks * micro} at a time",
            expected="a step of whole micro-batches",
            hint=hint,
        )
    translation.set("gradient_accumulation_steps", str(batch // (ranks * micro)), of=_TRAIN)
