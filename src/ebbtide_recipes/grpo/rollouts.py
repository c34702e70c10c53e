"""The state of a rollout between steps, and restoring it after a killed run.

[Note: a rollout in a checkpoint]
TRL generates once for several micro-batches and updates, keeps the completions in memory, and counts micro-batches
until the next generation. transformers' checkpoints hold neither, so a run resumed in the middle of such a cycle would
generate from different weights and count from zero. Here every rank writes both next to the checkpoint's other files,
before the seal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler


@dataclass(kw_only=True)
class Progress:
    """A trainer's progress in its rollout.

    Attributes:
        micro_batches: Done so far, over the whole run.
        batches: The rollout's data, one entry a micro-batch; ``None``: the next micro-batch begins a rollout.
        reward: The rollout's mean reward.
        metrics: TRL's figures since the last log line.
    """

    micro_batches: int
    batches: list[dict[str, Any]] | None = None
    reward: float | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)


def write(progress: Progress, folder: Path, rank: int) -> None:
    """Write a rank's progress into a checkpoint."""
    torch.save(vars(progress), _path(folder, rank))


def read(folder: Path, rank: int, device: torch.device, *, same_ranks: bool) -> Progress | None:
    """Read a rank's progress from a checkpoint.

    Args:
        folder: The checkpoint.
        rank: Of this process.
        device: For its tensors.
        same_ranks: Whether the same number of ranks wrote it; if not, only the count is used.

    Returns:
        The progress; ``None`` if the checkpoint has none.
    """
    path = _path(folder, rank if same_ranks else 0)
    if not path.is_file():
        return None
    progress = Progress(**torch.load(path, map_location=device, weights_only=True))
    return progress if same_ranks else Progress(micro_batches=progress.micro_batches)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rollout_{rank}.pt"


class EpochSampler(RepeatSampler):
    """TRL's sampler, with an order that depends only on seed and epoch.

    TRL's continues one generator over the epochs, so a run resumed in a later epoch would repeat the first order. The
    order of the first epoch is TRL's.
    """

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.epoch)
        return super().__iter__()
