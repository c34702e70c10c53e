"""One run of a recipe: check, claim the output folder, train, record, save."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import tempfile
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ebbtide.base.errors import ConfigError, DataError, DiskPathError, TargetError, counted
from ebbtide.base.events import BUS
from ebbtide.base.extras import check_installed, require
from ebbtide.base.runs import EVENTS_FILE, SUMMARY_FILE, only_writer
from ebbtide_recipes.skeleton import checkpoints, damage, hubs, launch, outputs, sharding
from ebbtide_recipes.skeleton.config import OF_OFFLOADING, OFFLOADING
from ebbtide_recipes.skeleton.functions import load_function
from ebbtide_recipes.skeleton.logging import LOG_FILE, logging_to, quiet_bitsandbytes, quiet_hosts, remove_earlier_lines
from ebbtide_recipes.skeleton.trackers import project_named

if TYPE_CHECKING:
    from ebbtide.integrations.transformers import OffloadCallback
    from ebbtide_recipes.skeleton.config import RecipeConfig
    from ebbtide_recipes.skeleton.recipe import Recipe
    from ebbtide_recipes.skeleton.trainer import RecordedTrainer

ConfigT = TypeVar("ConfigT", bound="RecipeConfig")

LOGGER = logging.getLogger("ebbtide.recipes")

_FILTERS = ("tensor_filter", "custom_tensor_filter")
"""Names of a filter in a file that is named without its function."""


@quiet_bitsandbytes()
def main(recipe: Recipe[ConfigT], config: ConfigT) -> None:
    """Train, in this process: alone, or as one of torchrun's ranks.

    Args:
        recipe: The recipe.
        config: The recipe's config.

    Raises:
        EbbtideError: The config, the data, the model or the machine cannot be used.
        KeyboardInterrupt: Interrupted by the user; the run file is closed and records it.
    """
    config = check(recipe, config)
    for package in recipe.packages:
        require(package, extra=recipe.extra, use=f"the {recipe.name} recipe")
    rank = int(os.environ["RANK"]) if launch.is_rank() else 0
    with ExitStack() as claimed:
        folder = claim(config, claimed)
        append = checkpoints.resumes(config) or outputs.only_latents(config)
        claimed.enter_context(logging_to(folder, config.log_level, append=append, rank=rank))
        claimed.enter_context(quiet_hosts())
        for name in config.without_effect():
            if name in OF_OFFLOADING and config.mode != "ebbtide":
                LOGGER.warning("--%s has no effect here; hint: add --activation_cpu_offload true", name)
                continue
            LOGGER.warning(
                "--%s has no effect here: the mode is %s, train_type %s, lr_scheduler_type %s, fsdp_strategy %s",
                *(name, config.mode, config.train_type, config.lr_scheduler_type, config.fsdp_strategy),
            )
        if config.deepspeed is not None and config.fsdp_strategy != "none":
            LOGGER.warning("--deepspeed %s has no effect here: FSDP shards", config.deepspeed)
        carry_out(recipe, config, folder)


def carry_out(recipe: Recipe[ConfigT], config: ConfigT, folder: Path) -> RecordedTrainer | None:
    """Prepare, train, save and record: the part of ``main`` after the checks.

    Args:
        recipe: The recipe.
        config: As ``check`` returned it.
        folder: As ``claim`` returned it.

    Returns:
        The finished trainer; ``None`` if there was nothing to train.
    """
    trainer, recorded = None, False
    records = launch.is_main() and not outputs.only_latents(config)
    earlier = outputs.Earlier(config, folder) if records else None
    try:
        with _record(recipe, config, folder) if records else nullcontext():
            recorded = records
            trainer = _prepared(recipe, config)
            if trainer is not None:
                _train(recipe, config, trainer, folder)
            return trainer
    except KeyboardInterrupt:
        if launch.is_main() and trainer is not None:
            LOGGER.warning("stopped after step %d; %s", trainer.state.global_step, checkpoints.resumable(folder))
        elif launch.is_main() and (complete := checkpoints.complete(folder)):
            LOGGER.info("%s is complete: --resume_from_checkpoint latest continues from it", complete[-1].folder)
        raise
    finally:
        if recorded and trainer is None:
            # A run that never began must not block the next.
            for name in (EVENTS_FILE, SUMMARY_FILE):
                (folder / name).unlink(missing_ok=True)
        if earlier is not None and trainer is None:
            earlier.restore()


@quiet_bitsandbytes()
def check(recipe: Recipe[ConfigT], config: ConfigT) -> ConfigT:
    """Reject settings that must fail, before anything is loaded, fetched or written.

    Args:
        recipe: The recipe.
        config: The recipe's config.

    Returns:
        The config with the settings of its FSDP file in its flags.

    Raises:
        EbbtideError: The environment, the names in the config or this machine cannot be used.
    """
    config = sharding.resolved(config)
    for package in recipe.packages:
        check_installed(package, extra=recipe.extra, use=f"the {recipe.name} recipe")
    recipe.check_data(config)  # before the seconds that torch's import takes
    launch.processes(config)
    launch.check_device(config)
    _check_store(config)
    offload_options(config)
    _check_precision(config)
    hubs.check(config)
    recipe.check(config)
    if launch.is_main():
        found = checkpoints.find(config)
        if found is not None:
            damage.check(found)
        outputs.check(config)
    return config


def _check_precision(config: RecipeConfig) -> None:
    """Reject float16 without loss scaling."""
    import torch

    if config.fp16 and not torch.accelerator.is_available():
        raise ConfigError(
            "fp16 is true on a machine without an accelerator",
            expected="an accelerator that computes in float16",
            hint="--bf16 true works on CPUs too",
        )


def _check_store(config: RecipeConfig) -> None:
    """Reject an invalid directory for offloaded bytes, even in modes that do not use it."""
    import torch

    from ebbtide.store.location import check_directory

    if config.offload_target == "host" and not torch.accelerator.is_available():
        raise TargetError(
            "offload_target is 'host' on a machine without an accelerator",
            expected="an accelerator",
            hint="leave --offload_target out, or use disk: without an accelerator, RAM is the memory to save",
        )
    if config.disk_path is not None:
        directory = check_directory(config.disk_path)
        try:
            with tempfile.TemporaryFile(dir=directory):  # permissions are not enough: /proc, a read-only mount
                pass
        except OSError as error:
            raise DiskPathError(
                f"disk path {str(directory)!r} is not writable ({error.strerror})",
                expected="a writable directory",
                hint="choose a directory on a local disk with --disk_path",
            ) from error


def claim(config: RecipeConfig, claimed: ExitStack) -> Path:
    """Create the output folder and its log.

    Args:
        config: As ``check`` returned it.
        claimed: Holds, while it is open, the lock on the folder.
    """
    folder = outputs.place(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if launch.is_main():
            claimed.enter_context(only_writer(folder))
            with (folder / LOG_FILE).open("a"):
                pass
    except OSError as error:
        flag = "latents_dir" if outputs.only_latents(config) else "output_dir"
        raise DataError(
            f"{flag} {str(folder)!r} cannot be written: {error.strerror}",
            expected="a folder for the run's files",
            hint="choose a folder that you may write to",
        ) from error
    return folder


def _prepared(recipe: Recipe[ConfigT], config: ConfigT) -> RecordedTrainer | None:
    """Load model and data, and make the trainer, between the edges of the phase ``load``."""
    from transformers import PrinterCallback

    BUS.emit("phase", name="load", edge="begin", step=0)
    trainer = recipe.prepare(config)
    if trainer is not None:
        trainer.config = config
        trainer.remove_callback(PrinterCallback)
    BUS.emit("phase", name="load", edge="end", step=0)
    return trainer


def _train(recipe: Recipe[ConfigT], config: ConfigT, trainer: RecordedTrainer, folder: Path) -> None:
    """Train and save."""
    from ebbtide_recipes.skeleton.collector import frozen_heap
    from ebbtide_recipes.skeleton.precision import warn_of_lost_steps
    from ebbtide_recipes.skeleton.progress import StepBar
    from ebbtide_recipes.skeleton.steps import StepRecorder
    from ebbtide_recipes.skeleton.trainer import save

    warn_of_lost_steps(config, trainer.model)
    if config.save_steps is not None or checkpoints.resumes(config):
        outputs.check_shared(folder)
    found = checkpoints.find(config, world_size=trainer.args.world_size, rows=len(trainer.train_dataset))
    offload = _offloading(config)
    try:
        with StepBar(shown=launch.is_main()) as bar, project_named(config.project_name), frozen_heap(trainer):
            if offload is not None:
                offload.follow(trainer)
            trainer.record_with(
                StepRecorder(
                    offload,
                    bar,
                    mean=partial(trainer.accelerator.reduce, reduction="mean"),
                    processes=trainer.args.world_size,
                    nan_loss=config.nan_loss,
                )
            )
            # Not earlier: a run that fails while it loads must leave them.
            remove_earlier_lines()
            if launch.is_main():
                outputs.clear(config, folder)
            if found is not None:
                LOGGER.info("resuming from %s", found)
                if launch.is_main():
                    checkpoints.set_aside_later(config)
            elif checkpoints.resumes(config):
                LOGGER.warning("%s holds no complete checkpoint: the run starts at the first step", folder)
            trainer.train(resume_from_checkpoint=None if found is None else str(found))
            if config.save:
                save(config, trainer, folder)  # before the evaluation: if that fails, the trained model is not lost
            if config.evaluates and config.eval_steps is None:
                trainer.evaluate()
        if offload is not None and offload.handle is not None:
            LOGGER.debug("the plan: %s", offload.handle.explain())
    finally:
        if offload is not None:
            offload.close()
    recipe.finish(config, trainer, folder)
    steps = counted(trainer.state.global_step, "step")
    drawn = shlex.join(["ebbtide", "report", str(folder)])
    LOGGER.info("%s done; the record is in %s: `%s` makes report.html", steps, folder, drawn)


def _record(recipe: Recipe[ConfigT], config: ConfigT, folder: Path) -> AbstractContextManager[object]:
    """Return a context that writes the run file."""
    from ebbtide.track.runfile import RunFile
    from ebbtide_recipes.skeleton.precision import dtype_name

    dtype = dtype_name(config)
    fields = {"model": config.model, "mode": config.mode, "recipe": recipe.name, "dtype": dtype}
    return RunFile(folder, overwrite=config.overwrite_output_dir, config=dataclasses.asdict(config), **fields)


def _offloading(config: RecipeConfig) -> OffloadCallback | None:
    """Return the callback that enables ebbtide when training begins, from the flags."""
    if config.mode != "ebbtide":
        return None
    from ebbtide.integrations.transformers import OffloadCallback

    return OffloadCallback(
        enable_ckpt=config.gradient_checkpointing,
        policy=None if config.gradient_checkpointing else config.chosen_policy(),
        target=config.offload_target,
        disk_path=config.disk_path,
        verify=config.verify,
        **offload_options(config),
    )


def offload_options(config: RecipeConfig) -> dict[str, Any]:
    """Return the arguments of ``enable_activation_offloading`` from the flags of the same names, sizes in bytes.

    Raises:
        ConfigError: A size or a path of a block cannot be used, or the filter is missing.
    """
    from ebbtide.arguments import check_choosers, options_of

    options: dict[str, Any] = {name: getattr(config, name) for name in OFFLOADING if config.is_set(name)}
    if config.tensor_filter is not None:
        place, colon, name = config.tensor_filter.rpartition(":")
        found = (place, [name]) if colon and place.endswith(".py") else (config.tensor_filter, _FILTERS)
        example = "def tensor_filter(tensor): return tensor.numel() > 1_000_000"
        options["tensor_filter"] = load_function(*found, what="a filter of tensors", example=example)
    check_choosers(options.get("blocks"))
    parsed = options_of("auto", config.min_bytes or 0, config.window, None, False, config.host_budget)
    sizes = {"min_bytes": parsed.min_bytes, "host_budget": parsed.host_budget_bytes, "window": parsed.window_bytes}
    return options | {name: sizes[name] for name in sizes.keys() & options.keys()}
