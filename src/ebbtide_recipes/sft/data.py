"""The data sets of ``sft``: read by ``rows.py``, put into the trainer's shapes by ``shapes.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.language.tables import as_dataset
from ebbtide_recipes.sft import images
from ebbtide_recipes.sft.shapes import EXAMPLE, answer_apart, one_kind, shape_of, shaped_row, with_system
from ebbtide_recipes.skeleton.rows import Reader, Row, split_name

if TYPE_CHECKING:
    from datasets import Dataset


def _pydoc(seed: int) -> list[Row]:
    from ebbtide_recipes.sft import pydoc

    return pydoc.rows(seed)


READER = Reader(builtin={"builtin:pydoc": _pydoc}, example=EXAMPLE)
"""Reads the data sets that ``sft`` knows."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read.

    Attributes:
        chat: Whether the model has a chat template.
        seed: Seed of the built-in data sets' order.
        system: System message for chats that have none.
        answers_alone: Whether the last answer of a chat is what is learned.
        vision: Whether the model takes images.
        use_hf: Whether names on a hub are Hugging Face's; else ModelScope's.
    """

    chat: bool
    seed: int
    system: str | None = None
    answers_alone: bool = False
    vision: bool = False
    use_hf: bool = True


def load(names: Sequence[str], reading: Reading) -> Dataset:
    """Read data sets and put them one after the other.

    Args:
        names: Built-in names, files or hub names, each with an optional ``#N`` for its first N rows.
        reading: How they are read.

    Returns:
        Rows of one shape. See [Note: row shapes].

    Raises:
        DataError: A data set cannot be found or read, is empty, or has columns that are not known.
        ConfigError: The part after ``#`` is not a number of rows, or the shapes of several data sets differ.
    """
    shaped: list[Row] = []
    kinds: dict[str, str] = {}
    for name in names:
        part = _shaped(READER.read(name, seed=reading.seed, use_hf=reading.use_hf), name, reading)
        kinds[name] = one_kind(part, name)
        shaped += part
    if len(set(kinds.values())) > 1:
        described = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise ConfigError(
            f"the data sets differ in shape ({described})",
            expected="data sets of the same shape",
            hint="train on one after the other, or give them the same columns",
        )
    made = as_dataset(shaped, names)
    return images.as_images(made) if "images" in made.column_names else made


def _shaped(rows: Sequence[Row], name: str, reading: Reading) -> list[Row]:
    """Put the rows of one data set into the shape that the first of them has."""
    shape = shape_of(rows[0], name, chat=reading.chat)
    seen = any(column in rows[0] for column in images.COLUMNS)
    if seen and not reading.vision:
        raise DataError(
            f"data set {name!r} has images, and the model takes none",
            expected="rows of text, or a vision-language model",
            hint="choose a vision-language model with --model, or remove the column from the data set",
        )
    folder = Path(split_name(name)[0]).expanduser().parent
    part: list[Row] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of data set {name!r}"
        made = shaped_row(shape, row, name, number)
        if reading.system is not None:
            made = with_system(made, reading.system)
        if reading.answers_alone:
            made = answer_apart(made, where)
        part.append(images.attach(row, made, folder, where) if seen else made)
    return part
