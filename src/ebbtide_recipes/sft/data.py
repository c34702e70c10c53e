"""The data sets of ``sft``: read by ``rows.py``, put into the trainer's shapes by ``shapes.py``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.language.tables import as_dataset, named_once
from ebbtide_recipes.sft import media, pydoc
from ebbtide_recipes.sft.roles import KNOWN, check_learned, unknown_in
from ebbtide_recipes.sft.shapes import (
    EXAMPLE,
    Shape,
    answer_apart,
    in_text,
    is_chat,
    one_kind,
    pair_of,
    shape_of,
    shaped_row,
    with_own_system,
    with_system,
    with_tools,
)
from ebbtide_recipes.skeleton.rows import Reader, Row, parsed

if TYPE_CHECKING:
    from datasets import Dataset


LOGGER = logging.getLogger("ebbtide.sft")


READER = Reader(builtin={"builtin:pydoc": pydoc.rows}, example=EXAMPLE)
"""Reads the data sets that ``sft`` knows."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read.

    Attributes:
        chat: Whether the model has a chat template.
        seed: Seed of the built-in data sets' order.
        system: System message for chats that have none.
        answers_alone: Whether only the last answer of a chat is learned.
        prompts_learned: Whether the messages of a ``prompt`` are learned, too.
        takes: Kinds of files that the model's processor takes: of ``image``, ``video`` and ``audio``.
        use_hf: Whether names on a hub are Hugging Face's; else ModelScope's.
        pair: Columns of the question and its answer, each ``COLUMN`` or ``COLUMN.KEY``; ``None``: by their names.
    """

    chat: bool
    seed: int
    system: str | None = None
    answers_alone: bool = False
    takes: tuple[str, ...] = ()
    prompts_learned: bool = False
    use_hf: bool = True
    pair: tuple[str, str] | None = None


def check(names: Iterable[str], pair: tuple[str, str] | None) -> None:
    """Refuse data sets that do not exist, and files whose first rows cannot be read or have unknown columns.

    Args:
        names: As ``load_both`` takes them.
        pair: Columns of the question and its answer, as in ``Reading``.

    Raises:
        EbbtideError: As ``load_both``; what depends on the model is left to it.
    """
    for name, rows in READER.check(names).items():
        _shape(rows[0], name, pair, chat=True)  # a model without a chat template takes no others


def load_both(names: Sequence[str], evaluation: Sequence[str], reading: Reading) -> tuple[Dataset, Dataset | None]:
    """Read the data sets to train on, and those to evaluate on; both name their files in the same columns.

    Args:
        names: Built-in names, files or hub names, as ``rows.parsed`` takes them.
        evaluation: The same, to evaluate on; empty: none.
        reading: How they are read.

    Returns:
        Rows of one shape. See [Note: row shapes].

    Raises:
        DataError: A data set cannot be found or read, is empty, or has columns that are not known.
        ConfigError: The part after ``#`` is not a number of rows, or the shapes of several data sets differ.
    """
    names, evaluation = named_once(names), named_once(evaluation)
    read = {
        name: READER.read(name, seed=reading.seed, use_hf=reading.use_hf)
        for name in dict.fromkeys((*names, *evaluation))
    }
    kinds = media.kinds_in(row for rows in read.values() for row in rows)
    trained = _table({name: read[name] for name in names}, kinds, reading)
    return trained, _table({name: read[name] for name in evaluation}, kinds, reading) if evaluation else None


def _table(parts: Mapping[str, Sequence[Row]], kinds: Sequence[str], reading: Reading) -> Dataset:
    shaped: list[Row] = []
    shapes: dict[str, str] = {}
    tools = not kinds and any(row.get("tools") for rows in parts.values() for row in rows)
    for name, rows in parts.items():
        part = _shaped(rows, name, kinds, reading, tools=tools)
        shapes[name] = one_kind(part, name)
        shaped += part
    if len(set(shapes.values())) > 1:
        described = ", ".join(f"{name}: {kind}" for name, kind in shapes.items())
        raise ConfigError(
            f"the data sets differ in shape ({described})",
            expected="data sets of the same shape",
            hint="train on one after the other, or give them the same columns",
        )
    return as_dataset(shaped, list(parts))


def _shape(row: Row, name: str, pair: tuple[str, str] | None, *, chat: bool) -> tuple[Shape, frozenset[str]]:
    """Choose how rows like this one are normalized: by the user's columns, or by those that are there."""
    return shape_of(row, name, chat=chat) if pair is None else pair_of(pair, row, name, chat=chat)


def _shaped(rows: Sequence[Row], name: str, kinds: Sequence[str], reading: Reading, *, tools: bool) -> list[Row]:
    """Put the rows of one data set into the shape that the first of them has; ``tools``: some row has tools."""
    shape, read = _shape(rows[0], name, reading.pair, chat=reading.chat)
    media.check_taken(media.kinds_in(rows), reading.takes, name)
    tools = tools and is_chat(shaped_row(shape, rows[0], name, 1))
    carried = {"system", *media.COLUMNS, *(("tools",) if tools else ())}
    unread = sorted({str(column) for row in rows for column in row} - {*read, *carried})
    if unread:
        LOGGER.warning("data set %r: nothing is learned from the columns %s", name, ", ".join(unread))
    folder = Path(parsed(name).place).expanduser().parent
    part: list[Row] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of data set {name!r}"
        made = with_own_system(shaped_row(shape, row, name, number), row.get("system"), where)
        if reading.system is not None:
            made = with_system(made, reading.system)
        if reading.answers_alone:
            made = answer_apart(made, where)
        if made.get("prompt") == []:
            raise DataError(
                f"{where} has [] as prompt",
                expected="a message before the answer",
                hint="`messages` may hold a chat that the assistant begins",
            )
        check_learned(made, where, prompt=reading.prompts_learned)
        if tools:
            made = with_tools(made, row.get("tools"), where)
        part.append(media.attach(row, made, kinds, folder, where) if kinds else in_text(made))
    if reading.system is not None and not is_chat(part[0]):
        LOGGER.warning("data set %r is plain text: --system has no effect on it", name)
    if unknown := unknown_in(part):
        LOGGER.warning(
            "data set %r has messages of the roles %s: a chat template that does not know them leaves them out; "
            "hint: known to most are %s",
            *(name, ", ".join(unknown), ", ".join(KNOWN)),
        )
    return part
