"""Images, videos and sounds with the text of rows, for models that see or hear.

A row names its files in ``images``, ``videos`` and ``audios`` (lists) or ``image``, ``video`` and ``audio``: paths,
relative to the data set's file; or in the parts of a message, ``{"type": "video", "video": "clip.mp4"}``. ``<image>``,
``<video>`` and ``<audio>`` in a message of a user or a tool mark the positions; without them the files precede the
user's first words. In other messages they are text.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft.shapes import Row

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = ("image", "video", "audio")
COLUMNS = tuple(name for kind in KINDS for name in (f"{kind}s", kind))
WHERE = "where"
"""The column that says of a row with files which row it is, for errors while training."""


def kinds_in(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the kinds of files that some of the rows name."""
    listed = list(rows)
    return tuple(
        kind for kind in KINDS if any(row.get(f"{kind}s") or row.get(kind) or _inline(row, kind) for row in listed)
    )


def check_taken(kinds: Sequence[str], taken: Collection[str], name: str) -> None:
    """Reject a data set with files of a kind that the model's processor does not take.

    Raises:
        DataError: It has some.
    """
    missing = [f"{kind}s" for kind in kinds if kind not in taken]
    if missing:
        takes = f"takes {' and '.join(f'{kind}s' for kind in taken)} and text" if taken else "takes text alone"
        raise DataError(
            f"data set {name!r} has {' and '.join(missing)}, and the model {takes}",
            expected=f"rows of text, or a model whose processor takes {' and '.join(missing)}",
            hint="choose such a model with --model, or remove the column from the data set",
        )


def attach(row: Row, shaped: Row, kinds: Sequence[str], folder: Path, where: str) -> Row:
    """Return a shaped row with its files.

    Args:
        row: The row as it was read.
        shaped: The same row in one of the shapes the trainer knows.
        kinds: The kinds of files in all data sets.
        folder: What relative paths are relative to.
        where: The row and its data set, for errors.

    Raises:
        DataError: A file is missing, or the numbers of files and tags differ.
    """
    column = "messages" if "messages" in shaped else "prompt"
    if not isinstance(shaped.get(column), list):
        own = kinds_in([row])
        if own:
            found, hint = f"{where} has {own[0]}s with plain text", "the chat template places them in the text"
        else:
            found = f"{where} is plain text, and other rows have {kinds[0]}s"
            hint = "write the text as messages, or train on one kind of rows after the other"
        raise DataError(found, expected="messages, or question and answer, and a model with a chat template", hint=hint)
    columns = [column, *(["completion"] if "completion" in shaped else [])]
    written: Row = {name: [{**m, "content": _parts(m, kinds)} for m in shaped[name]] for name in columns}
    files: dict[str, list[str]] = {}
    for kind in kinds:
        files[f"{kind}s"] = [_path(name, kind, folder, where) for name in _named(row, written, kind, where)]
    _place(written, columns, {kind: len(files[f"{kind}s"]) for kind in kinds}, where)
    for message in (m for name in columns for m in written[name]):
        # Both keys in every part: rows become a table with equal fields in all cells.
        message["content"] = [{"type": p["type"], "text": p.get("text")} for p in message["content"]]
    return {**shaped, **written, **files, WHERE: where}


def check_even(dataset: Dataset) -> None:
    """Reject a table where files of a kind are in some rows only, for ranks that share the weights under FSDP.

    A rank gathers a vision or audio part only for batches with files; the others would wait for it forever.

    Raises:
        DataError: There is such a kind.
    """
    for column in [f"{kind}s" for kind in KINDS if f"{kind}s" in dataset.column_names]:
        rows = dataset.select_columns([column, WHERE])
        without = [row[WHERE] for row in rows if not row[column]]
        if without and len(without) < len(rows):
            raise DataError(
                f"{without[0]} has no {column}, and other rows have; on several ranks of FSDP training would hang",
                expected=f"{column} in every row, or in none",
                hint="train on the two kinds of rows one after the other, or without sharding: --fsdp_strategy none",
            )


def _named(row: Row, written: Row, kind: str, where: str) -> list[Any]:
    """Return the files of one kind that a row names: in its column, or in the parts of its messages."""
    column = next((row[name] for name in (f"{kind}s", kind) if row.get(name)), [])
    listed: list[Any] = column if isinstance(column, list) else [column]
    parts = [p for messages in written.values() for m in messages for p in m["content"] if p["type"] == kind]
    within = [file for part in parts if (file := _file_of(part, kind)) is not None]
    if within and (listed or len(within) != len(parts)):
        raise DataError(
            f"{where} names {kind}s in its messages and elsewhere",
            expected="one of the two",
            hint=f"list them in `{kind}s`, and write <{kind}> where each stands",
        )
    return within or listed


def _inline(row: Row, kind: str) -> bool:
    """Whether a part of a message of a row is of a kind."""
    for column in ("messages", "conversations", "prompt"):
        messages = row.get(column)
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and any(_kind_of(part) == kind for part in content):
                return True
    return False


def _kind_of(part: Any) -> str:
    """Return the type of a part of a message: OpenAI's ``image_url`` is an image, a part without a type is text."""
    return str(part.get("type") or "text").removesuffix("_url") if isinstance(part, dict) else "text"


def _file_of(part: Row, kind: str) -> Any:
    """Return the file that a part of a message names; ``None``: none."""
    value = next((part[key] for key in (kind, f"{kind}_url", "path", "url") if part.get(key)), None)
    return value.get("url") if isinstance(value, dict) and "url" in value else value


def _path(file: Any, kind: str, folder: Path, where: str) -> str:
    """Return the path of one file, as ms-swift's rows or datasets' own name it."""
    name = file.get("path") if isinstance(file, dict) else file
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has the {kind} {file!r:.60}", expected="a path", hint=f'such as "{kind}s": ["file"]')
    path = folder / Path(name.removeprefix("file://")).expanduser()
    if not os.path.isfile(path):  # unlike is_file, it raises nothing for data in place of a name
        raise DataError(
            f"{where} names the {kind} {name!r:.200}, which does not exist or cannot be reached",
            expected="a file",
            hint=f"looked for {str(path):.200}; relative paths start at the folder of the data set's file",
        )
    return str(path)


def _place(written: Row, columns: Sequence[str], counts: dict[str, int], where: str) -> None:
    """Check the placeholders for files in messages; if there are none, insert them before the user's first words."""
    missing: list[Row] = []
    for kind, count in counts.items():
        tags = sum(part["type"] == kind for name in columns for m in written[name] for part in m["content"])
        if tags not in (0, count):
            raise DataError(
                f"{where} has {count} {kind}s and {tags} <{kind}> tags",
                expected=f"one tag for each {kind}, or none",
                hint=f"without tags the {kind}s come before the user's first words",
            )
        missing += [] if tags else [{"type": kind}] * count
    first = next((m for m in written[columns[0]] if m["role"] == "user"), None)
    if missing and first is None:
        raise DataError(
            f"{where} has files and no message of a user",
            expected="a user's message, before which they stand",
            hint="write a tag such as <image> where each stands",
        )
    if first is not None:
        first["content"] = missing + first["content"]


def _parts(message: Row, kinds: Sequence[str]) -> list[Row]:
    """Return a message's content as parts: text, and placeholders for files of the data set's kinds."""
    content = message.get("content")
    tags = "|".join(f"<{kind}>" for kind in kinds) if message["role"] in ("user", "tool") else "(?!)"  # matches nothing
    parts: list[Row] = []
    for part in content if isinstance(content, list) else [content or ""]:
        kind, text = _kind_of(part), part.get("text") if isinstance(part, dict) else part
        if kind != "text":
            parts.append({**part, "type": kind})
            continue
        pieces = [piece for piece in re.split(f"({tags})", str(text or "")) if piece]
        parts += [{"type": p[1:-1]} if re.fullmatch(tags, p) else {"type": "text", "text": p} for p in pieces]
    return parts
