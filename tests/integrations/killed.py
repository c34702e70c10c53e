"""Trains a model while it is killed with SIGKILL at random instants, ten times, and goes on each time.

Packages are imported once; each training is a fork of this process, which itself computes nothing. A training writes a
byte into a pipe at every event of its record, so that it can be killed at any of them: in a forward, between backward
and optimizer, while a checkpoint is written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.events import BUS
from ebbtide_recipes.sft import adapters, callback, checkpoints, data, models, trainer  # noqa: F401 - before forks
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.main import main

STEPS, KILLS = 30, 10


def settings(model: str, folder: Path, **changes: Any) -> SftConfig:
    values: dict[str, Any] = {
        "model": model, "dataset": ("builtin:pydoc#40",), "max_steps": STEPS, "max_length": 64, "packing": True,
        "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "save_total_limit": 1,
        "activation_cpu_offload": True, "output_dir": str(folder), "log_level": "warning",
    }  # fmt: skip
    return SftConfig(**{**values, **changes})


def forked(config: SftConfig, kill_after: int | None) -> bool:
    """Train in a fork; kill it after so many events. Returns whether it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        BUS.subscribe(lambda kind, fields: os.write(writing, b"."))
        code = 1
        try:
            main(config)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    seen = 0
    while os.read(reading, 1):
        seen += 1
        if seen == kill_after:
            os.kill(child, signal.SIGKILL)
            break
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"the training ended with {status}")
    return status == -signal.SIGKILL


def losses(path: Path) -> dict[int, float]:
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {event["step"]: event["loss"] for event in found if event["event"] == "step"}


def run(model: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance = random.Random(20)
    forked(settings(model, folder / "whole"), None)
    config = settings(model, folder / "killed", resume_from_checkpoint="latest")
    # About 20 events a step: up to four steps a run, so that ten runs do not come to the end.
    kills = sum(forked(config, chance.randint(1, 80)) for _ in range(KILLS))
    forked(config, None)
    parts = sorted((folder / "killed").glob("run*.jsonl"), key=lambda path: path.stat().st_mtime)
    return {
        "steps": STEPS,
        "kills": kills,
        "whole": losses(folder / "whole" / "run.jsonl"),
        "parts": [losses(path) for path in parts],
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]))))
