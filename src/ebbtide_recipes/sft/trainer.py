"""TRL's trainer, with its arguments set so that every mode computes the same numbers, and its phases marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl import SFTConfig as TrlConfig
from trl import SFTTrainer

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.events import BUS
from ebbtide_recipes.sft.callback import StepRecorder

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ebbtide_recipes.sft.config import SftConfig


class RecipeTrainer(SFTTrainer):
    """TRL's trainer with phases and losses told to a recorder; see [Note: phases] in ``callback.py``."""

    recorder: StepRecorder | None = None

    def record_with(self, recorder: StepRecorder) -> None:
        """Tell this recorder what happens from now on."""
        self.recorder = recorder
        self.add_callback(recorder)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, between the edges of the phase ``forward``."""
        step = self.state.global_step + 1
        tokens = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()
        BUS.emit("phase", name="forward", edge="begin", step=step)
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self.recorder is not None:
            accuracies = self._metrics["train"].get("mean_token_accuracy") or [None]
            self.recorder.micro_batch(accuracy=accuracies[-1], tokens=tokens)
        BUS.emit("phase", name="forward", edge="end", step=step)
        BUS.emit("phase", name="backward", edge="begin", step=step)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward; backward's end is here."""
        loss = super().training_step(*args, **kwargs)
        BUS.emit("phase", name="backward", edge="end", step=self.state.global_step + 1)
        if self.recorder is not None:
            self.recorder.micro_loss(loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the recorder knows, so that trackers see it too."""
        if self.recorder is not None and "loss" in logs:
            logs.update({name: value for name, value in self.recorder.shown.items() if value is not None})
        super().log(logs, start_time)

    def _send_telemetry(self) -> None:
        """Send nothing: a training run tells nobody about itself."""


def arguments(config: SftConfig) -> TrlConfig:
    """Return the trainer's arguments.

    Every argument that could make two modes differ, write files or phone home is set here rather than left to a
    default: TRL's defaults switch on checkpointing and bfloat16 autocast.
    """
    _check_trackers(config.report_to)
    accelerated = torch.accelerator.is_available()
    made = TrlConfig(
        output_dir=config.output_dir,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps,
        learning_rate=config.peak_learning_rate,
        max_length=config.max_length,
        packing=config.packing,
        # The other strategies leave sequences shorter and concatenate batches, which needs flash attention.
        packing_strategy="wrapped",
        padding_free=False,
        **_checkpointing(on=config.mode == "checkpointing"),
        activation_offloading=False,
        bf16=False,
        fp16=False,
        use_cpu=not accelerated,
        dataloader_pin_memory=accelerated,
        logging_steps=config.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=list(config.report_to),
        disable_tqdm=True,
        seed=config.seed,
    )
    if made.n_gpu > 1:
        # One process trains on one device; the trainer would otherwise wrap the model in DataParallel.
        made._n_gpu = 1
    return made


def _check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that transformers does not know, or that are not installed."""
    from transformers import integrations

    known = {"none", "all", *integrations.INTEGRATION_TO_CALLBACK}
    usable = {"none", "all", *integrations.get_available_reporting_integrations()}
    for name in names:
        if name not in known:
            hint = nearest(name, known) or "none reports to no tracker"
            raise ConfigError(f"report_to names {name!r}", expected=f"some of {', '.join(sorted(known))}", hint=hint)
        if name not in usable:
            raise ConfigError(
                f"report_to names {name!r}", expected="a tracker that is installed", hint="install its package"
            )


def _checkpointing(*, on: bool) -> dict[str, Any]:
    """Return the trainer's own checkpointing arguments, under the names that the installed transformers has."""
    names = {field.name for field in dataclasses.fields(TrlConfig)}
    word = "activation" if "activation_checkpointing" in names else "gradient"
    return {f"{word}_checkpointing": on, f"{word}_checkpointing_kwargs": {"use_reentrant": False}}


def build(
    config: SftConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    adapters: Any | None,
) -> RecipeTrainer:
    """Make the trainer; tokenise and pack the data.

    Raises:
        DataError: The data has no full sequence (with packing), or no token to learn from.
    """
    from transformers import PrinterCallback

    trainer = RecipeTrainer(
        model=model,
        args=arguments(config),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.remove_callback(PrinterCallback)
    if config.packing:
        # Packing cuts whole batches of rows and leaves a short rest of each.
        trainer.train_dataset = trainer.train_dataset.filter(lambda row: len(row["input_ids"]) == config.max_length)
    if len(trainer.train_dataset) == 0:
        what = f"fill no sequence of {config.max_length} tokens" if config.packing else "leave no token to learn from"
        raise DataError(
            f"the {len(dataset)} rows of {', '.join(config.dataset)} {what}",
            expected=f"completions within the first {config.max_length} tokens" if not config.packing else "more text",
            hint="use a smaller --max_length or more rows" if config.packing else "use a larger --max_length",
        )
    return trainer


def save(trainer: RecipeTrainer, folder: Path) -> None:
    """Write the trained weights (LoRA: the adapters) and the tokenizer."""
    trainer.save_model(str(folder))
