"""The recipe: data, model and trainer from a config; a run folder and a trained model from training."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, DiskError, TargetError
from ebbtide.base.extras import check_installed, require
from ebbtide.base.runs import EVENTS_FILE
from ebbtide_recipes.sft import launch, sharding
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.logging import LOG_FILE, logging_to, quiet_hosts

if TYPE_CHECKING:
    from ebbtide.integrations.pretrained import Found
    from ebbtide.integrations.transformers import OffloadCallback
    from ebbtide_recipes.sft.models import Source
    from ebbtide_recipes.sft.trainer import RecipeTrainer

LOGGER = logging.getLogger("ebbtide.sft")

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "rich", "psutil")


def main(config: SftConfig) -> None:
    """Fine-tune a model, in this process: alone, or as one of torchrun's ranks.

    Args:
        config: What to train, on what, and how.

    Raises:
        EbbtideError: The config, the data, the model or the machine cannot serve the run.
        KeyboardInterrupt: Interrupted by the user; the run file is closed and says so.
    """
    config = check(config)
    for package in PACKAGES:
        require(package, extra="recipes", use="the sft recipe")
    folder = _claimed(config)
    rank = int(os.environ["RANK"]) if launch.is_rank() else 0
    resuming = config.resume_from_checkpoint is not None
    with logging_to(folder, config.log_level, append=resuming, rank=rank), quiet_hosts():
        for name in config.without_effect():
            LOGGER.warning(
                "--%s has no effect here: the mode is %s, train_type %s", name, config.mode, config.train_type
            )
        if config.deepspeed is not None and config.fsdp_strategy != "none":
            LOGGER.warning("--deepspeed %s has no effect here: FSDP is what shards", config.deepspeed)
        _train(config, _prepared(config), folder)


def check(config: SftConfig) -> SftConfig:
    """Refuse what can be seen to fail before anything is loaded, fetched or written.

    Args:
        config: What to train, on what, and how.

    Returns:
        The config with what its FSDP file says in its flags.

    Raises:
        EbbtideError: The environment, the names in the config or this machine cannot serve the run.
    """
    config = sharding.resolved(config)
    for package in PACKAGES:
        check_installed(package, extra="recipes", use="the sft recipe")
    from ebbtide_recipes.sft import adapters, checkpoints, data, hubs, models

    launch.processes(config)
    launch.check_device(config)
    _check_store(config)
    _check_precision(config)
    hubs.check(config)
    adapters.check(config)
    data.check([*config.dataset, *(config.eval_dataset or ())])
    models.check(config.model)
    if launch.is_main():
        checkpoints.find(config)
        _check_output(config)
    return config


def _check_precision(config: SftConfig) -> None:
    """Refuse float16 where nothing can scale losses."""
    import torch

    if config.fp16 and not torch.accelerator.is_available():
        raise ConfigError(
            "fp16 is true on a machine without an accelerator",
            expected="an accelerator that computes in float16",
            hint="--bf16 true works on CPUs too",
        )


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
    """Refuse an output folder that holds an earlier run, unless the run goes on with it."""
    folder = Path(config.output_dir).expanduser()
    resuming = config.resume_from_checkpoint is not None
    if (folder / EVENTS_FILE).exists() and not config.overwrite_output_dir and not resuming:
        raise DataError(
            f"{folder} holds an earlier run ({EVENTS_FILE})",
            expected="a folder without one",
            hint="name another --output_dir, go on with it (--resume_from_checkpoint latest), "
            "or give --overwrite_output_dir true",
        )


def _claimed(config: SftConfig) -> Path:
    """Make the output folder and a log in it; put the record of a run that is resumed aside."""
    folder = Path(config.output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if launch.is_main():
            (folder / LOG_FILE).touch()
            _put_aside(config, folder)
    except OSError as error:
        raise DataError(
            f"output_dir {str(folder)!r} cannot be written: {error.strerror}",
            expected="a folder for the run's files",
            hint="name a folder that you may write to",
        ) from error
    return folder


def _put_aside(config: SftConfig, folder: Path) -> None:
    """Keep the record of the run so far as ``run-1.jsonl``, ``run-2.jsonl``, ...; drop what an overwritten run left.

    Without this, ``latest`` would take a checkpoint of a run that was overwritten.
    """
    from ebbtide_recipes.sft import checkpoints

    events = folder / EVENTS_FILE
    if config.resume_from_checkpoint is not None:
        if events.exists():
            number = len(list(folder.glob("run-*.jsonl"))) + 1
            events.rename(folder / f"run-{number}.jsonl")
    elif config.overwrite_output_dir and events.exists():
        for path in (*folder.glob("checkpoint-*"), *folder.glob("run-*.jsonl")):
            checkpoints.remove(path) if path.is_dir() else path.unlink()


def _prepared(config: SftConfig) -> RecipeTrainer:
    """Load model and data, and make the trainer. What can be refused comes before what takes long."""
    from accelerate import PartialState

    from ebbtide_recipes.sft import adapters, data, models, trainer

    trainer.arguments(config)  # also joins the other ranks
    launch.check_device(config)
    with PartialState().main_process_first():  # what is fetched or made is so once
        source = models.look_up(config)
    made = None
    if config.trains_adapters:
        outline = models.outline(config, source)
        frozen = models.vision_parts(outline, source.config) if source.sees and config.freeze_vit else []
        made = adapters.chosen(config, outline, without=frozen)
    reading = _reading(config, source)
    dataset = data.load(config.dataset, reading)
    evaluation = None if config.eval_dataset is None else data.load(config.eval_dataset, reading)
    if config.split_dataset_ratio > 0:
        dataset, evaluation = data.split(dataset, config.split_dataset_ratio, seed=config.seed)
    if source.sees and config.packing and "images" in dataset.column_names:
        raise ConfigError(
            "packing is true, and the rows have images", expected="one row a sequence", hint="leave --packing out"
        )
    weights: Found | None = None
    if config.memory_efficient_init:
        model, weights = models.load_empty(config, source)
    else:
        model, _ = models.load(config, source)
    LOGGER.info("%s: %d rows from %s", config.model, len(dataset), ", ".join(config.dataset))
    trained: Any = model if made is None else adapters.put_on(model, made, config)
    return _built(config, trained, source, dataset, evaluation, weights)


def _built(
    config: SftConfig, model: Any, source: Source, dataset: Any, evaluation: Any, weights: Found | None
) -> RecipeTrainer:
    """Make the trainer; a model on meta gets its weights before, or where it is sharded once its trainer knows how."""
    from ebbtide_recipes.sft import meta, trainer

    sharded = config.fsdp_strategy != "none"
    if weights is not None and not sharded:
        meta.fill(model, weights)
    built = trainer.build(config, model, source.processor, dataset, evaluation)
    if weights is not None and sharded:
        meta.fill_sharded(built, weights)
    return built


def _reading(config: SftConfig, source: Source) -> Any:
    """Return how rows are to be read for this model."""
    from ebbtide_recipes.sft.data import Reading

    return Reading(
        chat=source.chats,
        seed=config.seed,
        system=config.system,
        answers_alone=bool(config.completion_only_loss),
        vision=source.sees,
        use_hf=config.use_hf,
    )


def _train(config: SftConfig, trainer: RecipeTrainer, folder: Path) -> None:
    """Train, record, save, and say what came of it."""
    from ebbtide_recipes.sft import checkpoints
    from ebbtide_recipes.sft.callback import StepRecorder
    from ebbtide_recipes.sft.progress import StepBar
    from ebbtide_recipes.sft.trainer import save

    found = checkpoints.find(config, world_size=trainer.args.world_size)
    offload = _offloading(config)
    try:
        with _record(config, folder), StepBar(shown=launch.is_main()) as bar:
            if offload is not None:
                offload.follow(trainer)
            trainer.record_with(
                StepRecorder(
                    offload,
                    bar,
                    mean=trainer.mean_over_processes,
                    processes=trainer.args.world_size,
                    nan_loss=config.nan_loss,
                )
            )
            if found is not None:
                LOGGER.info("going on from %s", found)
            trainer.train(resume_from_checkpoint=None if found is None else str(found))
            if config.evaluates and config.eval_steps is None:
                trainer.evaluate()
        if offload is not None and offload.handle is not None:
            LOGGER.debug("what became of the plan: %s", offload.handle.explain())
    finally:
        if offload is not None:
            offload.close()
    if config.save:
        save(trainer, folder)
    steps = trainer.state.global_step
    LOGGER.info("%d steps done; the record is in %s: `ebbtide report %s` makes report.html", steps, folder, folder)


def _record(config: SftConfig, folder: Path) -> Any:
    """Return what writes the run file; nothing on ranks above 0."""
    from contextlib import nullcontext

    from ebbtide.track.runfile import RunFile
    from ebbtide_recipes.sft.models import dtype_name

    if not launch.is_main():
        return nullcontext()
    fields = {"model": config.model, "mode": config.mode, "recipe": "sft", "dtype": dtype_name(config.torch_dtype)}
    return RunFile(folder, overwrite=config.overwrite_output_dir, config=dataclasses.asdict(config), **fields)


def _offloading(config: SftConfig) -> OffloadCallback | None:
    """Return what turns ebbtide on when training begins, as the flags say."""
    if config.mode != "ebbtide":
        return None
    from ebbtide.integrations.transformers import OffloadCallback

    return OffloadCallback(
        enable_ckpt=config.gradient_checkpointing,
        policy=None if config.gradient_checkpointing else config.chosen_policy(),
        target=config.offload_target,
        disk_path=config.disk_path,
        verify=config.verify,
    )
