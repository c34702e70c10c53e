"""TRL's trainer for GRPO, with marked phases, rollouts in checkpoints, and recorded rewards.

[Note: the phases of a rollout]
A step that begins a rollout generates completions (``generation``), rewards them (``reward``), and computes without
gradients the log-probabilities of the generating weights and of the reference (``log-probabilities``). All of these
precede the first ``forward`` of that step. Offloading stays on throughout: without gradients nothing is saved, and the
stand-ins only call the original forward.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from trl import GRPOConfig as TrlConfig
from trl import GRPOTrainer as TrlTrainer

from ebbtide.base.errors import ConfigError
from ebbtide.base.events import BUS
from ebbtide_recipes.grpo import positions, rollouts, unpadded
from ebbtide_recipes.grpo.config import SERVER
from ebbtide_recipes.grpo.divergence import Divergence, of_completions, only_if_judged
from ebbtide_recipes.grpo.figures import Evaluation, equal_in_groups, summed
from ebbtide_recipes.grpo.merging import FrozenWeights
from ebbtide_recipes.grpo.reference import Reference
from ebbtide_recipes.grpo.rewards import Reward, text_of
from ebbtide_recipes.skeleton.dropout import without_dropout
from ebbtide_recipes.skeleton.sharding import check_classes
from ebbtide_recipes.skeleton.trainer import RecordedTrainer, made, name_present_blocks, shared_arguments

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ebbtide_recipes.grpo.config import GrpoConfig

LOGGER = logging.getLogger("ebbtide.grpo")

REPEAT = 20
"""A warning about rollouts comes with the first of its kind, and then at each multiple of this number."""


class GrpoTrainer(RecordedTrainer, TrlTrainer):
    """TRL's trainer, recorded and with sealed checkpoints. See [Note: the phases of a rollout]."""

    ref_model = Reference()
    padding_free = False
    _reward: float | None = None
    _rewards: torch.Tensor  # [B, functions], of all ranks
    divergence: Divergence | None = None
    _separates = False
    _sampler: Any
    _frozen: FrozenWeights | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._warned: dict[str, int] = {}
        self._judged = Evaluation()
        self._scored: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = []  # in this rollout, no gradients
        super().__init__(*args, **kwargs)

    # Rollouts

    def tokens_in(self, inputs: dict[str, Any]) -> int:
        """Return the number of tokens in a micro-batch, without padding."""
        return int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self.recorder is not None:
            self.recorder.note(reward=self._reward)
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Make a rollout, and log if there is nothing to learn from it."""
        with self._reference_scored():
            result = super()._generate_and_score_completions(inputs)
        if self.beta == 0.0:
            result.pop("ref_per_token_logps", None)
        if not self.model.training:
            self._judged.add(self._rewards, figures := self._metrics["eval"])
            completions = len(self.eval_dataset) * self.num_generations_eval
            figures |= self._judged.means(completions, self.reward_func_names, self.reward_weights)
            return result
        figures = self._metrics["train"]
        reward = figures["reward"][-1]
        self._reward = None if math.isnan(reward) else reward
        if self._reward is None:
            self._warn_now_and_then("no completion of a rollout is judged, every reward is None: it gives no gradient")
        elif equal_in_groups(summed(self._rewards, self.reward_weights), self.num_generations):
            self._warn_now_and_then(
                "all rewards are equal in every group of a rollout (mean reward %.4g): %s",
                self._reward,
                "it gives no gradient"
                if self.beta == 0.0
                else "only the KL divergence from the reference gives a gradient",
            )
        return result

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("generation"), self._by_vllm() if self.use_vllm else self._by_this_model():
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Sequence[Any], *args: Any) -> Any:
        empty = sum(not text_of(completion).strip() for completion in completions)
        if empty:
            self._warn_now_and_then("%d of %d completions are empty: the model ended at once", empty, len(completions))
        if self.divergence is not None:
            self.divergence.values = self._divergences() if self.model.training else []
        with self._phase("reward"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, *args)
        self._rewards = rewards if self.divergence is None else only_if_judged(rewards)
        return self._rewards

    @contextmanager
    def _reference_scored(self) -> Generator[None, None, None]:
        """Let TRL score the reference for the reward, also where the loss has no divergence."""
        beta, self.beta = self.beta, 1.0 if self.divergence is not None and self.model.training else self.beta
        self._scored.clear()
        try:
            yield
        finally:
            self.beta = beta
            self._scored.clear()

    def _divergences(self) -> list[float]:
        """Return the KL divergence of each completion."""
        # TRL scored the reference last, and before it the generating weights, unless the one update has the same.
        *before, (args, kwargs, reference) = self._scored
        if before:
            log_probs = before[0][-1]
        else:
            with torch.no_grad():
                log_probs = self._get_per_token_logps_and_entropies(self.model, *args, **kwargs)[0]
        mask, keep = args[1], args[2]
        return of_completions(log_probs, reference, mask[:, -keep:])

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        compute = self._unpadded if self.padding_free else super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():
            return compute(model, *args, **kwargs)
        with self._phase("log-probabilities"), without_dropout(model):
            scored = compute(model, *args, **kwargs)
        if self.divergence is not None:
            self._scored.append((args, kwargs, scored[0]))
        return scored

    def _unpadded(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute log-probabilities, entropies, experts' loss without padding. See [Note: sequences in one row]."""
        if not self._separates:
            self._separates = unpadded.separates(model, input_ids.device)
            if not self._separates:
                raise ConfigError(
                    f"padding_free is true, and {type(self.accelerator.unwrap_model(model)).__name__} mixes sequences "
                    "that stand in one row",
                    expected="a model whose attention separates them by their positions",
                    hint="leave --padding_free out",
                )
        log_probs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        of_experts: list[torch.Tensor] = []
        more = {"output_router_logits": True} if kwargs.get("compute_aux_loss") else {}
        size = batch_size or input_ids.size(0)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            with self.accelerator.autocast():
                output = model(**unpadded.rows_to_one(ids, mask, logits_to_keep), fused_lm_head=True, **more)
            log_probs.append(unpadded.one_to_rows(output.log_probs, mask, logits_to_keep))
            if kwargs.get("compute_entropy"):
                entropies.append(unpadded.one_to_rows(output.entropy, mask, logits_to_keep))
            if more:
                of_experts.append(output.aux_loss)
        aux_loss = torch.stack(of_experts).mean() if of_experts else None
        return torch.cat(log_probs), torch.cat(entropies) if entropies else None, aux_loss

    @contextmanager
    def _phase(self, name: str) -> Generator[None, None, None]:
        """Mark a phase of the current step; an evaluation has none."""
        if not self.model.training:
            yield
            return
        step = self.state.global_step + 1
        BUS.emit("phase", name=name, edge="begin", step=step)
        yield
        BUS.emit("phase", name=name, edge="end", step=step)

    @contextmanager
    def _by_this_model(self) -> Generator[None, None, None]:
        """Prepare the trained model for its own ``generate``. See [Note: dropout in a rollout]."""
        with self._full_root(), self._together(), without_dropout(self.model):
            yield

    @contextmanager
    def _by_vllm(self) -> Generator[None, None, None]:
        """Let TRL gather the weights for vLLM's copy, parameter by parameter, from their shards."""
        self.vllm_generation.model = self.model  # FSDP1 has wrapped the one that TRL took
        if self.state.global_step != self._last_loaded_step:
            self._frozen = self._frozen or FrozenWeights(self.model)
            with self._dist.summon_full_params(self.model, recurse=False, writeback=False):
                pass  # FSDP1 takes the first part that it gathers for the root
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
            self._frozen.restore()  # before vLLM writes, which needs the memory of weights in 4 bits
        yield

    @contextmanager
    def _together(self) -> Generator[None, None, None]:
        """Let sharded ranks generate until the last is done."""
        # Each forward gathers weights, so a rank that stopped at its own last token would deadlock the others.
        # transformers 5.23 handles this for models that it sharded itself, but not for those sharded by accelerate.
        if not self.is_fsdp_enabled:
            yield
            return
        model = self.accelerator.unwrap_model(self.model_wrapped)
        model.generate = functools.partial(model.generate, synced_gpus=True)
        try:
            yield
        finally:
            del model.generate

    @contextmanager
    def _full_root(self) -> Generator[None, None, None]:
        """Gather what FSDP2 shards with the root (embeddings, head) while a part inside the root generates."""
        root = self.model_wrapped
        if not isinstance(root, FSDPModule):
            yield
            return
        root.unshard()
        try:
            yield
        finally:
            root.reshard()

    def _warn_now_and_then(self, text: str, *values: Any) -> None:
        """Log a warning the first time, and then every ``REPEAT``-th time with the count."""
        times = self._warned[text] = self._warned.get(text, 0) + 1
        if times == 1 or times % REPEAT == 0:
            LOGGER.warning(text + (f" (seen {times} times)" if times > 1 else ""), *values)

    # Checkpoints

    def save_more(self, folder: Path) -> None:
        """Write the current rollout. See [Note: a rollout in a checkpoint]."""
        every = self.args.steps_per_generation * self.num_iterations
        progress = rollouts.Progress(
            micro_batches=self._step,
            sizes=self._sizes(),
            batches=None if self._step % every == 0 else self._buffered_inputs,
            reward=self._reward,
            metrics={name: list(values) for name, values in self._metrics["train"].items()},
        )
        rollouts.write(progress, folder, self.args.process_index)

    def load_more(self, folder: Path) -> None:
        """Read the rollout of the checkpoint; one of other sizes is dropped, and a new one starts."""
        progress, now = rollouts.read(folder, self.args.process_index, self.accelerator.device), self._sizes()
        then = {} if progress is None else progress.sizes
        if progress is None or then != now:
            others = [f"{name} {then[name]}, now {now.get(name)}" for name in then if then[name] != now.get(name)]
            LOGGER.warning(
                "the rollout in %s is not used (%s): a new one starts",
                folder,
                ", ".join(others) or "none of this rank is known",
            )
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            return
        self._step, self._buffered_inputs = progress.micro_batches, progress.batches
        self._reward = progress.reward
        self._metrics["train"].update(progress.metrics)

    def _sizes(self) -> dict[str, int]:
        """Return what a rollout's batches, their columns and its place in the data depend on."""
        names = ("world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
        own = {"num_generations": self.num_generations, "num_iterations": self.num_iterations}
        own |= {"reference": int(self.beta != 0.0)}
        own |= {"vllm_correction": int(self.use_vllm and self.vllm_importance_sampling_correction)}
        return own | {name: getattr(self.args, name) for name in names}

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        # TRL's sampler continues its generator over the epochs: a run resumed in a later one would repeat the first.
        if self.shuffle_dataset:
            self._sampler.generator.manual_seed(self.args.seed + kwargs["epoch"])
        return super()._run_epoch(*args, **kwargs)


def arguments(config: GrpoConfig) -> TrlConfig:
    """Return the trainer's arguments.

    Args:
        config: As ``sharding.resolved`` returned it.
    """
    # With adapters TRL would add a frozen copy of them; the reference is the model without any.
    coefficient = 0.0 if config.trains_adapters else config.kl_coefficient or config.kl_reward_coef
    own = {
        "shuffle_dataset": config.dataset_shuffle,
        "num_generations": config.num_generations,
        "num_generations_eval": config.num_generations_eval,
        "max_completion_length": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "beta": coefficient,
        "num_iterations": config.num_iterations,
        "steps_per_generation": config.micro_batches,
        "epsilon": config.epsilon,
        "epsilon_high": config.epsilon_high,
        "delta": config.delta,
        "loss_type": config.loss_type,
        "scale_rewards": config.scale_rewards,
        "use_bias_correction_kl": False,  # k3 itself, as in the GRPO paper and verl
        "reward_weights": [*config.weights, *([-config.kl_reward_coef] if config.kl_reward_coef else [])],
        "use_vllm": config.use_vllm,
        # vLLM's probabilities are among the likeliest tokens, the model's among all: their ratio corrects nothing.
        "vllm_importance_sampling_correction": config.top_p == 1.0 and config.top_k == 0,
        "vllm_max_model_length": config.max_prompt_length + config.max_completion_length,
        "vllm_mode": config.vllm_mode,
        "vllm_gpu_memory_utilization": config.vllm_gpu_memory_utilization,
        "vllm_tensor_parallel_size": config.vllm_tensor_parallel_size,
        **{name: value for name in SERVER if (value := getattr(config, name)) is not None},
        "ddp_find_unused_parameters": False,
        # Of the reference, if one is loaded: on this process's device alone.
        "model_init_kwargs": {"device_map": None} if coefficient else None,
        "log_completions": False,
    }
    return made(TrlConfig, shared_arguments(config) | own)


def build(
    config: GrpoConfig,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[Reward],
    dataset: Dataset,
    evaluation: Dataset | None = None,
) -> GrpoTrainer:
    """Make the trainer, and the reference if there is one.

    Raises:
        ConfigError: The trainer refuses the model, or FSDP's settings name a class of blocks that it lacks.
    """
    if config.fsdp_strategy != "none":
        name_present_blocks(model)
        check_classes(config, model)
    divergence = Divergence() if config.kl_reward_coef else None
    try:
        trainer = GrpoTrainer(
            model=model,
            reward_funcs=[*rewards, *([] if divergence is None else [divergence])],
            args=arguments(config),
            train_dataset=dataset,
            eval_dataset=evaluation,
            processing_class=tokenizer,
        )
    except ValueError as error:
        raise ConfigError(
            f"TRL's trainer refuses this run: {error}",
            expected="a run that TRL supports",
            hint="change the settings it names",
        ) from error
    trainer.beta = trainer.args.beta = config.kl_coefficient
    for called in filter(None, (trainer.model, trainer.ref_model)):
        positions.count_from_tokens(called, getattr(model, "get_base_model", lambda: model)())
    trainer.padding_free, trainer.divergence = config.padding_free, divergence
    return trainer
