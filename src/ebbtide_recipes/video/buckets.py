"""Buckets: clips of equal length and shape, so that a batch is one tensor.

[Note: buckets] All buckets have about the area of ``--height`` times ``--width``. A clip goes to the bucket with the
nearest aspect ratio, with as many of its frames as make whole latents, at most ``--num_frames``. Every batch is from
one bucket; an incomplete last batch is filled with the bucket's first clips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from ebbtide_recipes.video.clips import Size

_PROPORTIONS = (16 / 9, 3 / 2, 4 / 3, 1.0, 3 / 4, 2 / 3, 9 / 16)


def bucket_for(clip: Size, largest: Size, *, ratios: tuple[int, int], patch: tuple[int, int]) -> Size | None:
    """Return the bucket of a clip; ``None`` if it has too few frames for one token. See [Note: buckets]."""
    in_time, multiple = ratios[0], ratios[1] * patch[1]
    usable = min(clip.frames, largest.frames)
    tokens = ((usable - 1) // in_time + 1) // patch[0] if usable else 0
    if not tokens:
        return None
    frames = (tokens * patch[0] - 1) * in_time + 1
    sizes = {(largest.height, largest.width)}
    area = largest.height * largest.width
    for proportion in _PROPORTIONS:
        width = max(multiple, round(math.sqrt(area * proportion) / multiple) * multiple)
        height = max(multiple, round(math.sqrt(area / proportion) / multiple) * multiple)
        sizes.add((height, width))
    wanted = math.log(clip.width / clip.height)
    height, width = min(sorted(sizes), key=lambda size: abs(math.log(size[1] / size[0]) - wanted))
    return Size(frames, height, width)


class BucketSampler(Sampler[int]):
    """Yields indices in an order that depends on the epoch; every ``batch`` of them in a row is from one bucket.

    Args:
        buckets: Each item's bucket.
        batch: Items of a batch.
        seed: Seed of the order; the same on all processes.
    """

    def __init__(self, buckets: Sequence[Size], *, batch: int, seed: int) -> None:
        self._batch, self._seed, self._epoch = batch, seed, 0
        self._members: dict[Size, list[int]] = {}
        for index, bucket in enumerate(buckets):
            self._members.setdefault(bucket, []).append(index)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(math.ceil(len(members) / self._batch) * self._batch for members in self._members.values())

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(self._seed + self._epoch)
        batches: list[list[int]] = []
        for _, members in sorted(self._members.items()):
            mixed = [members[place] for place in torch.randperm(len(members), generator=order).tolist()]
            missing = -len(mixed) % self._batch
            mixed += [mixed[place % len(mixed)] for place in range(missing)]
            batches += [mixed[begin : begin + self._batch] for begin in range(0, len(mixed), self._batch)]
        for place in torch.randperm(len(batches), generator=order).tolist():
            yield from batches[place]
