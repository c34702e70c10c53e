"""Images beside the text of rows, for vision-language models.

A row names its images in ``images`` (a list) or ``image``: paths, relative to the data set's file. ``<image>`` in a
user's message says where one stands; without it they stand before the first of the user's words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft.shapes import Row

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("images", "image")
TAG = "<image>"


def attach(row: Row, shaped: Row, folder: Path, where: str) -> Row:
    """Return a shaped row with its images.

    Args:
        row: The row as it was read.
        shaped: The same row in one of the shapes the trainer knows.
        folder: What relative paths are relative to.
        where: The row and its data set, for errors.

    Raises:
        DataError: An image is not there, or the row has more or fewer of them than ``<image>`` tags.
    """
    named = next((row[name] for name in COLUMNS if row.get(name)), [])
    listed: list[Any] = named if isinstance(named, list) else [named]
    images = [_path(image, folder, where) for image in listed]
    column = "messages" if "messages" in shaped else "prompt"
    messages = shaped.get(column)
    if not isinstance(messages, list):
        raise DataError(
            f"{where} has images with plain text",
            expected="messages, or question and answer, and a model with a chat template",
            hint="the chat template places images in the text",
        )
    return {**shaped, **_structured(shaped, column, len(images), where), "images": images}


def as_images(dataset: Dataset) -> Dataset:
    """Make a column of paths one of images, which are opened when a batch needs them."""
    from datasets import Image, List

    return dataset.cast_column("images", List(Image()))


def _path(image: Any, folder: Path, where: str) -> str:
    """Return the path of one image, as ms-swift's rows or datasets' own name it."""
    name = image.get("path") if isinstance(image, dict) else image
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has the image {image!r:.60}", expected="a path", hint='such as "images": ["cat.png"]')
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"{where} names the image {name!r}, which is not there",
            expected="a file",
            hint=f"looked for {path}; relative paths start at the folder of the data set's file",
        )
    return str(path)


def _structured(shaped: Row, column: str, count: int, where: str) -> Row:
    """Write messages as lists of parts, with a place for each image."""
    tags = sum(str(m.get("content")).count(TAG) for m in shaped[column])
    if tags not in (0, count):
        raise DataError(
            f"{where} has {count} images and {tags} {TAG} tags",
            expected="one tag an image, or none",
            hint="without tags the images come before the user's first words",
        )
    left = 0 if tags else count
    written: dict[str, list[Row]] = {}
    for name in (column, *(["completion"] if "completion" in shaped else [])):
        written[name] = []
        for message in shaped[name]:
            parts = _parts(message["content"])
            if message["role"] == "user" and left:
                parts, left = [_part("image")] * left + parts, 0
            written[name].append({**message, "content": parts})
    return written


def _parts(content: Any) -> list[Row]:
    """Return a message's content as parts: text, and places for images."""
    if isinstance(content, list):
        return content
    pieces = [piece for piece in re.split(f"({re.escape(TAG)})", str(content)) if piece]
    return [_part("image") if piece == TAG else _part("text", piece) for piece in pieces]


def _part(kind: str, text: str | None = None) -> Row:
    # Both keys in every part: rows become a table, whose cells have the same fields throughout.
    return {"type": kind, "text": text}
