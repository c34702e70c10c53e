"""Clips with captions: folders, listings, and generated clips."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ebbtide.base.errors import DataError
from ebbtide_recipes.skeleton.rows import reading, split_name
from ebbtide_recipes.video import clips, listings, shapes
from ebbtide_recipes.video.clips import Size
from ebbtide_recipes.video.listings import BUILTIN, IMAGES, VIDEOS, checked, no_clip

LOGGER = logging.getLogger("ebbtide.video")


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One clip of the data.

    Attributes:
        caption: Its caption.
        origin: A video, an image or a folder of frames; or the description of a generated clip.
    """

    caption: str
    origin: Path | shapes.Drawn

    @property
    def name(self) -> str:
        """Its name in errors and manifests."""
        return str(self.origin) if isinstance(self.origin, Path) else self.origin.caption

    @property
    def identity(self) -> str:
        """Distinguishes it from any other clip, and from itself after a change."""
        if not isinstance(self.origin, Path):
            return repr(self.origin)
        files = sorted(self.origin.iterdir()) if self.origin.is_dir() else [self.origin]
        return repr([(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files])

    def size(self, *, most: int, rate: float | None) -> Size | None:
        """Return its size, with frames counted up to ``most``; ``None`` for a generated clip of any size."""
        return clips.size_of(self.origin, most=most, rate=rate) if isinstance(self.origin, Path) else None

    def pixels(self, size: Size, *, rate: float | None) -> torch.Tensor:
        """Return its first frames in a size, ``[3, F, H, W]`` from -1 to 1."""
        if isinstance(self.origin, Path):
            film = clips.read(self.origin, frames=size.frames, rate=rate)
        else:
            film = shapes.draw(self.origin, size.frames, size.height, size.width)
        return clips.fitted(film, size.height, size.width)


def load(names: Sequence[str], *, seed: int) -> list[Clip]:
    """Return the clips of data sets, concatenated.

    Args:
        names: Built-in names, folders or listings, each with an optional ``#N`` for its first N clips.
        seed: Seed of the generated clips.

    Raises:
        DataError: A data set is missing or empty, lists a missing file, or lacks a caption.
        ConfigError: The part after ``#`` is not a number.
    """
    found: list[Clip] = []
    for name in names:
        place, limit = split_name(name, of="clips")
        if place in BUILTIN:
            part = [Clip(caption=one.caption, origin=one) for one in shapes.clips(seed, limit or shapes.COUNT)]
        else:
            path = checked(name)
            part = (_folder(path) if path.is_dir() else _listed(path))[:limit]
        if not part:
            raise no_clip(name)
        found += part
    return found


def _listed(listing: Path) -> list[Clip]:
    return [Clip(origin=path, caption=caption) for path, caption in listings.read(listing)]


def _folder(folder: Path) -> list[Clip]:
    """Return the clips of a folder: of its listing, or videos, images and folders of frames with their .txt."""
    listing = listings.inside(folder)
    if listing is not None:
        return _listed(listing)
    entries = sorted(folder.iterdir())
    paths = [path for path in entries if path.suffix.lower() in VIDEOS and path.is_file()]
    paths += [path for path in entries if path.is_dir() and any(p.suffix.lower() in IMAGES for p in path.iterdir())]
    paths += [path for path in entries if path.suffix.lower() in IMAGES and path.is_file()]
    unread = [path.name for path in listings.folders_of_videos(folder) if path not in paths] if paths else []
    if unread:
        LOGGER.warning(
            "%s: folders of videos inside it are not read (%s); hint: --dataset takes several folders",
            *(folder, ", ".join(unread[:3])),
        )
    return [Clip(origin=path, caption=_caption_file(path)) for path in paths]


def _caption_file(path: Path) -> str:
    """Return the contents of a clip's .txt, or of ``caption.txt`` inside a folder of frames."""
    file = path.with_suffix(".txt") if path.is_file() else path.parent / f"{path.name}.txt"
    for place in [file, path / "caption.txt"] if path.is_dir() else [file]:
        if place.is_file():
            with reading(place):
                caption = place.read_text(encoding="utf-8-sig").strip()
            if caption:
                return caption
    raise DataError(
        f"{path} has no caption",
        expected=f"{file.name} in its folder, or a metadata.jsonl with video and caption in its folder",
        hint="one sentence that describes the clip",
    )
