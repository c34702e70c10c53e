"""Listings of clips and their captions. No torch here: the first rows are read before it is imported."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ebbtide.base.errors import DataError, nearest
from ebbtide_recipes.skeleton.rows import check_builtin, read_file, read_in_advance, reading, split_name

VIDEOS = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v", ".gif")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
BUILTIN = ("builtin:moving-shapes",)
LISTINGS = (".jsonl", ".json", ".csv")
PLACES = f"{', '.join(BUILTIN)}, a folder of videos or images, or a {', '.join(LISTINGS)} file that lists them"
VIDEO_COLUMNS = ("video", "path", "file_name", "video_path", "image")
CAPTION_COLUMNS = ("caption", "cap", "text", "prompt")
_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.json", "videos2caption.json")
"""Listings that a folder of clips may hold."""


def check(names: Iterable[str]) -> None:
    """Refuse data sets that do not exist, and listings whose first rows cannot be used.

    Args:
        names: Built-in names, folders or listings, each with an optional ``#N``.

    Raises:
        DataError: A data set is missing, or the first rows of its listing name no clip or no caption.
        ConfigError: The part after ``#`` is not a number.
    """
    for name in names:
        path = checked(name)
        listing = inside(path) if path.is_dir() else path
        if listing is None or not listing.is_file():
            continue
        count = read_in_advance(listing, split_name(name, of="clips")[1])
        if count and not read(listing, limit=count):
            raise no_clip(name)


def checked(name: str) -> Path:
    """Raise if a data set is neither built in nor present; return its path.

    Raises:
        DataError: It is missing, or not a listing.
        ConfigError: The part after ``#`` is not a number.
    """
    place, _ = split_name(name, of="clips")
    path = Path(place).expanduser()
    if place.startswith("builtin:"):
        check_builtin("data set", place, BUILTIN, "a folder or a listing will do too")
        return path
    if not path.exists():
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, others, count=1) or f"looked in {path.parent.resolve()}"
        raise DataError(f"data set {place!r} does not exist", expected=PLACES, hint=hint)
    if path.is_file() and path.suffix.lower() not in LISTINGS:
        one = path.suffix.lower() in (*VIDEOS, *IMAGES)
        hint = "pass its folder, with its caption in a .txt of the same name" if one else f"pass {PLACES}"
        raise DataError(f"data set {place!r} ends in {path.suffix!r}", expected=PLACES, hint=hint)
    return path


def no_clip(name: str) -> DataError:
    """Return the error of a data set without a clip."""
    folder = Path(split_name(name, of="clips")[0]).expanduser()
    inner = folders_of_videos(folder) if folder.is_dir() else []
    return DataError(
        f"data set {name!r} has no clip",
        expected=f"videos ({', '.join(VIDEOS)}) or images, each with its caption",
        hint=f"folders inside it are not searched: --dataset {' '.join(map(str, inner[:3]))}"
        if inner
        else "put a caption into a .txt of the same name, or into metadata.jsonl with video and caption",
    )


def folders_of_videos(folder: Path) -> list[Path]:
    """Return the folders in a folder that hold videos: they are no clips, so that nothing in them is read."""
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path for path in inner if any(part.suffix.lower() in VIDEOS for part in path.iterdir())]


def inside(folder: Path) -> Path | None:
    """Return the listing of a folder of clips; ``None``: it has none."""
    return next((folder / name for name in _NAMES if (folder / name).is_file()), None)


def read(path: Path, limit: int | None = None) -> list[tuple[Path, str]]:
    """Return the clips that a .jsonl, .json or .csv file names, each with its caption.

    Args:
        path: The file.
        limit: Number of first rows; ``None``: all of them.

    Raises:
        DataError: It cannot be read, or a row names no clip that exists, or no caption.
    """
    rows = _table(path, limit) if path.suffix.lower() == ".csv" else read_file(path, limit, _EXAMPLE)
    return [_clip(row, f"row {number} of {path}", path.parent) for number, row in enumerate(rows, start=1)]


def _table(path: Path, limit: int | None) -> list[dict[str, str]]:
    try:
        with reading(path), path.open(encoding="utf-8-sig") as file:
            return list(islice(csv.DictReader(file), limit))
    except csv.Error as error:
        expected = "rows with video and caption"
        raise DataError(f"{path} cannot be read: {error}", expected=expected, hint=f"such as {_EXAMPLE}") from error


_EXAMPLE = '{"video": "clips/cat.mp4", "caption": "a cat jumps on a table"}'


def _clip(row: Mapping[str, Any], where: str, folder: Path) -> tuple[Path, str]:
    """Return the clip that one row names, and its caption."""
    hint = f"such as {_EXAMPLE}"
    name = next((row[column] for column in VIDEO_COLUMNS if row.get(column)), None)
    if not isinstance(name, str):
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where} names no video; its columns: {columns}", expected="video", hint=hint)
    caption = next((row[column] for column in CAPTION_COLUMNS if row.get(column)), None)
    if isinstance(caption, list) and caption:  # FastVideo's videos2caption.json lists several
        caption = caption[0]
    if not isinstance(caption, str) or not caption.strip():
        raise DataError(f"{where} has no caption", expected="caption: a description of the clip", hint=hint)
    path = folder / Path(name).expanduser()
    if not path.exists():
        raise DataError(
            f"{where} names {name!r}, which does not exist",
            expected="a video, an image or a folder of frames",
            hint=f"looked for {path}; relative paths start at the folder of the listing",
        )
    return path, caption.strip()
