"""``builtin:moving-shapes``: clips drawn from a seed, each with the caption that describes it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

COLORS = {
    "red": (220, 50, 47),
    "green": (60, 180, 75),
    "blue": (38, 110, 220),
    "yellow": (240, 200, 40),
    "white": (235, 235, 235),
}
GROUNDS = {"black": (12, 12, 16), "grey": (110, 110, 115), "navy": (16, 24, 70)}
SHAPES = ("circle", "square", "triangle")
WAYS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
COUNT = 32
"""Clips in the data set."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One clip: the moving shape, its background and its direction."""

    shape: str
    color: str
    ground: str
    way: str

    @property
    def caption(self) -> str:
        """The sentence that describes the clip."""
        return f"a {self.color} {self.shape} moving {self.way} on a {self.ground} background"


def clips(seed: int, count: int = COUNT) -> list[Drawn]:
    """Return the data set's first ``count`` clips, which do not depend on the count."""
    choose = random.Random(seed)
    fields = {"shape": list(SHAPES), "color": list(COLORS), "ground": list(GROUNDS), "way": list(WAYS)}
    return [Drawn(**{name: choose.choice(values) for name, values in fields.items()}) for _ in range(count)]


def draw(clip: Drawn, frames: int, height: int, width: int) -> torch.Tensor:
    """Return the clip's frames, ``[F, H, W, 3]`` of bytes."""
    ys = (torch.arange(height) + 0.5)[:, None] / height * 2 - 1
    xs = (torch.arange(width) + 0.5)[None, :] / width * 2 - 1
    ground = torch.tensor(GROUNDS[clip.ground], dtype=torch.float32)
    color = torch.tensor(COLORS[clip.color], dtype=torch.float32)
    film: list[torch.Tensor] = []
    for number in range(frames):
        along = -0.5 + number / max(1, frames - 1)
        step_x, step_y = WAYS[clip.way]
        distance = _distance(clip.shape, xs - step_x * along, ys - step_y * along)
        inside = (0.5 - distance * min(height, width) / 2).clamp(0, 1)[..., None]  # antialiased over one pixel
        film.append((ground + (color - ground) * inside).round().to(torch.uint8))
    return torch.stack(film)


def _distance(shape: str, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """Return each pixel's signed distance from the shape's edge; negative inside."""
    if shape == "circle":
        return (xs**2 + ys**2).sqrt() - 0.42
    if shape == "square":
        return torch.maximum(xs.abs(), ys.abs()) - 0.38
    slope = math.sqrt(3) / 2
    return torch.maximum(ys, slope * xs.abs() - 0.5 * ys) - 0.26
