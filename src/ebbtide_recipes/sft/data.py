"""The data sets of ``sft``: read by ``rows.py``, put into the trainer's shapes by ``shapes.py``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
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

    from ebbtide_recipes.sft.config import SftConfig

LOGGER = logging.getLogger("ebbtide.sft")

READER = Reader(builtin={"builtin:pydoc": pydoc.rows}, example=EXAMPLE)
"""Reads the data sets that ``sft`` knows."""


def check(config: SftConfig) -> None:
    """Refuse data sets that do not exist, and files whose first rows cannot be read or have unknown columns.

    Raises:
        EbbtideError: As ``load_both``; what depends on the model is left to it.
    """
    for name, rows in READER.check([*config.dataset, *(config.eval_dataset or ())]).items():
        _shape(rows[0], name, config, chat=True)  # a model without a chat template takes no others


def load_both(config: SftConfig, *, chat: bool, takes: Collection[str] = ()) -> tuple[Dataset, Dataset | None]:
    """Read the data sets to train on, and those to evaluate on; both name their files in the same columns.

    Args:
        config: Names them, as ``rows.parsed`` takes names, and says how they are read.
        chat: Whether the model has a chat template.
        takes: Kinds of files that the model's processor takes: of ``image``, ``video`` and ``audio``.

    Returns:
        Rows of one shape. See [Note: row shapes].

    Raises:
        DataError: A data set cannot be found or read, is empty, or has columns that are not known.
        ConfigError: The part after ``#`` is not a number of rows, or the shapes of several data sets differ.
    """
    names, evaluation = named_once(config.dataset), named_once(config.eval_dataset or ())
    read = {
        name: READER.read(name, seed=config.seed, use_hf=config.use_hf) for name in dict.fromkeys((*names, *evaluation))
    }
    for name, rows in read.items():
        media.check_taken(media.kinds_in(rows), takes, name)
    kinds = media.kinds_in(row for rows in read.values() for row in rows)
    trained = _table({name: read[name] for name in names}, kinds, config, chat=chat)
    return trained, _table({name: read[name] for name in evaluation}, kinds, config, chat=chat) if evaluation else None


def _table(parts: Mapping[str, Sequence[Row]], kinds: Sequence[str], config: SftConfig, *, chat: bool) -> Dataset:
    shaped: list[Row] = []
    shapes: dict[str, str] = {}
    tools = not kinds and any(row.get("tools") for rows in parts.values() for row in rows)
    for name, rows in parts.items():
        part = _shaped(rows, name, kinds, config, chat=chat, tools=tools)
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


def _shape(row: Row, name: str, config: SftConfig, *, chat: bool) -> tuple[Shape, frozenset[str]]:
    """Choose how rows like this one are normalized: by the user's columns, or by those that are there."""
    if config.prompt_key is None or config.response_key is None:
        return shape_of(row, name, chat=chat)
    return pair_of((config.prompt_key, config.response_key), row, name, chat=chat)


def _shaped(
    rows: Sequence[Row], name: str, kinds: Sequence[str], config: SftConfig, *, chat: bool, tools: bool
) -> list[Row]:
    """Put the rows of one data set into the shape that the first of them has; ``tools``: some row has tools."""
    shape, read = _shape(rows[0], name, config, chat=chat)
    tools = tools and is_chat(shaped_row(shape, rows[0], f"row 1 of data set {name!r}"))
    carried = {"system", *media.COLUMNS, *(("tools",) if tools else ())}
    unread = sorted({str(column) for row in rows for column in row} - {*read, *carried})
    if unread:
        LOGGER.warning("data set %r: nothing is learned from the columns %s", name, ", ".join(unread))
    folder = Path(parsed(name).place).expanduser().parent
    part: list[Row] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of data set {name!r}"
        made = with_own_system(shaped_row(shape, row, where), row.get("system"), where)
        if config.system is not None:
            made = with_system(made, config.system)
        if config.completion_only_loss:
            made = answer_apart(made, where)
        if made.get("prompt") == []:
            raise DataError(
                f"{where} has [] as prompt",
                expected="a message before the answer",
                hint="`messages` may hold a chat that the assistant begins",
            )
        check_learned(made, where, prompt=config.learns_prompts)
        if tools:
            made = with_tools(made, row.get("tools"), where)
        part.append(media.attach(row, made, kinds, folder, where) if kinds else in_text(made))
    if config.system is not None and not is_chat(part[0]):
        LOGGER.warning("data set %r is plain text: --system has no effect on it", name)
    if unknown := unknown_in(part):
        LOGGER.warning(
            "data set %r has messages of the roles %s: a chat template that does not know them leaves them out; "
            "hint: known to most are %s",
            *(name, ", ".join(unknown), ", ".join(KNOWN)),
        )
    return part
