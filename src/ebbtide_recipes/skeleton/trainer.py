"""The base of all recipes' trainers: marks phases, records steps, seals checkpoints, resumes exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, TrainingArguments

from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.events import BUS
from ebbtide.store.allocator import trim_heap
from ebbtide.track.parts import model_bytes, optimizer_bytes, tensor_bytes
from ebbtide.wrap.generators import generators, restore, states
from ebbtide_recipes.skeleton import checkpoints, launch, outputs, sharding
from ebbtide_recipes.skeleton.resuming import ResumedTrainer
from ebbtide_recipes.skeleton.steps import StepRecorder

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig

ArgumentsT = TypeVar("ArgumentsT", bound=TrainingArguments)
LOGGER = logging.getLogger("ebbtide.recipes")

_STEPS_TO_TRIM = 3
"""A run of fewer steps has one at most whose time counts, and that one keeps its heap."""

_TRACKERS = {"azure_ml": "azureml-sdk", "tensorboard": "tensorboardX"}
"""Packages of trackers that are not called as transformers calls the tracker."""


class RecordedTrainer(ResumedTrainer):
    """Mark phases, record steps and seal checkpoints around transformers' trainer.

    A recipe derives its trainer from this class and, where there is one, from TRL's:
    ``class SftTrainer(RecordedTrainer, SFTTrainer)``. It may override ``tokens_in`` and ``accuracy``.
    See [Note: phases] in ``steps.py`` and [Note: a checkpoint's seal] in ``checkpoints.py``.
    """

    recorder: StepRecorder | None = None
    config: RecipeConfig | None = None

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._own = {name: value for name, value in _fields(model).items() if name == "use_cache"}
        super().__init__(model, *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; FSDP2 leaves losses and log-probabilities in the type of their computation, float32."""
        super().create_accelerator_and_postprocess()
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        if isinstance(policy, MixedPrecisionPolicy):
            # accelerate (checked with 1.15) rounds them to the type of the products, also before they are summed.
            plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)

    def record_with(self, recorder: StepRecorder) -> None:
        """Report each step to this recorder from now on."""
        self.recorder = recorder
        self.add_callback(recorder)

    def tokens_in(self, inputs: dict[str, Any]) -> int:
        """Return the number of tokens in a micro-batch, without padding."""
        return int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()

    def accuracy(self) -> float | None:
        """Return the token accuracy of the micro-batch whose loss was computed last; ``None``: not known."""
        return None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; in training between the edges of the phase ``forward``."""
        if not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        step = self.state.global_step + 1
        tokens = self.tokens_in(inputs)
        trims = self._trims(step)
        if trims and trim_heap():
            BUS.emit("trim", step=step)
        BUS.emit("phase", name="forward", edge="begin", step=step)
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self.recorder is not None:
            self.recorder.micro_batch(accuracy=self.accuracy(), tokens=tokens)
        if trims:
            trim_heap()
        BUS.emit("phase", name="forward", edge="end", step=step)
        BUS.emit("phase", name="backward", edge="begin", step=step)
        return result

    def _trims(self, step: int) -> bool:
        """Whether a step measures memory with a trimmed heap: a recorded run's last, see [Note: steady steps]."""
        return BUS.active and step == self.state.max_steps >= _STEPS_TO_TRIM and not torch.accelerator.is_available()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward, and mark backward's end."""
        loss = super().training_step(*args, **kwargs)
        BUS.emit("phase", name="backward", edge="end", step=self.state.global_step + 1)
        if self.recorder is None:
            return loss
        self.recorder.micro_loss(loss)
        # The trainer adds up what it logs: one NaN of a step that is skipped would stay in all later sums.
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) if self.recorder.skips else loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Give the recorder the norm that decides whether the optimizer may step; of shards, that of all of them."""
        norm = super()._get_grad_norm(*args, **kwargs)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.recorder is not None:
            self.recorder.gradient_norm(norm)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the recorder's figures for trackers; leave skipped steps out of the loss."""
        if self.recorder is not None and "loss" in logs:
            logs["loss"] = self.recorder.mean_loss(logs["loss"])  # type: ignore[assignment]
            logs.update({name: value for name, value in self.recorder.shown.items() if value is not None})
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as transformers does; training draws the same numbers as without an evaluation."""
        with self.generators_restored():  # an iterator over batches draws a seed, and completions are sampled
            return super().evaluate(*args, **kwargs)

    @contextlib.contextmanager
    def generators_restored(self) -> Iterator[None]:
        """Restore the default generators at the end: training draws the same numbers as without what runs meanwhile."""
        device = self.args.device
        drawn_from = generators([device] if device.type != "cpu" else [])
        before = states(drawn_from)
        try:
            yield
        finally:
            restore(drawn_from, before, states(drawn_from))

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the model's own ``use_cache``: transformers' trainer has set it to false."""
        fields = _fields(self.model)
        trained = fields.pop("use_cache", None)
        fields.update(self._own)
        try:
            with _settings_as_published():
                super()._save(output_dir, *args, **kwargs)
        finally:
            fields["use_cache"] = trained

    def _send_telemetry(self) -> None:
        """Send none of TRL's."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card: TRL's would name no base model, because models here are not loaded under its name."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as transformers does, then seal the checkpoint; a failed save does not affect older ones."""
        if self.config is None:
            super()._save_checkpoint(model, trial)
            return
        output = Path(self._get_output_dir(trial))
        folder = output / f"checkpoint-{self.state.global_step}"
        main = self.args.should_save
        if main and folder.exists():  # incomplete files of a killed run
            checkpoints.remove(folder)
        self.accelerator.wait_for_everyone()
        with checkpoints.writing(folder, output, remove_failed=main):
            super()._save_checkpoint(model, trial)
            self.save_more(folder)
            checkpoints.flush_all(folder)
            self.accelerator.wait_for_everyone()
            if main:
                size, rows = self.args.world_size, len(self.train_dataset)
                checkpoints.seal(folder, self.config, step=self.state.global_step, world_size=size, rows=rows)
        if main:
            checkpoints.prune(output, self.config.save_total_limit)
            LOGGER.info("saved %s", folder)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if BUS.active and not self._parts_emitted:
            self._parts_emitted = True
            self._emit_parts()

    _parts_emitted = False

    def models(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Return the parts of the model whose weights are reported, by name."""
        return [("model", self.model)]

    def _emit_parts(self) -> None:
        """Report the device memory of models and optimizer on this process, once they all exist."""
        BUS.emit(
            "parts",
            step=self.state.global_step,
            weights=model_bytes((name, part.parameters()) for name, part in self.models()),
            # The gradients are already freed; they are as large as what is trained.
            gradient_bytes=tensor_bytes(p for p in self.model.parameters() if p.requires_grad),
            optimizer_bytes=optimizer_bytes([self.optimizer]),
            average_bytes=self.average_bytes(),
        )

    def average_bytes(self) -> int:
        """Return the device memory of a moving average of the weights, if the recipe keeps one."""
        return 0


def shared_arguments(config: RecipeConfig, *, shards: int | None = None) -> dict[str, Any]:
    """Return the arguments of transformers' trainer that every recipe sets.

    Every argument that could make two modes differ, write files or send telemetry is set here: TRL's defaults enable
    checkpointing and bfloat16 autocast.

    Args:
        config: As ``sharding.resolved`` returned it.
        shards: How many processes share the weights in hybrid sharding; ``None``: those of a node.

    Raises:
        ConfigError: A tracker is unknown or not installed, or the processes make no mesh for hybrid sharding.
    """
    _check_trackers(config.report_to)
    accelerated = torch.accelerator.is_available()
    return {
        "output_dir": config.output_dir,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "per_device_eval_batch_size": config.per_device_eval_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "num_train_epochs": config.num_train_epochs,
        "max_steps": config.max_steps,
        "learning_rate": config.peak_learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type,
        "warmup_steps": config.warmup_ratio,  # below 1: a share of the steps
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        **_checkpointing(on=config.mode == "checkpointing"),
        **sharding.trainer_settings(config),
        **_hybrid(config, shards),
        "bf16": config.bf16,
        "fp16": config.fp16,
        "ddp_timeout": config.ddp_timeout,
        "use_cpu": not accelerated,
        "dataloader_pin_memory": accelerated,
        "dataloader_num_workers": config.dataloader_num_workers,
        "logging_steps": config.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "save_strategy": "no" if config.save_steps is None else "steps",
        "save_steps": config.save_steps or 500,
        "eval_strategy": "no" if config.eval_steps is None or not config.evaluates else "steps",
        "eval_steps": config.eval_steps,
        "report_to": list(config.report_to),
        "run_name": config.run_name,
        **({} if config.project_name is None else {"project": config.project_name}),
        "disable_tqdm": True,
        "seed": config.seed,
    }


def made(kind: type[ArgumentsT], options: dict[str, Any]) -> ArgumentsT:
    """Make a trainer's arguments, for one device per process.

    Args:
        kind: The class of arguments that the recipe's trainer takes.
        options: Its arguments; ``shared_arguments`` and the recipe's own.
    """
    with warnings.catch_warnings():
        # Of FSDP1, which was requested by its number.
        warnings.filterwarnings("ignore", message="FSDP1", category=FutureWarning)
        arguments = kind(**options)
    if arguments.n_gpu > 1:
        # One process trains on one device; the trainer would otherwise wrap the model in DataParallel.
        arguments._n_gpu = 1
    return arguments


def _hybrid(config: RecipeConfig, shards: int | None) -> dict[str, Any]:
    """Return the mesh of FSDP2's hybrid sharding, by default shards within a node and copies across nodes.

    Raises:
        ConfigError: accelerate makes no such mesh.
    """
    if config.fsdp_strategy != "hybrid_shard" or config.fsdp_version == 1:
        return {}
    from accelerate.parallelism_config import ParallelismConfig

    world = launch.world_size()
    shards = shards or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world > 1 and (shards == 1 or world % shards):
        raise ConfigError(
            f"fsdp_strategy is 'hybrid_shard' with {world} processes and {shards} for each copy of the weights",
            expected="two or more processes for each copy, and whole copies",
            hint="--fsdp_strategy full_shard shards over all processes, none is DDP",
        )
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=world // shards, dp_shard_size=shards)}


def _check_trackers(names: Sequence[str]) -> None:
    """Reject trackers that transformers does not know, or that are not installed."""
    from transformers import integrations

    known = {"none", "all", *integrations.INTEGRATION_TO_CALLBACK}
    usable = {"none", "all", *integrations.get_available_reporting_integrations()}
    for name in names:
        if name not in known:
            hint = nearest(name, known) or "none reports to no tracker"
            raise ConfigError(f"report_to names {name!r}", expected=f"some of {', '.join(sorted(known))}", hint=hint)
        if name not in usable:
            raise ConfigError(
                f"report_to names {name!r}",
                expected="a tracker that is installed",
                hint=f"pip install {_TRACKERS.get(name, name)}, or leave it out",
            )


def _checkpointing(*, on: bool) -> dict[str, Any]:
    """Return the trainer's own checkpointing arguments, under the names that the installed transformers has."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    word = "activation" if "activation_checkpointing" in names else "gradient"
    return {f"{word}_checkpointing": on, f"{word}_checkpointing_kwargs": {"use_reentrant": False}}


def name_present_blocks(model: PreTrainedModel) -> None:
    """Drop, from the classes that a model names as its blocks, those without a module.

    accelerate shards by these names and fails if one is missing; a vision-language model names the blocks of both
    halves of CLIP but has only one.
    """
    names = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in model._no_split_modules or () if name in names]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fields(model: Any) -> dict[str, Any]:
    """Return what is set in a model's config, to change; nothing of a model without one."""
    config = getattr(model, "config", None)
    return {} if config is None else vars(config)


@contextlib.contextmanager
def _settings_as_published() -> Iterator[None]:
    """Save settings of generation whatever is in them: transformers refuses some that published models have."""
    # In 5.17 it refused all such settings, later those in which the trainer has set the tokenizer's tokens.
    validate = GenerationConfig.validate
    GenerationConfig.validate = lambda *args, **kwargs: None
    try:
        yield
    finally:
        GenerationConfig.validate = validate


def save(config: RecipeConfig, trainer: RecordedTrainer, folder: Path) -> None:
    """Write the trained weights (or only the adapters) and the tokenizer; sharded weights are gathered first.

    An earlier model in the folder is replaced once all of the new one is on the disk.

    Raises:
        DiskError: The disk is full, or fails.
    """
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    draft, main = folder / outputs.DRAFT, trainer.args.should_save
    try:
        with checkpoints.writing(folder, folder, remove_failed=False):
            if main:
                checkpoints.remove(draft)  # of a killed run
                draft.mkdir()
                if (card := folder / "README.md").is_file():
                    shutil.copy(card, draft)  # PEFT adds to it
            trainer.save_model(str(draft))
            if main:
                checkpoints.flush_all(draft)
                outputs.place_model(config, folder)
    finally:
        if main:
            checkpoints.remove(draft)
