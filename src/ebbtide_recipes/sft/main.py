"""The recipe: data, model and trainer from a config; a run folder and a trained model from training."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import DataError, DiskError, TargetError
from ebbtide.base.events import BUS
from ebbtide.base.extras import require
from ebbtide.base.runs import EVENTS_FILE
from ebbtide_recipes.sft.config import SftConfig, refuse_several_processes
from ebbtide_recipes.sft.logging import LOG_FILE, logging_to, quiet_hosts

if TYPE_CHECKING:
    from torch import nn

    from ebbtide_recipes.sft.trainer import RecipeTrainer

LOGGER = logging.getLogger("ebbtide.sft")

PACKAGES = ("transformers", "trl", "peft", "datasets", "rich", "psutil")


def main(config: SftConfig) -> None:
    """Fine-tune a model.

    Args:
        config: What to train, on what, and how.

    Raises:
        EbbtideError: The config, the data, the model or the machine cannot serve the run.
        KeyboardInterrupt: Interrupted by the user; the run file is closed and says so.
    """
    check(config)
    for package in PACKAGES:
        require(package, extra="recipes", use="the sft recipe")
    folder = _claimed(config)
    with logging_to(folder, config.log_level), quiet_hosts():
        for name in config.without_effect():
            LOGGER.warning(
                "--%s has no effect here: the mode is %s, train_type %s", name, config.mode, config.train_type
            )
        _train(config, _prepared(config), folder)


def check(config: SftConfig) -> None:
    """Refuse what can be seen to fail before anything is loaded, fetched or written.

    Args:
        config: What to train, on what, and how.

    Raises:
        EbbtideError: The environment, the names in the config or this machine cannot serve the run.
    """
    refuse_several_processes()
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:  # found, not imported: that takes seconds
            require(package, extra="recipes", use="the sft recipe")
    from ebbtide_recipes.sft import data, models

    _check_store(config)
    data.check(config.dataset)
    models.check(config.model)
    _check_output(config)


def _check_store(config: SftConfig) -> None:
    """Refuse a place for offloaded bytes that is not there; also where it has no use, for it will have one later."""
    import torch

    from ebbtide.store.location import check_directory

    if config.offload_target == "host" and not torch.accelerator.is_available():
        raise TargetError(
            "offload_target is 'host' on a machine without an accelerator",
            expected="a device whose memory is scarcer than the host's",
            hint="leave --offload_target out, or give disk: RAM is what is scarce here",
        )
    if config.disk_path is not None:
        directory = check_directory(config.disk_path)
        try:
            with tempfile.TemporaryFile(dir=directory):  # rights alone do not tell: /proc, a read-only mount
                pass
        except OSError as error:
            raise DiskError(
                f"disk path {str(directory)!r} takes no file ({error.strerror})",
                expected="a writable directory",
                hint="give a directory on a local disk with --disk_path",
            ) from error


def _check_output(config: SftConfig) -> None:
    """Refuse an output folder that holds an earlier run."""
    folder = Path(config.output_dir).expanduser()
    if (folder / EVENTS_FILE).exists() and not config.overwrite_output_dir:
        raise DataError(
            f"{folder} holds an earlier run ({EVENTS_FILE})",
            expected="a folder without one",
            hint="name another --output_dir, or give --overwrite_output_dir true",
        )


def _claimed(config: SftConfig) -> Path:
    """Make the output folder and an empty log in it."""
    folder = Path(config.output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG_FILE).touch()
    except OSError as error:
        raise DataError(
            f"output_dir {str(folder)!r} cannot be written: {error.strerror}",
            expected="a folder for the run's files",
            hint="name a folder that you may write to",
        ) from error
    return folder


def _prepared(config: SftConfig) -> RecipeTrainer:
    """Load model and data, and make the trainer. What can be refused comes before what takes long."""
    from ebbtide_recipes.sft import data, models, trainer

    trainer.arguments(config)
    source = models.look_up(config)
    adapters = models.lora_config(config, models.outline(config, source)) if config.train_type == "lora" else None
    dataset = data.load(config.dataset, chat=source.tokenizer.chat_template is not None, seed=config.seed)
    model, tokenizer = models.load(config, source)
    LOGGER.info("%s: %d rows from %s", config.model, len(dataset), ", ".join(config.dataset))
    return trainer.build(config, model, tokenizer, dataset, adapters)


def _train(config: SftConfig, trainer: RecipeTrainer, folder: Path) -> None:
    """Train, record, save, and say what came of it."""
    from ebbtide.track.runfile import RunFile
    from ebbtide_recipes.sft.callback import StepRecorder
    from ebbtide_recipes.sft.models import dtype_name
    from ebbtide_recipes.sft.progress import StepBar
    from ebbtide_recipes.sft.trainer import save

    fields = {"model": config.model, "mode": config.mode, "recipe": "sft", "dtype": dtype_name(config.torch_dtype)}
    with _offloading(config, trainer.model) as handle:
        begin = RunFile(folder, overwrite=config.overwrite_output_dir, config=dataclasses.asdict(config), **fields)
        with begin, StepBar() as bar:
            trainer.record_with(StepRecorder(handle, bar))
            _tell_plan(handle)
            trainer.train()
        if handle is not None:
            LOGGER.debug("what became of the plan: %s", handle.explain())
    if config.save:
        save(trainer, folder)
    steps = trainer.state.global_step
    LOGGER.info("%d steps done; the record is in %s: `ebbtide report %s` makes report.html", steps, folder, folder)


@contextmanager
def _offloading(config: SftConfig, model: nn.Module) -> Generator[Any | None, None, None]:
    """Turn ebbtide on as the flags say; off again at the end, whatever happens."""
    if config.mode != "ebbtide":
        yield None
        return
    import ebbtide

    handle = ebbtide.enable_activation_offloading(
        model,
        enable_ckpt=config.gradient_checkpointing,
        policy=None if config.gradient_checkpointing else config.chosen_policy(),
        target=config.offload_target,
        disk_path=config.disk_path,
        verify=config.verify,
    )
    try:
        yield handle
    finally:
        handle.close()


def _tell_plan(handle: Any | None) -> None:
    """Emit the plan once more: it was made before the run file was there to hear it."""
    if handle is not None:
        BUS.emit("plan", name=handle.plan.name, text=handle.plan.explain())
