"""The output of ``ebbtide plan``: text for people, and values for programs."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.base.extras import installed
from ebbtide.base.units import format_size
from ebbtide.config import MIN_BYTES, Auto, Keep, Minimal, Offload, Policy
from ebbtide.planner.machines import Machine
from ebbtide.planner.profile import Profile
from ebbtide.planner.table import table_plan
from ebbtide.report.table import ABSENT, Table
from ebbtide.report.text import grid
from ebbtide_recipes.plan.config import PlanConfig
from ebbtide_recipes.plan.model import Outline
from ebbtide_recipes.plan.options import ROOM, Limits, Option, best
from ebbtide_recipes.plan.picture import Pareto

GIB = 1024**3

SCHEMA = 3
"""Schema of the values that ``--json`` prints. Schema 2 had no ``job`` and no ``pareto``, and the same others."""

_ALWAYS = ("model", "max_length", "torch_dtype")
"""Flags that a command names whatever their value."""

LEFT_OUT = (
    "fragmentation of device memory",
    "device memory of libraries",
    "communication between ranks",
    "the host's time for each operator",
    "waiting for data",
)
"""What a prediction leaves out."""

_FLAGS = {
    "sft": (
        "model", "train_type", "lora_rank", "target_modules", "freeze_vit", "per_device_train_batch_size",
        "gradient_accumulation_steps", "max_length", "torch_dtype", "bf16", "attn_impl",
    ),
    "video": (
        "model", "train_type", "lora_rank", "target_modules", "per_device_train_batch_size",
        "gradient_accumulation_steps", "num_frames", "height", "width", "text_length", "torch_dtype", "bf16",
    ),
}  # fmt: skip
"""Flags that plan and each recipe share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result.

    Attributes:
        config: The request.
        outline: The model.
        machine: The machine to train on.
        profile: The simulated step.
        room: The memory to fit into.
        options: The cost of each option.
        pareto: The points of the picture; None: not requested.
        too_small: Whether blocks save nothing that is large enough for ebbtide.
    """

    config: PlanConfig
    outline: Outline
    machine: Machine
    profile: Profile
    room: Limits
    options: Sequence[Option]
    pareto: Pareto | None = None
    too_small: bool = False

    @property
    def recommended(self) -> Option | None:
        """The recommended option; None: none fits."""
        return best(self.options)


def text(result: Result) -> str:
    """Write the page for people."""
    lines = [f"model        {_model(result)}", f"machine      {_machine(result)}", ""]
    lines += [*grid(_table(result)), ""]
    lines += [f"{option.name}: {option.problem}" for option in result.options if option.problem]
    lines += [*_take(result), "", "predicted, not measured: the step was simulated. Left out: " + LEFT_OUT[0] + ","]
    lines += [", ".join(LEFT_OUT[1:]) + "."]
    return "\n".join(lines + _notes(result))


def as_values(result: Result) -> dict[str, Any]:
    """Return the result as JSON values; None: unknown."""
    chosen, outline, room = result.recommended, result.outline, result.room
    return {
        "schema": SCHEMA,
        "ebbtide": installed("ebbtide"),
        "predicted": True,
        "model": {
            "name": result.config.name,
            "weights": outline.weights,
            "trained": outline.trained,
            "dtype": outline.dtype,
            "blocks": len(result.profile.blocks),
            "tokens": result.outline.tokens,
        },
        "job": {
            "train_type": result.config.train_type,
            "optim": result.config.optim,
            "bf16": result.config.bf16,
            "gradient_accumulation_steps": result.config.gradient_accumulation_steps,
        },
        "machine": dataclasses.asdict(result.machine),
        "gpus": result.config.gpus,
        "ranks_on_a_node": room.ranks,
        "aim_bytes": room.aim_bytes,
        "host_bytes": room.host_bytes,
        "plain_step_seconds": result.profile.step_seconds,
        "options": [_option_values(result, option) for option in result.options],
        "recommended": None if chosen is None else chosen.name,
        "pareto": None if result.pareto is None else dataclasses.asdict(result.pareto),
        "left_out": list(LEFT_OUT),
        "notes": _notes(result),
    }


def _option_values(result: Result, option: Option) -> dict[str, Any]:
    known = option.peak_bytes is not None
    solution = option.solution
    return {
        "name": option.name,
        "peak_bytes": option.peak_bytes,
        "fits": option.fits,
        "step_ratio": option.step_ratio,
        "offloaded_bytes_a_rank": option.offloaded_bytes if known else None,
        "offloaded_bytes_a_node": option.offloaded_bytes * result.room.ranks if known else None,
        "fits_host": option.fits_host if known and result.room.host_bytes is not None else None,
        "plan": solution and dataclasses.asdict(table_plan(solution, option.name).predicted),
        "problem": option.problem or None,
        "command": command(result, option) if known else None,
    }


def command(result: Result, option: Option) -> str:
    """Return the command line that trains with this option."""
    config = result.config
    words = ["ebbtide", config.recipe]
    flags: list[tuple[str, str]] = []
    for name in _FLAGS[config.recipe]:
        value = {"torch_dtype": result.outline.dtype, "model": _trained(config)}.get(name, getattr(config, name))
        if name in _ALWAYS or (value != getattr(PlanConfig, name) and name not in config.without_effect()):
            flags.append(
                (name, " ".join(value) if isinstance(value, tuple) else "true" if value is True else str(value))
            )
    if config.gpus > 1:
        nodes = math.ceil(config.gpus / result.machine.devices)
        if nodes > 1:
            words = ["torchrun", "--nnodes", str(nodes), "--nproc_per_node", str(result.room.ranks)]
            # For the user to fill in.
            words += ["--node_rank", "RANK", "--master_addr", "FIRST", "-m", "ebbtide", config.recipe]
        else:
            flags.append(("nproc_per_node", str(config.gpus)))
        flags.append(("fsdp_strategy", "full_shard"))
    flags += _mode_flags(option, config.memory_budget)
    for name, value in flags:
        words += [f"--{name}", *(value.split() if name == "target_modules" else [shlex.quote(value)])]
    return " ".join(words)


def _trained(config: PlanConfig) -> str:
    """Return the model as training names it: a config alone predicts, and its folder or pipeline trains."""
    path = Path(config.name)
    path = path.parent if path.suffix == ".json" else path
    if config.recipe == "video" and path.name == "transformer" and (path / "config.json").expanduser().is_file():
        path = path.parent
    return config.name if path == Path(config.name) else str(path)


def _mode_flags(option: Option, written: str | None) -> list[tuple[str, str]]:
    on = ("activation_cpu_offload", "true")
    match option.policy:
        case None:
            return [("gradient_checkpointing", "true")]
        case Minimal():
            return [on, ("gradient_checkpointing", "true")]
        case Offload():
            return [on, ("policy", "offload")]
        case Auto(budget_bytes=None, max_slowdown=slowdown):
            return [on, ("max_slowdown", f"{slowdown:g}")]
        case Auto(budget_bytes=int(budget)):
            return [on, ("memory_budget", written or _size(budget))]
        case _:
            return []


def _in_python(policy: Policy, written: str | None) -> str:
    match policy:
        case Auto(budget_bytes=None, max_slowdown=slowdown):
            code = f"ebbtide.Auto(max_slowdown={slowdown:g})"
        case Auto(budget_bytes=int(budget)):
            code = f'ebbtide.Auto(memory_budget="{written or _size(budget)}")'
        case _:
            code = f"ebbtide.{type(policy).__name__}()"
    return f"ebbtide.enable_activation_offloading(model, policy={code})"


def _size(nbytes: int) -> str:
    """Format a size for a flag: in MiB, rounded down, so that it never exceeds the request."""
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 24 else str(nbytes)


def _model(result: Result) -> str:
    outline, config = result.outline, result.config
    trained = "all trained" if outline.trained == outline.weights else f"{_count(outline.trained)} of them trained"
    experts = f", {outline.experts} experts" if outline.experts else ""
    return (
        f"{config.name}: {_count(outline.weights)} weights ({outline.dtype}; {trained}), {outline.blocks}{experts}; "
        f"{outline.amount} per device"
    )


def _machine(result: Result) -> str:
    machine, room = result.machine, result.room
    if room.host_bytes is None:
        which = result.config.gpu or "this one"
        return f"{which}: {format_size(machine.memory_bytes)}; offloaded bytes go to disk"
    lines = f"{machine.name}: {format_size(machine.memory_bytes)} per device"
    lines += f", {format_size(room.host_bytes)} of host memory per node for offloaded bytes"
    gpus = result.config.gpus
    return lines + (f"; FSDP over {gpus} devices, {room.ranks} per node" if gpus > 1 else "; 1 device")


def _table(result: Result) -> Table:
    room = result.room
    place = "disk" if room.host_bytes is None else "host"
    columns = ["option", "peak", f"fits {format_size(room.aim_bytes)}", "step / plain", f"{place} per rank"]
    columns += ["per node", "fits"] if room.host_bytes is not None else []
    rows: list[tuple[str, ...]] = []
    for option in result.options:
        if option.peak_bytes is None or option.step_ratio is None:
            rows.append((option.name, *[ABSENT] * (len(columns) - 1)))
            continue
        digits = 2 if GIB <= option.peak_bytes < 10 * GIB else 1
        cells = [option.name, format_size(option.peak_bytes, digits=digits), option.fits, f"×{option.step_ratio:.2f}"]
        moved = option.offloaded_bytes
        cells.append(format_size(moved) if moved else ABSENT)
        if room.host_bytes is not None:
            cells += (
                [format_size(moved * room.ranks), "yes" if option.fits_host else "no"] if moved else [ABSENT, ABSENT]
            )
        rows.append(tuple(cells))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _take(result: Result) -> list[str]:
    option = result.recommended
    if option is None:
        least = min((w for w in result.options if w.peak_bytes is not None), key=lambda w: w.peak_bytes or 0)
        line = f"recommended  nothing, because no option fits; the lowest peak is {format_size(least.peak_bytes or 0)}"
        problems = any(w.problem for w in result.options)
        shorter = "fewer frames" if result.config.recipe == "video" else "shorter sequences"
        what = f"{shorter}, a smaller batch, --train_type lora or more --gpus take less memory"
        return [f"{line} ({least.name})"] if problems else [f"{line} ({least.name})", f"hint: {what}"]
    lines = [f"recommended  {option.name}"]
    if option.fits == "barely":
        lines[0] += f", which barely fits: above {ROOM:.0%} of the device's memory, and the prediction is incomplete"
    if isinstance(option.policy, Keep):
        lines[0] += ": all saved tensors fit, and nothing needs to be offloaded"
    lines.append(f"             {command(result, option)} --dataset YOURS")
    if option.policy is not None and not isinstance(option.policy, Keep):
        lines.append(f"             {_in_python(option.policy, result.config.memory_budget)}")
    return lines


def _notes(result: Result) -> list[str]:
    """Return the simplifications for this model and machine."""
    lines: list[str] = []
    if result.too_small:
        lines.append(
            f"Each tensor that blocks save is smaller than {format_size(MIN_BYTES)}, and ebbtide leaves those on the "
            f"device: it needs a longer {result.config.length_flag} or a larger --per_device_train_batch_size."
        )
    if result.outline.sees:
        lines.append("The batch is text only: images, in the vision part and as tokens, need more.")
    if result.outline.experts:
        lines.append("Experts are assumed to get equally many tokens; an expert that gets more takes longer.")
    if result.config.optim != "adamw":
        lines.append(f"The recipes train with AdamW: --optim {result.config.optim} is for your own loop.")
    if result.config.gradient_accumulation_steps > 1:
        lines.append("A step is one micro-batch with its share of the optimizer's time.")
        if result.config.gpus > 1:
            lines.append(
                "FSDP holds the gradients of all weights on each rank until the last micro-batch reduces them."
            )
    if result.config.recipe == "sft":
        lines.append(
            "The head is counted with all its logits; `sft` computes them in tiles where TRL can, which takes less."
        )
    if result.config.bf16 and result.config.gpus > 1:
        lines.append("A bfloat16 copy of all weights is counted on each rank; FSDP makes it of one block at a time.")
    if result.room.host_bytes is None:
        lines.append("Python and its libraries need up to a GiB more.")
    elif result.config.gpu is not None and not result.config.gpu.endswith(".json"):
        lines.append("Rates of the device are published ones, times what a step on an H200 reached of them.")
    return lines


def _count(number: int) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * size:  # three digits round up to 1
            return f"{number / size:.3g} {word}"
    return str(number)
