"""The code of the ranks in the video recipe's distributed tests."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

from tests.integrations.ranks import _digests, fresh_world


def video_case(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train with the recipe; return losses, the module's wrapper, digests of weights and of the optimizer's state."""
    from ebbtide.wrap.strategy import found_strategy
    from ebbtide_recipes.skeleton import run
    from ebbtide_recipes.video.config import VideoConfig
    from ebbtide_recipes.video.recipe import RECIPE

    values: dict[str, Any] = {
        "dataset": ("builtin:moving-shapes#6",),
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "samples": 0,
        "save": False,
        "output_dir": folder,
        **changes,
    }
    sharded = values.get("fsdp_strategy", "none") != "none" or (values.get("hsdp_shard_dim") or 1) > 1
    nodes = values.pop("ranks_a_node", None)
    with warnings.catch_warnings(), fresh_world(sharded=sharded, ranks_a_node=nodes):
        warnings.simplefilter("ignore")
        config = run.check(RECIPE, VideoConfig(**values))
        trainer = run.carry_out(RECIPE, config, run.claim(config, contextlib.ExitStack()))
        assert trainer is not None
        wrapped = found_strategy(trainer.model_wrapped)
        state = _digests(trainer)
    trained = {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}
    told: dict[str, Any] = {"wrapped": wrapped, "state": state, "trained": trained}
    if os.environ["RANK"] == "0":
        lines = Path(folder, "run.jsonl").read_text().splitlines()
        steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
        told["losses"] = {event["step"]: event["loss"] for event in steps}
    return told


def apart_case(folder: str, latents: list[str | None], prompts: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Train with an output folder for each rank, as nodes that share none; return the error, and new latents.

    Args:
        folder: Holds the output folders.
        latents: The ``--latents_dir`` of each rank.
        prompts: Captions to sample.
    """
    from ebbtide.base.errors import DataError

    rank = int(os.environ["RANK"])
    output = Path(folder, f"out-{rank}")
    changes: dict[str, Any] = {} if latents[rank] is None else {"latents_dir": latents[rank]}
    if prompts:
        changes |= {"samples": 1, "sample_prompts": prompts, "sampler_steps": 1}
    error, local = "", os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        video_case(str(output), {**changes, "max_steps": 1, "ranks_a_node": 1})
    except DataError as refused:
        error = str(refused)
    finally:
        os.environ["LOCAL_RANK"] = local
    return error, sorted(path.name for path in Path(folder).glob("*/**/clip-*"))
