"""The part of every trainer that loads a checkpoint, and saves what transformers leaves out of one."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.trainer_callback import TrainerState

from ebbtide.base.errors import few
from ebbtide_recipes.skeleton import damage

LOGGER = logging.getLogger("ebbtide.recipes")

_GENERATOR = "device_rng_state_{}.pth"


class ResumedTrainer(Trainer):
    """Resume exactly. A recipe with further state overrides ``save_more`` and ``load_more``."""

    def save_more(self, folder: Path) -> None:
        """Write, on every rank, further state for an exact resume; the seal comes after."""

    def load_more(self, folder: Path) -> None:
        """Read what ``save_more`` wrote; optimizer and schedule are already loaded."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Save also the accelerator's generator: transformers leaves out that of some kinds, such as XPU."""
        super()._save_rng_state(output_dir)
        if self.args.device.type != "cpu":
            state = torch.get_device_module(self.args.device).get_rng_state()
            torch.save(state, Path(output_dir, _GENERATOR.format(self.args.process_index)))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load what ``_save_rng_state`` saved."""
        if checkpoint is None:
            return
        with damage.explained(checkpoint):
            super()._load_rng_state(checkpoint)
            place = Path(checkpoint, _GENERATOR.format(self.args.process_index))
            if self.args.device.type != "cpu" and place.is_file():
                torch.get_device_module(self.args.device).set_rng_state(torch.load(place))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load a checkpoint's optimizer and schedule, but not how often it logged, saved and evaluated."""
        if checkpoint is None:
            return
        ours = self._rates()
        with damage.explained(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        self.state.compute_steps(self.args, self.state.max_steps)
        if (kept := self._rates()) != ours:
            LOGGER.warning("the optimizer of %s is resumed with %s, not with this run's %s", checkpoint, kept, ours)
        with damage.explained(checkpoint):
            self.load_more(Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the state of float16's loss scaling."""
        if checkpoint is not None:
            with damage.explained(checkpoint):
                super()._load_scaler(checkpoint)

    def _rates(self) -> str:
        """Return the optimizer's learning rates, one of a group each, and its weight decay, in words."""
        groups = self.optimizer.param_groups
        rates = dict.fromkeys(f"{float(group.get('initial_lr', 0.0)):.6g}" for group in groups)
        decay = max(float(group.get("weight_decay", 0.0)) for group in groups)  # some weights have none
        return f"learning_rate {', '.join(rates)} and weight_decay {decay:.6g}"

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Run an epoch, unless the checkpoint had finished all steps: transformers would run one more."""
        if self.state.global_step >= self.state.max_steps:
            LOGGER.info("all %d steps are already done: nothing is left to train", self.state.max_steps)
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights."""
        with damage.explained(resume_from_checkpoint):
            TrainerState.load_from_json(str(Path(resume_from_checkpoint, damage.STATE)))
            self.load_weights(resume_from_checkpoint, model)

    def load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights as ``from_pretrained`` does.

        Raises:
            DataError: There are none of some parameters, or of another size: transformers would go on without them.
        """
        if self.is_fsdp_enabled or not isinstance(self.model, PreTrainedModel):
            if not self.is_fsdp_enabled:
                _check_adapters(self.model, Path(resume_from_checkpoint))
            dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            for name, parameter in self.model.named_parameters():
                dtype = dtypes.get(name, parameter.dtype)
                if parameter.requires_grad and parameter.dtype != dtype:  # PEFT loads adapters in float32
                    parameter.data = parameter.data.to(dtype)
            return
        # A model's files and modules may name weights differently (fused experts, vision-language models). The config
        # is the run's: that of a damaged file may describe a model of another size, such as the default one.
        kind: Any = type(self.model)
        saved, found = kind.from_pretrained(
            resume_from_checkpoint,
            config=self.model.config,
            dtype=self.model.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        unfit = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
        _refuse(Path(resume_from_checkpoint), unfit)
        self.model.load_state_dict(saved.state_dict())


def _check_adapters(model: Any, folder: Path) -> None:
    """Refuse a checkpoint that lacks values of adapters; PEFT would leave those of this run's beginning."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    path = folder / "adapter_model.safetensors"
    if isinstance(model, PeftModel) and path.is_file():
        with safe_open(path, framework="pt") as opened:
            _refuse(folder, get_peft_model_state_dict(model, save_embedding_layers=False).keys() - opened.keys())


def _refuse(folder: Path, unfit: Set[str]) -> None:
    if unfit:
        raise damage.refused(folder, f"{folder} has no values of {few(sorted(unfit))}, or others than fit")
