"""The state of a rollout between steps, and restoring it after a killed run.

[Note: a rollout in a checkpoint]
TRL generates once for several micro-batches and updates, keeps the completions in memory, and counts micro-batches
until the next generation. transformers' checkpoints hold neither, so a run resumed in the middle of such a cycle would
generate from different weights and count from zero. Here every rank writes both next to the checkpoint's other files,
before the seal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(kw_only=True)
class Progress:
    """A trainer's progress in its rollout.

    Attributes:
        micro_batches: Done so far, over the whole run.
        sizes: What a rollout's batches and its place in the data depend on, by name.
        batches: The rollout's data, one entry per micro-batch; ``None``: the next micro-batch begins a rollout.
        reward: The rollout's mean reward.
        metrics: TRL's figures since the last log line.
    """

    micro_batches: int
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    batches: list[dict[str, Any]] | None = None
    reward: float | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)


def write(progress: Progress, folder: Path, rank: int) -> None:
    """Write a rank's progress into a checkpoint."""
    torch.save(vars(progress), _path(folder, rank))


def read(folder: Path, rank: int, device: torch.device) -> Progress | None:
    """Read a rank's progress from a checkpoint; ``None`` if it has none."""
    path = _path(folder, rank)
    return Progress(**torch.load(path, map_location=device, weights_only=True)) if path.is_file() else None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rollout_{rank}.pt"
