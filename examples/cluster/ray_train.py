"""Ray Train starts the ranks, on one machine or many; each runs the recipe ``sft``.

``python examples/cluster/ray_train.py path/or/name rows.jsonl /shared/runs/ray --workers 16 --devices``
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def train(flags: dict[str, Any]) -> None:
    """Train as one of Ray's workers, which have torchrun's variables."""
    from ebbtide_recipes.sft.config import SftConfig
    from ebbtide_recipes.sft.recipe import main

    main(SftConfig(**flags))


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of ``ebbtide sft``; paths are absolute, because workers run in folders of their own."""
    return {
        "model": str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model,
        "dataset": (str(Path(arguments.rows).resolve()),),
        "fsdp_strategy": "full_shard" if arguments.devices else "none",
        "activation_cpu_offload": True,
        "max_length": arguments.max_length,
        "max_steps": arguments.max_steps,
        "packing": True,
        "save_steps": 100,
        "resume_from_checkpoint": "latest",
        "output_dir": str(Path(arguments.output_dir).resolve()),
    }


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("model")
    made.add_argument("rows", help="a data file that all nodes see")
    made.add_argument("output_dir", help="a folder that all nodes share")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--devices", action="store_true", help="a device for each worker, sharded by FSDP2; else CPUs")
    made.add_argument("--max_length", type=int, default=2048)
    made.add_argument("--max_steps", type=int, default=1000)
    return made


def run(arguments: argparse.Namespace) -> None:
    """Start the workers and wait for them."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config=flags_of(arguments),
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.devices),
        # A worker that fails ends all; Ray starts them again, and they resume from the last complete checkpoint.
        run_config=RunConfig(
            storage_path=f"{flags_of(arguments)['output_dir']}-ray", failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    run(parser().parse_args())
