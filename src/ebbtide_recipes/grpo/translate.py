"""verl's keys whose values set one or more flags, or are read together. No torch here.

[Note: verl's batches and steps]
verl counts prompts in a rollout (``train_batch_size``) and in an update (``ppo_mini_batch_size``), each of them with
``rollout.n`` completions, and completions in a micro-batch of one process (``ppo_micro_batch_size_per_gpu``). TRL
counts completions and micro-batches: an update is ``gradient_accumulation_steps`` of them, a rollout
``steps_per_generation``, and every rollout is learned ``num_iterations`` times (``ppo_epochs``). One of verl's steps is
a rollout with all its updates, one of TRL's is an update.
"""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.base.errors import ConfigError
from ebbtide.cli.translation import Translation
from ebbtide_recipes.language import verl as common

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_TRAIN, _MINI, _MICRO = "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_micro_batch_size"
_CLIP, _KL = f"{_ACTOR}.clip_ratio", f"{_ACTOR}.kl_loss_coef"
_IN_REWARD, _WEIGHT = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
_LOG_PROBS = (
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_micro_batch_size_per_gpu",
)
_STEPS = {
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.total_training_steps": "max_steps",
}
_SIDE = "0.2"
"""verl's default for either side of the clipping range."""

_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
_ENGINES = {"vllm": "True", "hf": "False"}

TRANSLATED: Mapping[str, str] = {
    _TRAIN: "prompts in a rollout: `--steps_per_generation` is this x `--num_generations` / (processes x "
    "`--per_device_train_batch_size`)",
    _MINI: "prompts in an update: `--gradient_accumulation_steps` likewise; default: the whole rollout",
    _MICRO: "`--per_device_train_batch_size` x processes",
    **common.TRANSLATED,
    "trainer.save_freq": "rollouts: `--save_steps` is this x updates in a rollout; -1: no checkpoints",
    "trainer.test_freq": "`--eval_steps`, likewise; -1: no evaluation",
    "trainer.total_training_steps": "`--max_steps`, likewise",
    _CLIP: "`--epsilon` and `--epsilon_high`, where the next two do not set them",
    f"{_CLIP}_low": "`--epsilon`",
    f"{_CLIP}_high": "`--epsilon_high`",
    f"{_ACTOR}.use_kl_loss": "`--use_kl_loss`; true without a coefficient: `--beta 0.001`",
    _KL: "`--beta`; needs `use_kl_loss`",
    f"{_ACTOR}.loss_agg_mode": "`--loss_type`: token-mean is dapo, seq-mean-token-mean is grpo",
    f"{_ACTOR}.optim.lr_warmup_steps": "-1 leaves it to `lr_warmup_steps_ratio`, 0 is `--warmup_ratio 0`",
    f"{_ACTOR}.optim.warmup_style": "`--lr_scheduler_type`: constant is constant_with_warmup, or cosine",
    f"{_ACTOR}.optim.lr_scheduler_type": "the same as `warmup_style`",
    f"{_ROLLOUT}.name": "`--use_vllm`: vllm is true, hf is false",
    f"{_ROLLOUT}.top_k": "`--top_k`; -1 is 0: all tokens",
    **dict.fromkeys(_LOG_PROBS, "has to equal `--per_device_train_batch_size`"),
    "actor_rollout_ref.model.lora_rank": "`--train_type lora --lora_rank`; 0: no adapters",
    _IN_REWARD: "`--kl_reward_coef`; true without a coefficient: 0.001",
    _WEIGHT: "`--kl_reward_coef`; needs `use_kl_in_reward`",
    "algorithm.norm_adv_by_std_in_grpo": "`--scale_rewards`: true is group, false is none",
    "custom_reward_function.path": "`--reward_funcs PATH:NAME`",
    "custom_reward_function.name": "the name in `--reward_funcs PATH:NAME`; default: compute_score",
}
"""Keys and what they set, in words for the page of flags."""


def translate(translation: Translation) -> None:
    """Set the fields that verl's keys mean.

    Raises:
        ConfigError: Numbers do not fit one another, or a field is set twice.
    """
    common.share_names(translation)
    common.set_adapters(translation, "actor_rollout_ref.model.lora_rank")
    common.set_warmup(translation, f"{_ACTOR}.optim.lr_warmup_steps")
    common.set_schedule(translation, f"{_ACTOR}.optim.warmup_style")
    common.set_schedule(translation, f"{_ACTOR}.optim.lr_scheduler_type")
    _clipping(translation)
    _divergence(translation)
    _normalization(translation)
    _rollout(translation)
    _reward(translation)
    _batches(translation)
    _steps(translation)


def _clipping(translation: Translation) -> None:
    """Set both sides of the clipping range; the key of a side comes before that of both."""
    keys = translation.keys
    for key, field in ((f"{_CLIP}_low", "epsilon"), (f"{_CLIP}_high", "epsilon_high")):
        of = key if key in keys else _CLIP
        if of in keys:
            translation.set(field, translation.text(of) or _SIDE, of=of)
    if f"{_CLIP}_low" in keys and "epsilon_high" not in translation.values:
        translation.set("epsilon_high", _SIDE, of=f"{_CLIP}_low")


def _divergence(translation: Translation) -> None:
    """Set the KL divergence; verl uses the coefficient only where ``use_kl_loss`` says so."""
    use = f"{_ACTOR}.use_kl_loss"
    used, weight = translation.truth(use), translation.text(_KL)
    if used is not None:
        translation.set("use_kl_loss", str(used), of=use)
    if weight is not None and "use_kl_loss" not in translation.values:
        translation.refuse(_KL, f"{use}=True puts it into the loss; verl does not use it otherwise")
    elif weight is not None:
        translation.set("beta", weight, of=_KL)
    elif used and "beta" not in translation.values:
        translation.set("beta", "0.001", of=use)  # verl's default
    used, weight = translation.truth(_IN_REWARD), translation.text(_WEIGHT)
    if used:
        translation.set("kl_reward_coef", weight or "0.001", of=_IN_REWARD)  # verl's default
    elif used is None and weight not in (None, "0", "0.0"):
        translation.refuse(_WEIGHT, f"{_IN_REWARD}=True puts it into the reward; verl does not use it otherwise")


def _normalization(translation: Translation) -> None:
    """Set how the loss and the advantages are normalized."""
    key = f"{_ACTOR}.loss_agg_mode"
    mode = translation.text(key)
    if mode in _LOSSES:
        translation.set("loss_type", _LOSSES[mode], of=key)
    elif mode is not None:
        translation.refuse(key, "--loss_type dapo, grpo, bnpo or dr_grpo")
    key = "algorithm.norm_adv_by_std_in_grpo"
    scaled = translation.truth(key)
    if scaled is not None:
        translation.set("scale_rewards", "group" if scaled else "none", of=key)


def _rollout(translation: Translation) -> None:
    """Set the engine that generates, and its sampling."""
    engine = translation.text(f"{_ROLLOUT}.name")
    if engine in _ENGINES:
        translation.set("use_vllm", _ENGINES[engine], of=f"{_ROLLOUT}.name")
    elif engine is not None:
        translation.refuse(f"{_ROLLOUT}.name", "vllm, or hf: transformers generates")
    count = translation.number(f"{_ROLLOUT}.top_k", least=-1)
    if count is not None:
        translation.set("top_k", str(max(count, 0)), of=f"{_ROLLOUT}.top_k")


def _reward(translation: Translation) -> None:
    path, name = (translation.text(f"custom_reward_function.{word}") for word in ("path", "name"))
    if path is not None:
        translation.set("reward_funcs", f"{path}:{name or 'compute_score'}", of="custom_reward_function.path")
    elif name is not None:
        translation.refuse("custom_reward_function.name", "custom_reward_function.path names its file")


def _batches(translation: Translation) -> None:
    """Set micro-batches, updates and rollouts. See [Note: verl's batches and steps]."""
    common.micro_batch(translation, _MICRO)
    micro = translation.field("per_device_train_batch_size", 8)
    for key in _LOG_PROBS:
        if translation.number(key, least=1) not in (None, micro):
            hint = "log-probabilities are computed in batches of --per_device_train_batch_size"
            translation.refuse(key, f"{hint}: {micro}, or leave it out")
    train, mini = translation.number(_TRAIN, least=1), translation.number(_MINI, least=1)
    rollout, update = (_TRAIN if train else _MINI), (_MINI if mini else _TRAIN)
    train, mini = train or mini, mini or train
    if train is None or mini is None:
        return
    if train % mini:
        raise ConfigError(
            f"{translation.shown(_TRAIN)} and {translation.shown(_MINI)}",
            expected="a rollout of whole updates: the first a multiple of the second",
            hint=f"{_TRAIN}={max(1, train // mini) * mini}, or {_MINI}={common.largest_divisor(train, mini)}",
        )
    ranks, completions = common.processes(translation, rollout), translation.field("num_generations", 8)
    if mini * completions % (ranks * micro):
        raise _no_update(translation, mini, completions, ranks, micro)
    micro_batches = mini * completions // (ranks * micro)
    translation.set("gradient_accumulation_steps", str(micro_batches), of=update)
    translation.set("steps_per_generation", str(micro_batches * (train // mini)), of=rollout)


def _no_update(translation: Translation, mini: int, completions: int, ranks: int, micro: int) -> ConfigError:
    """Return the error for an update that is not whole micro-batches."""
    total = mini * completions
    if total % ranks == 0:
        hint = f"{_MICRO}_per_gpu={common.largest_divisor(total // ranks, micro)}"
    else:
        hint = f"{_MINI if _MINI in translation.keys else _TRAIN}={common.next_divisible(mini, completions, ranks)}"
    return ConfigError(
        f"an update has {mini} prompts x {completions} completions = {total}, and {ranks} processes with {micro} each "
        f"take {ranks * micro} at a time",
        expected="an update of whole micro-batches",
        hint=hint,
    )


def _steps(translation: Translation) -> None:
    """Set what verl counts in rollouts, and TRL in updates."""
    keys = [key for key in _STEPS if key in translation.keys]
    if not keys:
        return
    accumulated = translation.field("gradient_accumulation_steps", 1)
    micro_batches = translation.field("steps_per_generation", accumulated)
    if micro_batches % accumulated:
        for key in keys:
            translation.refuse(key, f"a rollout here is no whole number of updates: --{_STEPS[key]} counts updates")
        return
    updates = micro_batches // accumulated * translation.field("num_iterations", 1)
    total = translation.number("trainer.total_training_steps", least=1)
    if total is not None:
        translation.set("max_steps", str(total * updates), of="trainer.total_training_steps")
    for key in ("trainer.save_freq", "trainer.test_freq"):
        common.every(translation, key, _STEPS[key], updates=updates)
    tests = translation.number("trainer.test_freq")
    if tests is not None and tests < 1:
        translation.drop("eval_dataset")
