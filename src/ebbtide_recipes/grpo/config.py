"""The flags of ``ebbtide grpo``. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.grpo import verl
from ebbtide_recipes.grpo.translate import TRANSLATED, translate
from ebbtide_recipes.language.config import LanguageConfig
from ebbtide_recipes.language.verl import GROUPS
from ebbtide_recipes.skeleton.rules import at_least, within

ALIASES: Mapping[str, str] = {
    **LanguageConfig.aliases,
    **verl.ALIASES,
    "reward_func": "reward_funcs",
    "max_response_length": "max_completion_length",
    "kl_coef": "beta",
    "use_remove_padding": "padding_free",
}
UNSUPPORTED: Mapping[str, str] = {
    **LanguageConfig.unsupported,
    **verl.UNSUPPORTED,
    "generation_batch_size": "--steps_per_generation: micro-batches in a rollout",
    "reward_model_path": "--reward_funcs path.py:function: a function may call a model",
    "kl_in_reward": "--kl_reward_coef is its weight in the reward, --beta that in the loss",
    "sync_ref_model": "the reference is the initial model",
    "rlhf_type": "leave it out: the verb is the type",
    "packing": "--padding_free true leaves the padding out of a batch",
    "max_length": "--max_prompt_length and --max_completion_length",
}

COLOCATE = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
"""Flags of vLLM in the training processes."""

SERVER = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
)
"""Flags of a server of vLLM; TRL has the same names."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(LanguageConfig):
    """Train a language model by reinforcement: it generates completions, functions reward them, it learns from the
    better.

    The algorithm is GRPO (group relative policy optimisation) by TRL. --activation_cpu_offload and
    --gradient_checkpointing together choose the mode, as in `ebbtide sft`. Passes without gradients (generation,
    log-probabilities, evaluation) save nothing and are not affected.

    Attributes:
        dataset: Prompts: builtin:arithmetic, a .jsonl, .json or .parquet file, or a hub name, also as
            NAME:SUBSET:SPLIT, such as openai/gsm8k:main; NAME#1000 takes the first thousand rows. Several may be given.
        reward_funcs: Reward functions: accuracy, closeness, format, or path.py:function. Several may be given.
        reward_weights: Weights of the reward functions; one number for all.
        num_generations: Completions of a prompt, compared with one another.
        num_generations_eval: Completions of a prompt in an evaluation.
        dataset_shuffle: Shuffle the prompts, by --seed; false: in the order of the data sets.
        max_prompt_length: Tokens in a prompt. No prompt is cut: see --filter_overlong_prompts.
        max_completion_length: Tokens in a completion; longer ones end there.
        filter_overlong_prompts: Drop longer prompts and log their number; false: raise an error.
        temperature: Sampling temperature.
        top_p: Sample from the likeliest tokens with this total probability.
        top_k: Sample from this many of the likeliest tokens; 0: from all.
        beta: Weight of the KL divergence from the initial model (with adapters, the model without them); 0: none.
        kl_reward_coef: Weight of the KL divergence from the initial model, summed over a completion's tokens, in its
            reward; 0: none.
        use_kl_loss: verl's flag: false removes the KL divergence, for any --beta.
        num_iterations: Passes over each rollout, of --steps_per_generation micro-batches each.
        steps_per_generation: Micro-batches in a rollout; default: --gradient_accumulation_steps.
        epsilon: Clipping range of a token's probability ratio in an update.
        epsilon_high: Upper clipping range; default: --epsilon.
        delta: Largest probability ratio of a token with a negative advantage (dual clip); default: no bound. At least 1
            + --epsilon_high.
        loss_type: Normalization of the loss.
        scale_rewards: Divide advantages by the standard deviation of the group, of the batch, or by nothing.
        padding_free: Skip padding in log-probabilities, forward and backward, as verl's use_remove_padding.
        use_vllm: Generate with vLLM, if it is installed.
        vllm_mode: Generate in the training processes (colocate) or by a server on other devices.
        vllm_gpu_memory_utilization: Share of the device's memory for vLLM (colocate).
        vllm_tensor_parallel_size: Devices that vLLM splits the model over (colocate); the processes are a multiple of
            it.
        vllm_server_base_url: Address of the server, such as http://node7:8000, in place of host and port.
        vllm_server_host: Host of the server; default: 0.0.0.0, this machine.
        vllm_server_port: Port of the server; default: 8000.
        vllm_server_timeout: Seconds to wait for the server at the start; default: 240.
        vllm_group_port: Port over which weights reach the server; default: 51216.
        learning_rate: Peak learning rate; default: 1e-6 for full training, 1e-5 for adapters.
        per_device_train_batch_size: Completions in a micro-batch.
        per_device_eval_batch_size: Completions in a batch of the evaluation.
        output_dir: Folder for the run file, training.log, checkpoints and the trained model.
    """

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED
    granted: ClassVar[Mapping[str, tuple[str, ...]]] = verl.GRANTED
    translated: ClassVar[Mapping[str, str]] = TRANSLATED
    translate = staticmethod(translate)
    groups: ClassVar[Mapping[str, str]] = GROUPS
    page: ClassVar[str] = "docs/reference/grpo-flags.md"
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    length_flags: ClassVar[tuple[str, ...]] = ("max_prompt_length", "max_completion_length")
    default_rates: ClassVar[tuple[float, float]] = (1e-6, 1e-5)

    dataset: tuple[str, ...] = ("builtin:arithmetic",)
    reward_funcs: tuple[str, ...] = ("accuracy",)
    reward_weights: tuple[float, ...] = (1.0,)
    num_generations: int = 8
    num_generations_eval: int = 1
    dataset_shuffle: bool = True
    max_prompt_length: int = 512
    max_completion_length: int = 256
    filter_overlong_prompts: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    beta: float = 0.0
    kl_reward_coef: float = 0.0
    use_kl_loss: bool = True
    num_iterations: int = 1
    steps_per_generation: int | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    padding_free: bool = False
    use_vllm: bool = False
    vllm_mode: Literal["colocate", "server"] = "colocate"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_server_base_url: str | None = None
    vllm_server_host: str | None = None
    vllm_server_port: int | None = None
    vllm_server_timeout: float | None = None
    vllm_group_port: int | None = None
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    output_dir: str = "runs/grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_numbers(self)
        _check_server(self)

    @property
    def kl_coefficient(self) -> float:
        """Weight of the KL divergence from the reference."""
        return self.beta if self.use_kl_loss else 0.0

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rollout."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def weights(self) -> tuple[float, ...]:
        """One weight per reward function."""
        return self.reward_weights if len(self.reward_weights) > 1 else self.reward_weights * len(self.reward_funcs)

    def completions(self, processes: int) -> int:
        """Return the completions of one rollout.

        Args:
            processes: Number of training processes.

        Raises:
            ConfigError: They are not whole groups of ``num_generations``.
        """
        count = self.per_device_train_batch_size * processes * self.micro_batches
        if count % self.num_generations:
            sizes = f"{self.per_device_train_batch_size} per device x {processes} processes x {self.micro_batches}"
            raise ConfigError(
                f"a rollout has {count} completions ({sizes} micro-batches)",
                expected=f"a multiple of num_generations, {self.num_generations}",
                hint="change --num_generations, --per_device_train_batch_size or --steps_per_generation",
            )
        per_device = self.per_device_eval_batch_size * processes
        if self.evaluates and per_device % self.num_generations_eval:
            raise ConfigError(
                f"a batch of the evaluation has {per_device} completions",
                expected=f"a multiple of num_generations_eval, {self.num_generations_eval}",
                hint="change --num_generations_eval or --per_device_eval_batch_size",
            )
        return count

    def without_effect(self) -> list[str]:
        """Return the flags that were set but have no effect in this mode."""
        if not self.use_vllm:
            vllm = ("vllm_mode", *COLOCATE, *SERVER)
        else:
            vllm = COLOCATE if self.vllm_mode == "server" else SERVER
        idle = (*vllm, *(() if self.evaluates else ("num_generations_eval",)))
        return [*super().without_effect(), *(name for name in idle if self.is_set(name))]


def _check_numbers(config: GrpoConfig) -> None:
    at_least("num_generations", config.num_generations, 2, "completions of a prompt are compared with one another")
    for name in ("num_generations_eval", "max_prompt_length", "max_completion_length", "num_iterations"):
        at_least(name, getattr(config, name), 1, f"leave {name} out for its default")
    at_least("vllm_tensor_parallel_size", config.vllm_tensor_parallel_size, 1, "1 is one device per process")
    at_least("steps_per_generation", config.steps_per_generation, 1, "leave it out for gradient_accumulation_steps")
    at_least("top_k", config.top_k, 0, "0 samples among all tokens")
    for name in ("temperature", "epsilon", "epsilon_high"):
        within(name, getattr(config, name), "(0, inf)", "a number above 0", f"leave {name} out for its default")
    for name in ("top_p", "vllm_gpu_memory_utilization"):
        within(name, getattr(config, name), "(0, 1]", "above 0, at most 1", f"leave {name} out for its default")
    for name in ("beta", "kl_reward_coef"):
        within(name, getattr(config, name), "[0, inf)", "0 or more", "0 leaves the reference out")
    for weight in config.reward_weights:
        within("reward_weights", weight, "(-inf, inf)", "finite numbers", "1 for each counts all functions alike")
    least = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    hint = "verl's actor.clip_ratio_c is 3.0 by default; without --delta there is no bound"
    within("delta", config.delta, f"[{least}, inf)", f"1 + epsilon_high, {least:g}, or more", hint)
    if len(config.reward_weights) not in (1, len(config.reward_funcs)):
        raise ConfigError(
            f"reward_weights has {len(config.reward_weights)} numbers for {len(config.reward_funcs)} reward functions",
            expected="one number per function, or one for all",
            hint=f"--reward_weights {' '.join('1.0' for _ in config.reward_funcs)}",
        )


def _check_server(config: GrpoConfig) -> None:
    """Raise for an address that is none, or two."""
    for name in ("vllm_server_port", "vllm_group_port"):
        hint = f"leave {name} out for its default"
        within(name, getattr(config, name), "[1, 65535]", "a port, 1 to 65535", hint)
    hint = "leave it out for 240 seconds"
    within("vllm_server_timeout", config.vllm_server_timeout, "(0, inf)", "seconds, above 0", hint)
    address = config.vllm_server_base_url
    if address is None:
        return
    if not re.match(r"https?://[^/]", address):
        raise ConfigError(
            f"vllm_server_base_url is {address!r}",
            expected="an address that begins with http:// or https://",
            hint="such as http://node7:8000",
        )
    others = [name for name in ("vllm_server_host", "vllm_server_port") if getattr(config, name) is not None]
    if others:
        raise ConfigError(
            f"vllm_server_base_url and {' and '.join(others)} are set",
            expected="one address of the server",
            hint=f"leave --{others[0]} out: the address has host and port",
        )
