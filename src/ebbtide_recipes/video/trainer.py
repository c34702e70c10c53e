"""transformers' trainer around a module that computes the loss, with samples and averages."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.skeleton import launch
from ebbtide_recipes.skeleton.sharding import check_classes
from ebbtide_recipes.skeleton.trainer import RecordedTrainer, made, shared_arguments
from ebbtide_recipes.video import export, samples
from ebbtide_recipes.video.buckets import BucketSampler
from ebbtide_recipes.video.distill import Distillation
from ebbtide_recipes.video.ema import Average
from ebbtide_recipes.video.latents import Latents, collate
from ebbtide_recipes.video.objective import Denoiser
from ebbtide_recipes.video.samples import Sampling
from ebbtide_recipes.video.source import phase

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ebbtide_recipes.video.config import VideoConfig


class VideoTrainer(RecordedTrainer):
    """Train a module whose forward returns the loss of a batch of latents.

    Args:
        module: ``FineTuning`` or ``Distillation``.
        sampling: The samples to make.
        average: The moving average of the trained weights; ``None``: none.
        **kwargs: As transformers' ``Trainer`` takes them.
    """

    _sampler: BucketSampler

    def __init__(self, module: Denoiser, sampling: Sampling, average: Average | None, **kwargs: Any) -> None:
        super().__init__(model=module, data_collator=collate, **kwargs)
        self.module, self.sampling, self.average = module, sampling, average
        if self.is_fsdp_enabled and self.accelerator.is_fsdp2:
            module.leave_frozen_out()  # of checkpoints: the frozen weights come from the pipelines
        self.add_callback(_Begin(self))
        if average is not None:
            self.add_callback(average)
        self._shown_at = -1

    def tokens_in(self, inputs: dict[str, Any]) -> int:
        """Return the tokens that the transformer makes of a batch of latents."""
        in_time, along = self.sampling.source.patch
        batch, _, frames, height, width = inputs["latents"].shape
        return batch * (frames // in_time) * (height // along) * (width // along)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; in distillation with two backwards, run the student's here."""
        config: VideoConfig | None = self.config  # type: ignore[assignment]
        if not isinstance(self.module, Distillation) or config is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self.module.student_learns = self.state.global_step % config.student_interval == 0
        if config.backwards == 1 or not self.module.student_learns:
            return super().compute_loss(model, inputs, *args, **kwargs)
        _, losses = super().compute_loss(model, inputs, return_outputs=True)
        self.accelerator.backward(losses["student_loss"] / self.current_gradient_accumulation_steps)
        return losses["critic_loss"] + losses["student_loss"].detach()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer; in distillation with groups for student and critic, each by what decays."""
        config: VideoConfig | None = self.config  # type: ignore[assignment]
        if self.optimizer is None and isinstance(self.module, Distillation) and config is not None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.module)
            rates = (self.args.learning_rate, config.critic_learning_rate or self.args.learning_rate)
            decayed = set(self.get_decay_parameter_names(self.module))  # all but biases and norms
            decays = {parameter: name in decayed for name, parameter in self.module.named_parameters()}
            self.optimizer = kind(
                [
                    {
                        "params": [parameter for parameter in group if decays[parameter] is decaying],
                        "lr": rate,
                        "weight_decay": self.args.weight_decay if decaying else 0.0,
                    }
                    for group, rate in zip(self.module.groups(), rates, strict=True)
                    for decaying in (True, False)
                ],
                **options,
            )
            return self.optimizer
        return super().create_optimizer() if model is None else super().create_optimizer(model)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip student and critic each by its own norm: the critic's would decide how far the student goes."""
        if not isinstance(self.module, Distillation) or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            return super()._clip_grad_norm(model)
        # Without gradients, as the student's between its steps, a group's norm is a zero on the CPU.
        learning = [group for group in self.module.groups() if any(p.grad is not None for p in group)]
        norms = [self.accelerator.clip_grad_norm_(group, self.args.max_grad_norm) for group in learning]
        return torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()

    def _get_train_sampler(self, train_dataset: Any = None) -> BucketSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        batch, seed = self.args.per_device_train_batch_size, self.args.seed
        self._sampler = BucketSampler(dataset.buckets, batch=batch, seed=seed)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        # accelerate does not reach it in a run of several processes that was resumed.
        self._sampler.set_epoch(kwargs["epoch"])
        return super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.sampling.every is not None and self.state.global_step % self.sampling.every == 0:
            self.show()

    def models(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Return the models inside the module."""
        return self.module.named_children()

    def average_bytes(self) -> int:
        """Return the device memory of the moving average; 0 without one."""
        return 0 if self.average is None else self.average.bytes

    def show(self) -> None:
        """Make samples of the current weights, or of their average; all processes together."""
        step = self.state.global_step
        if not self.sampling.prompts or step == self._shown_at:
            return
        self._shown_at = step
        with self.generators_restored():  # some schedulers and VAEs draw from them
            self._show(step)

    def _show(self, step: int) -> None:
        training, model = self.module.training, self.model_wrapped if self.is_fsdp_enabled else self.model

        def predict(latents: torch.Tensor, timestep: torch.Tensor, text: Any) -> torch.Tensor:
            with self.compute_loss_context_manager():
                return model(latents, text, timestep=timestep.tolist())["prediction"].float()

        model.eval()
        sampling, device = self.sampling, self.args.device
        if isinstance(self.module, Distillation):
            make = partial(samples.sample_student, predict, self.module.student_steps)
        else:
            make = partial(samples.sample, predict, self.module.scheduler, self.module.empty)
        try:
            with phase("sample"), torch.no_grad(), self._averaged(), _resharded(model):
                made = [make(prompt, sampling, device) for prompt in sampling.prompts]
        finally:
            model.train(training)
        if self.args.should_save:
            samples.write(made, sampling, Path(self.args.output_dir), step=step, device=device)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the trained weights for resuming (in a checkpoint), or as diffusers loads them (at the end)."""
        folder = Path(output_dir or str(self.args.output_dir))
        if _internal_call:
            if self.args.should_save and not self.is_fsdp_enabled:
                export.save_trained(self.module, folder)
            return
        self._export(folder, "transformer")
        if self.average is not None:
            with self._averaged():
                self._export(folder, "transformer_ema")

    def _export(self, folder: Path, name: str) -> None:
        """Gather the trained weights, on all processes, and write them as diffusers loads them."""
        module = self.module
        state: dict[str, torch.Tensor] = (
            self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else module.state_dict()
        )
        if self.args.should_save:
            export.save(module, state, folder, name, pipeline=self.sampling.source.family.pipeline)

    def load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the trained weights."""
        if self.is_fsdp_enabled:
            super().load_weights(resume_from_checkpoint, model)
        else:
            export.load_trained(self.module, Path(resume_from_checkpoint))

    def save_more(self, folder: Path) -> None:
        """Write this process's part of the average."""
        if self.average is not None:
            self.average.save(folder, self.args.process_index)

    def load_more(self, folder: Path) -> None:
        """Read this process's part of the average."""
        if self.average is not None:
            self.average.load(folder, self.args.process_index)

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.in_place()


class _Begin(TrainerCallback):
    """Seed each process separately, and sample before the first step."""

    def __init__(self, trainer: VideoTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The trainer seeds all processes equally: they would draw the same noise. A resumed run loads its state later.
        torch.manual_seed(args.seed + args.process_index)
        if state.global_step == 0:
            self._trainer.show()


def arguments(config: VideoConfig) -> TrainingArguments:
    """Return the trainer's arguments.

    Args:
        config: As ``sharding.resolved`` returned it.

    Raises:
        ConfigError: FastVideo's numbers of shards and copies do not match the processes.
    """
    own: dict[str, Any] = {
        "remove_unused_columns": False,
        # In a critic's step the student has no gradient.
        "ddp_find_unused_parameters": config.distill,
        "label_names": [],
    }
    return made(TrainingArguments, shared_arguments(config, shards=_shards(config)) | own)


def _shards(config: VideoConfig) -> int | None:
    """Return how many processes share the weights, by FastVideo's flags; ``None``: those of the strategy."""
    shards, copies, world = config.hsdp_shard_dim, config.hsdp_replicate_dim, launch.world_size()
    if config.fsdp_strategy == "hybrid_shard":
        shards = shards or (copies and max(1, world // copies))
        copies = copies or (shards and max(1, world // shards))
    elif config.fsdp_strategy != "none":
        copies = 1
    if shards and copies and shards * copies != world:
        raise ConfigError(
            f"hsdp_shard_dim {shards} and hsdp_replicate_dim {copies} with {world} processes",
            expected="as many processes as shards times copies",
            hint=f"--nproc_per_node {shards * copies}, or other numbers of shards and copies",
        )
    if shards and config.fsdp_strategy == "hybrid_shard" and config.fsdp_version == 1:
        raise ConfigError(
            "hsdp_shard_dim or hsdp_replicate_dim is set with hybrid_shard and fsdp_version 1",
            expected="FSDP2: FSDP1 shards within a node and copies across nodes",
            hint="leave --fsdp_version out",
        )
    return shards


def build(
    config: VideoConfig, module: Denoiser, dataset: Latents, sampling: Sampling, options: TrainingArguments
) -> VideoTrainer:
    """Make the trainer.

    Raises:
        ConfigError: FSDP's settings name a class of blocks that the module lacks.
    """
    check_classes(config, module)
    average = None
    if config.ema_decay is not None:
        average = Average(
            module.transformer,
            decay=config.ema_decay,
            learned=lambda: not isinstance(module, Distillation) or module.student_learns,
        )
    return VideoTrainer(module, sampling, average, args=options, train_dataset=dataset)


@contextmanager
def _resharded(model: torch.nn.Module) -> Generator[None, None, None]:
    """Reshard, at the end, the weights that FSDP2 leaves gathered after a forward without a backward."""
    # The outermost module keeps its weights for a backward: the next forward would not see a change of its shards.
    from torch.distributed.fsdp import FSDPModule

    yield
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
