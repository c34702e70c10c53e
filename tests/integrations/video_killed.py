"""Train a video transformer while it is killed with SIGKILL at random instants; see ``killed.py``.

python -m tests.integrations.video_killed builtin:tiny-wan FOLDER --seed 20 [--kills 10] [--steps 30]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401 - before forks

from ebbtide_recipes.video import trainer  # noqa: F401 - before forks
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.recipe import RECIPE
from tests.integrations import killed


def settings(model: str, folder: Path, given: argparse.Namespace, **changes: Any) -> VideoConfig:
    values: dict[str, Any] = {
        "model": model, "dataset": ("builtin:moving-shapes#4",), "height": 16, "width": 16, "num_frames": 5,
        "max_steps": given.steps, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "save_total_limit": 1,
        "ema_decay": 0.9, "samples": 0, "activation_cpu_offload": True, "output_dir": str(folder),
    }  # fmt: skip
    return VideoConfig(**{**values, **changes})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    parser.set_defaults(ranks=1)
    killed.settings = settings  # type: ignore[assignment]
    killed.RECIPES[VideoConfig] = RECIPE
    print(json.dumps(killed.run(parser.parse_args())))
