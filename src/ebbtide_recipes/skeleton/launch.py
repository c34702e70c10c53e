"""Decide on the number of processes, and start torchrun. No torch at import.

[Note: ranks]
A process with ``RANK`` in its environment was started by torchrun and trains. Otherwise it reads ``--nproc_per_node``,
``NPROC_PER_NODE``, ``NNODES`` and the visible devices; for more than one process, or for FSDP, it starts torchrun with
the same arguments and waits. Invalid input is rejected before that, once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError
from ebbtide.cli.children import family
from ebbtide.cli.starting import wait_for

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig

_NODES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that name the other nodes; torchrun has flags of the same names."""


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return environment.get("RANK", "").strip() != "" and environment.get("WORLD_SIZE", "").strip() != ""


def is_main(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process writes the run's files: the only one, or rank 0."""
    return not is_rank(environment) or environment["RANK"].strip() == "0"


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks."""
    return int(environment["WORLD_SIZE"]) if is_rank(environment) else 1


def processes(config: RecipeConfig, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes torchrun starts on this node; ``None``: this process trains alone.

    Args:
        config: As ``sharding.resolved`` returned it.
        environment: The process's environment.

    Raises:
        ConfigError: A number of processes is invalid, or there are too few devices.
    """
    import torch

    if is_rank(environment):
        _check_ranks({"nproc_per_node": config.nproc_per_node, "nnodes": config.nnodes}, environment)
        return None
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    wanted = config.nproc_per_node or _number("NPROC_PER_NODE", environment) or devices or 1
    if devices is not None and wanted > devices:
        raise ConfigError(
            f"{wanted} processes are requested on this node",
            expected=f"at most {devices}, one per visible device",
            hint=f"--nproc_per_node {devices}, or make more devices visible (CUDA_VISIBLE_DEVICES)",
        )
    nodes = _number("NNODES", environment) or 1
    _same("nnodes", config.nnodes, nodes)
    alone = wanted == 1 and nodes == 1 and config.fsdp_strategy == "none"
    return None if alone else wanted


def expected(flags: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the processes of the whole run, before devices are counted; ``None``: only their number decides.

    Args:
        flags: ``nproc_per_node`` and ``nnodes``, as far as they are set.
        environment: The process's environment.

    Raises:
        ConfigError: A number of processes in the environment is invalid, or another one than a flag's.
    """
    if is_rank(environment):
        _check_ranks(flags, environment)
        return world_size(environment)
    nodes = _number("NNODES", environment) or 1
    _same("nnodes", flags.get("nnodes"), nodes)
    here = flags.get("nproc_per_node") or _number("NPROC_PER_NODE", environment)
    return here * nodes if here else None


def total(config: RecipeConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Return the processes of the whole run, on all nodes.

    Raises:
        ConfigError: As ``processes``.
    """
    here = processes(config, environment)
    return world_size(environment) if is_rank(environment) else (here or 1) * (_number("NNODES", environment) or 1)


def _check_ranks(flags: Mapping[str, int | None], environment: Mapping[str, str]) -> None:
    """Reject flags that name another number of processes than the launcher started."""
    here = _number("LOCAL_WORLD_SIZE", environment)
    if here is None:
        return
    _same("nproc_per_node", flags.get("nproc_per_node"), here)
    _same("nnodes", flags.get("nnodes"), world_size(environment) // here)


def _same(name: str, wanted: int | None, found: int) -> None:
    """Reject a number that is not that of the running processes."""
    if wanted is None or wanted == found:
        return
    if name == "nnodes":
        what, hint = "nodes", f"torchrun --nnodes {wanted}, or NNODES, NODE_RANK and MASTER_ADDR on each node"
    else:
        what, hint = "processes on this node", f"torchrun --nproc_per_node {wanted}"
    raise ConfigError(
        f"{name} is {wanted}, and the number of {what} is {found}",
        expected="the same number",
        hint=f"{hint}; or leave {name} out",
    )


def check_device(config: RecipeConfig) -> None:
    """Reject FSDP on a machine without an accelerator, where accelerate would silently run DDP.

    A rank uses accelerate's own check; a process that is about to start ranks looks for a device.

    Raises:
        ConfigError: There is none.
    """
    import torch

    if config.fsdp_strategy == "none" or torch.accelerator.is_available():
        return
    if is_rank():
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        if PartialState(cpu=True).distributed_type not in (DistributedType.MULTI_CPU, DistributedType.NO):
            return
    raise ConfigError(
        f"fsdp_strategy is {config.fsdp_strategy!r} on a machine without an accelerator",
        expected="an accelerator per process: on CPUs accelerate runs DDP instead of FSDP",
        hint="--fsdp_strategy none, with --nproc_per_node for DDP on CPUs",
    )


def torchrun(verb: str, argv: Sequence[str], count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command that starts ``count`` ranks of a recipe.

    Args:
        verb: The recipe's name on the command line.
        argv: The arguments after it.
        count: Processes on this node.
        environment: Names the other nodes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
    others = {name: text for name in _NODES if (text := environment.get(name, "").strip())}
    for name, text in others.items():
        command += [f"--{name.lower()}", text]
    if not others.keys() & {"NNODES", "MASTER_PORT"}:
        command.append("--standalone")  # any free port, so that two runs on one machine do not collide
    return [*command, "-m", "ebbtide", verb, *argv]


def start(verb: str, argv: Sequence[str], count: int) -> int:
    """Run a recipe under torchrun and wait for it.

    Returns:
        0, or 1 if a rank failed; the ranks have printed why.

    Raises:
        KeyboardInterrupt: Interrupted; the ranks have already ended.
    """
    environment = dict(os.environ)
    # torchrun would set 1 with a long message.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # A separate session: interrupts reach the ranks only from here.
    with family(torchrun(verb, argv, count), env=environment) as child:
        return 1 if wait_for(child) else 0


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    """Return a number of the environment; ``None`` if it is not set."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"{name} is {text!r} in the environment", expected="1 or more", hint=f"unset {name}, or set a number"
        )
    return int(text)
