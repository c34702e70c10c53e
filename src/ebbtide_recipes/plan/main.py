"""``ebbtide plan``: a model from its config, its simulated step, and the cost of every option."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import BudgetError, ConfigError, EbbtideError, first_line
from ebbtide.base.extras import check_installed
from ebbtide.base.files import check_replaceable, write_text
from ebbtide.base.units import format_size
from ebbtide.config import Options
from ebbtide_recipes.skeleton.logging import quiet_bitsandbytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ebbtide.planner.machines import Machine
    from ebbtide.planner.profile import Profile
    from ebbtide_recipes.plan.config import PlanConfig
    from ebbtide_recipes.plan.page import Result


@quiet_bitsandbytes()
def main(
    config: PlanConfig,
    report: Callable[[str], None] = lambda line: None,
    begin: Callable[[str], None] = lambda phase: None,
) -> Result:
    """Simulate the model's step once, and compare the options of training it.

    Args:
        config: What to train, and on what.
        report: Called with flags without effect.
        begin: Called with the name of each phase that may take seconds, when it begins.

    Raises:
        EbbtideError: The config, the model or the machine cannot be used, or the step cannot be simulated.
    """
    for name in config.without_effect():
        report(f"--{name} has no effect here: recipe is {config.recipe}, train_type {config.train_type}")
    packages = ("diffusers", "peft") if config.recipe == "video" else ("transformers", "peft")
    for package in packages:
        check_installed(package, extra="video" if config.recipe == "video" else "recipes", use="the plan recipe")
    machine = None if config.gpu is None else _machine(config, begin)  # a wrong name is refused before a model is read
    begin(f"reading the config of {config.name}")
    from ebbtide.report.style import BEGINNING
    from ebbtide_recipes.plan import model, video
    from ebbtide_recipes.plan.options import limits, options, plain_options
    from ebbtide_recipes.plan.page import Result
    from ebbtide_recipes.plan.picture import pareto

    if (path := config.out) is not None:
        hint = "such as --out plan.json"
        check_replaceable(Path(path).expanduser(), f"--out {path!r}", {"actions", "predicted"}, hint=hint)
    if (path := config.svg) is not None:
        check_replaceable(Path(path).expanduser(), f"--svg {path!r}", BEGINNING, hint="such as --svg plan.svg")
    subject_of: Any = video.VideoSubject if config.recipe == "video" else model.Subject
    subject = subject_of(config.as_recipe())
    machine = machine or _machine(config, begin)
    begin(f"making {config.name} without weights")
    outline = subject.outline(_dtype(config, machine))
    begin(f"simulating a step of {outline.amount} on {machine.name}")
    profile, too_small = _simulated(config, outline.module, subject.batch, machine)
    begin("comparing the options")
    if config.train_type == "qlora":
        from ebbtide_recipes.plan.four_bits import quantised

        profile = quantised(profile, outline.module, machine)
    if config.recipe == "video":  # the recipe offloads the transformer, without the loss around it
        blocks = (replace(block, name=block.name.removeprefix(video.PREFIX)) for block in profile.blocks)
        profile = replace(profile, blocks=tuple(blocks))
    room = limits(machine, config.gpus, budget_bytes=config.budget_bytes)
    found = plain_options(profile, room) if too_small else options(profile, room, config.max_slowdown)
    points = pareto(profile, found, planned=not too_small) if config.json or config.svg is not None else None
    return Result(
        config=config, outline=outline, machine=machine, profile=profile, room=room, options=found,
        pareto=points, too_small=too_small,
    )  # fmt: skip


def _machine(config: PlanConfig, begin: Callable[[str], None]) -> Machine:
    """Return the machine to plan for: the named one, or this one, measured."""
    from ebbtide.planner.machines import machine_named
    from ebbtide.profiling.hardware import measured_machine

    if config.gpu is None:
        begin("measuring this machine (--gpu names another)")
    machine = measured_machine() if config.gpu is None else machine_named(config.gpu, name="gpu")
    _check_machine(config, machine)
    return machine if config.host_bytes is None else replace(machine, host_memory_bytes=config.host_bytes)


def _simulated(
    config: PlanConfig, module: nn.Module, batch: Callable[[], dict[str, torch.Tensor]], machine: Machine
) -> tuple[Profile, bool]:
    """Return the step, and whether blocks save too little for ebbtide; it then has all that they save."""
    from ebbtide.profiling.simulated import Job, NothingSaved, simulate_model
    from ebbtide_recipes.plan.job import state_ratio

    try:
        state, micro_batches = state_ratio(config.optim, module), config.gradient_accumulation_steps
        job = Job(shards=config.gpus, optimizer_state=state, micro_batches=micro_batches, autocast=config.bf16)
        try:
            return simulate_model(module, batch(), machine, job=job), False
        except NothingSaved:
            return simulate_model(module, batch(), machine, job=job, options=Options(min_bytes=0)), True
    except NothingSaved as error:
        raise ConfigError(
            f"no block of {config.name} saved anything that the backward read",
            expected="a loss that depends on what the blocks train",
            hint=f"a longer {config.length_flag} or a larger --per_device_train_batch_size saves more",
        ) from error
    except EbbtideError:
        raise
    except Exception as error:
        raise ConfigError(
            f"a step of {config.name} cannot be simulated ({type(error).__name__}: {first_line(error):.200})",
            expected="a model of text, or of latents and text, whose code does not read values",
            hint=f"`ebbtide compare {config.recipe}` measures it with a few real steps",
        ) from error


def shown(result: Result) -> str:
    """Return the printed form of the result."""
    from ebbtide_recipes.plan import page

    return json.dumps(page.as_values(result), indent=1, allow_nan=False) if result.config.json else page.text(result)


def save(result: Result, path: str) -> str:
    """Save the plan of the recommended option, or of the best option of ebbtide.

    Args:
        result: As ``main`` returned it.
        path: The file.

    Returns:
        A description of the saved plan.

    Raises:
        BudgetError: No plan fits.
        DataError: The file cannot be written.
    """
    from ebbtide.planner import plan_for
    from ebbtide.planner.table import table_plan
    from ebbtide_recipes.plan.options import best

    option = best([option for option in result.options if option.solution is not None])
    if option is None or option.solution is None or option.policy is None:
        raise BudgetError(
            f"no plan was saved in {path!r}: none fits",
            expected=f"a plan with a peak of at most {format_size(result.room.aim_bytes)}",
            hint="shorter sequences, a smaller batch, --train_type lora or more --gpus take less memory",
        )
    table_plan(option.solution, plan_for(option.policy).name).save(Path(path).expanduser())
    return f'saved        {path}, the plan of {option.name}: policy="{path}" starts with it'


def draw(result: Result, path: str) -> str:
    """Draw slowdown over peak memory.

    Args:
        result: As ``main`` returned it, with the points.
        path: The file.

    Returns:
        A description of the picture.

    Raises:
        DataError: The file cannot be written.
    """
    from ebbtide_recipes.plan import picture

    points = result.pareto or picture.pareto(result.profile, result.options, planned=not result.too_small)
    drawn = picture.svg(points, f"{result.config.name}, {result.outline.amount}, {result.machine.name}")
    write_text(Path(path).expanduser(), drawn + "\n")
    return f"drawn    {path}: slowdown over peak memory"


def _is_cpu(machine: Machine) -> bool:
    """Whether a machine has no accelerator."""
    return machine.name == "cpu"


def _check_machine(config: PlanConfig, machine: Machine) -> None:
    """Reject options that this machine cannot run, or that have no meaning on it."""
    if _is_cpu(machine) and config.gpus > 1:
        raise ConfigError(
            f"gpus is {config.gpus} on a machine without an accelerator",
            expected="1, or a machine with devices",
            hint="name the device with --gpu, such as --gpu h200",
        )
    if machine.stores_on_disk and config.host_memory is not None:
        raise ConfigError(
            f"host_memory is set, and offloaded bytes of {machine.name} go to disk",
            expected="a machine that offloads to host memory",
            hint="leave --host_memory out, or name another device with --gpu",
        )
    if config.gpus > machine.devices and config.gpus % machine.devices:
        raise ConfigError(
            f"--gpus {config.gpus} is not a whole number of {machine.devices}-GPU {machine.name} nodes",
            expected=f"at most {machine.devices}, or a multiple of {machine.devices}",
            hint=f"such as --gpus {machine.devices * math.ceil(config.gpus / machine.devices)}",
        )
    if config.budget_bytes is not None and config.budget_bytes > machine.memory_bytes:
        raise ConfigError(
            f"memory_budget is {config.memory_budget}, and the device has {format_size(machine.memory_bytes)}",
            expected="a part of the device's memory",
            hint="leave it out to use nine tenths of the device",
        )


def _dtype(config: PlanConfig, machine: Machine) -> str:
    if config.torch_dtype != "auto":
        return config.torch_dtype
    mixed = config.bf16 and config.train_type == "full"
    return "float32" if _is_cpu(machine) or mixed else "bfloat16"
