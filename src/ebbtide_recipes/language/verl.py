"""Keys that verl's trainers for fine-tuning and for reinforcement share, and what they set here. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ebbtide.base.errors import ConfigError
from ebbtide.cli.translation import Translation
from ebbtide_recipes.skeleton import launch

TRANSLATED: Mapping[str, str] = {
    "trainer.logger": "`--report_to`, without `console`: log lines are always printed",
    "trainer.project_name": "`--project_name`; with the name of the experiment also "
    "`--output_dir checkpoints/PROJECT/EXPERIMENT`, unless that is set",
    "trainer.experiment_name": "`--run_name`",
    "trainer.save_freq": "`--save_steps`; -1: no checkpoints",
    "trainer.test_freq": "`--eval_steps`; -1: none during training",
}
"""Keys whose values set one or more flags, in words for the page of flags."""

GROUPS: Mapping[str, str] = dict.fromkeys(
    (
        "actor_rollout_ref",
        "algorithm",
        "checkpoint",
        "critic",
        "custom_reward_function",
        "data",
        "engine",
        "global_profiler",
        "model",
        "optim",
        "profiler",
        "ray_kwargs",
        "reward_manager",
        "reward_model",
        "trainer",
        "transfer_queue",
    ),
    "verl",
)
"""The sections of verl's configs (checked with its release of January 2026), each with the program's name."""

_RANKS = "trainer.n_gpus_per_node=N and trainer.nnodes=M say how many processes share a batch; torchrun says it too"


def share_names(translation: Translation) -> None:
    """Set trackers, the run's name and its folder."""
    if trackers := [name for name in translation.texts("trainer.logger") if name != "console"]:
        translation.set("report_to", *trackers, of="trainer.logger")
    project, run = translation.text("trainer.project_name"), translation.text("trainer.experiment_name")
    if project is not None:
        translation.set("project_name", project, of="trainer.project_name")
    if run is not None:
        translation.set("run_name", run, of="trainer.experiment_name")
    if project is not None and run is not None and "output_dir" not in translation.values:
        translation.set("output_dir", f"checkpoints/{project}/{run}", of="trainer.project_name")


def set_adapters(translation: Translation, key: str) -> None:
    """Set low-rank adapters; rank 0 means none."""
    rank = translation.number(key, least=0)
    if rank:
        if "train_type" not in translation.values or translation.values["train_type"].text == "full":
            translation.set("train_type", "lora", of=key)
        translation.set("lora_rank", str(rank), of=key)


def set_warmup(translation: Translation, key: str) -> None:
    """Set the warm-up from a number of steps; a negative number leaves it to the key of the share."""
    steps = translation.number(key)
    if steps == 0:
        translation.set("warmup_ratio", "0", of=key)
    elif steps is not None and steps > 0:
        translation.refuse(key, "--warmup_ratio is the share of the steps in which the learning rate rises")


def set_schedule(translation: Translation, key: str) -> None:
    """Set the decay of the learning rate; verl's ``constant`` has a warm-up."""
    name = translation.text(key)
    if name in ("constant", "cosine"):
        translation.set("lr_scheduler_type", {"constant": "constant_with_warmup"}.get(name, name), of=key)
    elif name is not None:
        translation.refuse(key, "--lr_scheduler_type takes linear, cosine, constant and constant_with_warmup")


def every(translation: Translation, key: str, field: str, *, updates: int = 1) -> None:
    """Set a number of updates from a number of verl's steps; -1 leaves the field at its default: never."""
    steps = translation.number(key)
    if steps is None:
        return
    if steps < 1:
        translation.unset(field, of=key)
    else:
        translation.set(field, str(steps * updates), of=key)


def processes(translation: Translation, key: str) -> int:
    """Return how many processes share a batch.

    Raises:
        ConfigError: Neither the command nor the environment says it.
    """
    names = [name for name in ("nproc_per_node", "nnodes") if name in translation.values]
    count = launch.expected({name: translation.field(name, 1) for name in names})
    if count is None:
        raise ConfigError(
            f"{translation.shown(key)}, without a number of processes",
            expected="trainer.n_gpus_per_node, which verl divides a batch by",
            hint=_RANKS,
        )
    return count


def micro_batch(translation: Translation, key: str) -> None:
    """Set the micro-batch of a process from one that all processes share."""
    total = translation.number(key, least=1)
    if total is None:
        return
    if total % (ranks := processes(translation, key)):
        raise ConfigError(
            f"{translation.shown(key)} for {ranks} processes",
            expected=f"a multiple of {ranks}",
            hint=f"{key}_per_gpu counts the sequences of one process",
        )
    translation.set("per_device_train_batch_size", str(total // ranks), of=key)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``."""
    return next(value for value in range(min(number, most), 0, -1) if number % value == 0)


def next_divisible(number: int, factor: int, by: int) -> int:
    """Return the smallest value from ``number`` on whose product with ``factor`` is divisible."""
    step = by // math.gcd(by, factor)
    return -(-number // step) * step
