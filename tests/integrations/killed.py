"""Train a model while it is killed with SIGKILL at random instants, and resume each time.

    python -m tests.integrations.killed MODEL FOLDER --seed 20 [--recipe grpo] [--ranks 2] [--kills 10] [--steps 30]

Packages are imported once; each training is a fork of this process (with ``--ranks`` several, sharded by FSDP2), which
itself computes nothing. Two kinds of kills alternate. One comes after a random number of events of a rank's record: in
a forward, between backward and optimizer, between steps. The other comes at a random change of a file or folder inside
a checkpoint, by the rank that makes it: while one is written, before its seal, while an older one is removed. The files
on the disk are those that a real kill would leave; the other ranks are killed at once, like by torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.events import BUS
from ebbtide_recipes.grpo import trainer as _grpo  # noqa: F401 - before forks
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.grpo.recipe import RECIPE as GRPO
from ebbtide_recipes.language import adapters, models  # noqa: F401 - before forks
from ebbtide_recipes.sft import data, trainer  # noqa: F401 - before forks
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.recipe import RECIPE as SFT
from ebbtide_recipes.skeleton import checkpoints
from ebbtide_recipes.skeleton import run as skeleton
from tests.helpers.gloo import use_one_worker
from tests.integrations.ranks import fresh_world, grpo_config, sft_config

RECIPES: dict[type[Any], Any] = {SftConfig: SFT, GrpoConfig: GRPO}
"""The recipe that trains a config; ``video_killed.py`` adds its own."""

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
LIMIT_SECONDS = 900
"""A training that takes longer ends itself: nothing outlives the test."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The instant at which a training is killed.

    Attributes:
        rank: The rank whose events or changes are counted.
        events: Kill after this many events of its record; ``None``: see ``changes``.
        changes: Kill at this change inside a checkpoint.
    """

    rank: int
    events: int | None = None
    changes: int | None = None


def settings(model: str, folder: Path, given: argparse.Namespace, **changes: Any) -> Any:
    """Return the config of the named recipe."""
    if given.recipe == "grpo":
        # Three updates per rollout and a checkpoint every two steps: most are in the middle of a rollout.
        often = {"max_steps": given.steps, "num_iterations": 3, "beta": 0.04, "save_steps": 2, "save_total_limit": 1}
        often |= {"activation_cpu_offload": True, "save": True, "learning_rate": 1e-3}
        often["fsdp_strategy"] = "full_shard" if given.ranks > 1 else "none"
        return grpo_config(model, folder, **{**often, **changes})
    values: dict[str, Any] = {
        "dataset": ("builtin:pydoc#60",), "max_steps": given.steps, "save_steps": 2, "save_total_limit": 1,
        "activation_cpu_offload": True, "save": True, "fsdp_strategy": "full_shard" if given.ranks > 1 else "none",
    }  # fmt: skip
    return sft_config(model, folder, **{**values, **changes})


def at_change(number: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that kills this process at its n-th change inside a checkpoint."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wax+")
        if (writes or event in CHANGES) and "checkpoint-" in os.fsdecode(args[0] if args[0] is not None else ""):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def rank_main(config: Any, rank: int, ranks: int, kill: Kill | None, writing: int, meeting: Path) -> None:
    """Train as one rank, in a fork; never returns."""
    code = 1
    try:
        signal.alarm(LIMIT_SECONDS)
        world: Any = contextlib.nullcontext()
        if ranks > 1:
            use_one_worker()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
            torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
            world = fresh_world(sharded=True)
        if kill is None or kill.rank != rank or kill.events is None:
            os.close(writing)
        else:
            BUS.subscribe(lambda kind, fields: os.write(writing, b"."))
        if kill is not None and kill.rank == rank and kill.changes is not None:
            sys.addaudithook(at_change(kill.changes))
        with world:
            skeleton.main(RECIPES[type(config)], config)
        code = 0
    finally:
        os._exit(code)


def forked(config: Any, ranks: int, kill: Kill | None, meeting: Path) -> bool:
    """Train in forks; kill them all at ``kill``. Return whether they were killed."""
    reading, writing = os.pipe()
    children: list[int] = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.close(reading)
            rank_main(config, rank, ranks, kill, writing, meeting)
        children.append(child)
    os.close(writing)
    seen = 0
    while os.read(reading, 1):  # ends with the writing rank
        seen += 1
        if kill is not None and seen == kill.events:
            os.kill(children[kill.rank], signal.SIGKILL)
            break
    os.close(reading)
    first = kill.rank if kill is not None else 0
    ends = {first: os.waitstatus_to_exitcode(os.waitpid(children[first], 0)[1])}
    killed = kill is not None and ends[first] == -signal.SIGKILL
    for rank in set(range(ranks)) - {first}:
        if killed:
            os.kill(children[rank], signal.SIGKILL)
        ends[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
    meeting.unlink(missing_ok=True)
    if not killed and any(ends.values()):
        raise SystemExit(f"the ranks ended with {ends}")
    return killed


def losses(path: Path) -> dict[int, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    steps = [event for event in found if event["event"] == "step"]
    return {event["step"]: [event["loss"], event["reward"]] if "reward" in event else event["loss"] for event in steps}


def state(folder: Path) -> tuple[int, list[str]]:
    """Return the step of the last complete checkpoint, and the incomplete checkpoints."""
    whole = checkpoints.complete(folder)
    sealed = {one.folder for one in whole}
    half = [path.name for path in folder.glob("checkpoint-*") if path not in sealed]
    return (whole[-1].step if whole else 0), half


def run(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder, chance = Path(given.folder), random.Random(given.seed)
    meeting, record = folder / "meeting", folder / "killed" / "run.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    forked(settings(given.model, folder / "whole", given), given.ranks, None, meeting)
    config = settings(given.model, folder / "killed", given, resume_from_checkpoint="latest")
    told: list[dict[str, Any]] = []
    for number in range(given.kills + 1):
        rank = chance.randrange(given.ranks)
        # About 20 events per step and 16 changes per checkpoint (few by rank 1): the last step stays far away.
        changes = chance.randint(1, 6 if rank else 32)
        drawn = {"changes": changes} if number % 2 else {"events": chance.randint(1, 80)}
        kill = Kill(rank=rank, **drawn) if number < given.kills else None
        sealed, _ = state(folder / "killed")
        before = record.stat().st_mtime_ns if record.exists() else None
        killed = forked(config, given.ranks, kill, meeting)
        written = record.exists() and record.stat().st_mtime_ns != before
        told.append(
            {
                "kill": None if kill is None else asdict(kill),
                "killed": killed,
                "from": sealed,
                "half": state(folder / "killed")[1],
                "losses": losses(record) if written else {},
            }
        )
    return {"seed": given.seed, "whole": losses(folder / "whole" / "run.jsonl"), "runs": told}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--recipe", choices=["sft", "grpo"], default="sft")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    print(json.dumps(run(parser.parse_args())))
