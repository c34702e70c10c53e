"""Clips with captions: folders, listings, and generated clips."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import DataError, nearest
from ebbtide_recipes.skeleton.rows import split_name
from ebbtide_recipes.video import clips, shapes
from ebbtide_recipes.video.clips import IMAGES, VIDEOS, Shape

BUILTIN = ("builtin:moving-shapes",)
LISTINGS = (".jsonl", ".json", ".csv")
PLACES = f"{', '.join(BUILTIN)}, a folder of videos or images, or a {', '.join(LISTINGS)} file that lists them"
VIDEO_COLUMNS = ("video", "path", "file_name", "video_path", "image")
CAPTION_COLUMNS = ("caption", "cap", "text", "prompt")
_LISTED = ("metadata.jsonl", "metadata.csv", "metadata.json", "videos2caption.json")


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
        """Tells it from any other clip, and from itself after a change."""
        if not isinstance(self.origin, Path):
            return repr(self.origin)
        files = sorted(self.origin.iterdir()) if self.origin.is_dir() else [self.origin]
        return repr([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files])

    def shape(self, *, most: int, rate: float | None) -> Shape | None:
        """Return its frames, counted up to ``most``, and size; ``None`` for a generated clip of any size."""
        if not isinstance(self.origin, Path):
            return None
        return clips.shape_of(self.origin, most=most, rate=rate)

    def pixels(self, *, frames: int, height: int, width: int, rate: float | None) -> torch.Tensor:
        """Return its first frames in a size, ``[3, F, H, W]`` from -1 to 1."""
        if isinstance(self.origin, Path):
            film = clips.read(self.origin, frames=frames, rate=rate)
        else:
            film = shapes.draw(self.origin, frames, height, width)
        return clips.fitted(film, height, width)


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
            part = (_folder(path) if path.is_dir() else _listing(path))[:limit]
        if not part:
            raise DataError(
                f"data set {name!r} has no clip",
                expected=f"videos ({', '.join(VIDEOS)}) or images, each with its caption",
                hint="put a caption into a .txt of the same name, or into metadata.jsonl with video and caption",
            )
        found += part
    return found


def checked(name: str) -> Path:
    """Raise if a data set is neither built in nor present; return its path.

    Raises:
        DataError: It is missing, or not a listing.
        ConfigError: The part after ``#`` is not a number.
    """
    place, _ = split_name(name, of="clips")
    path = Path(place).expanduser()
    if place.startswith("builtin:"):
        if place not in BUILTIN:
            hint = nearest(place, BUILTIN) or "a folder or a listing will do too"
            raise DataError(f"there is no data set {place!r}", expected=f"one of {', '.join(BUILTIN)}", hint=hint)
        return path
    if not path.exists():
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, others, count=1) or f"looked in {path.parent.resolve()}"
        raise DataError(f"data set {place!r} is not there", expected=PLACES, hint=hint)
    if path.is_file() and path.suffix.lower() not in LISTINGS:
        one = path.suffix.lower() in (*VIDEOS, *IMAGES)
        hint = "pass its folder, with its caption in a .txt of the same name" if one else f"give {PLACES}"
        raise DataError(f"data set {place!r} ends in {path.suffix!r}", expected=PLACES, hint=hint)
    return path


def _folder(folder: Path) -> list[Clip]:
    """Return the clips of a folder: of its listing, or videos, images and folders of frames with their .txt."""
    listing = next((folder / name for name in _LISTED if (folder / name).is_file()), None)
    if listing is not None:
        return _listing(listing)
    entries = sorted(folder.iterdir())
    paths = [path for path in entries if path.suffix.lower() in VIDEOS and path.is_file()]
    paths += [path for path in entries if path.is_dir() and any(p.suffix.lower() in IMAGES for p in path.iterdir())]
    paths += [path for path in entries if path.suffix.lower() in IMAGES and path.is_file()]
    return [Clip(origin=path, caption=_caption_file(path)) for path in paths]


def _caption_file(path: Path) -> str:
    """Return the contents of a clip's .txt, or of ``caption.txt`` inside a folder of frames."""
    caption = path.with_suffix(".txt") if path.is_file() else path.parent / f"{path.name}.txt"
    places = [caption, path / "caption.txt"] if path.is_dir() else [caption]
    for place in places:
        if place.is_file():
            caption = place.read_text(encoding="utf-8-sig").strip()
            if caption:
                return caption
    raise DataError(
        f"{path} has no caption",
        expected=f"{caption.name} in its folder, or a metadata.jsonl with video and caption in its folder",
        hint="one sentence that describes the clip",
    )


def _listing(path: Path) -> list[Clip]:
    """Return the clips that a .jsonl, .json or .csv file names."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8", expected="text in UTF-8", hint="check whether it is compressed"
        ) from error
    rows: Any
    try:
        if path.suffix.lower() == ".jsonl":
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        elif path.suffix.lower() == ".json":
            rows = json.loads(text)
        else:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (json.JSONDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="rows with video and caption", hint=_EXAMPLE
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a {type(rows).__name__}", expected="a list of rows", hint=_EXAMPLE)
    return [_row(row, f"row {number} of {path}", path.parent) for number, row in enumerate(rows, start=1)]


_EXAMPLE = 'such as {"video": "clips/cat.mp4", "caption": "a cat jumps on a table"}'


def _row(row: Any, where: str, folder: Path) -> Clip:
    """Return the clip that one row names."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {row!r:.60}", expected="an object with named columns", hint=_EXAMPLE)
    name = next((row[column] for column in VIDEO_COLUMNS if row.get(column)), None)
    if not isinstance(name, str):
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where} names no video; its columns: {columns}", expected="video", hint=_EXAMPLE)
    caption = next((row[column] for column in CAPTION_COLUMNS if row.get(column)), None)
    if isinstance(caption, list) and caption:  # FastVideo's videos2caption.json lists several
        caption = caption[0]
    if not isinstance(caption, str) or not caption.strip():
        raise DataError(f"{where} has no caption", expected="caption: a description of the clip", hint=_EXAMPLE)
    path = folder / Path(name).expanduser()
    if not path.exists():
        raise DataError(
            f"{where} names {name!r}, which is not there",
            expected="a video, an image or a folder of frames",
            hint=f"looked for {path}; relative paths start at the folder of the listing",
        )
    return Clip(origin=path, caption=caption.strip())
