"""Reading data sets into the shapes the trainer knows.

[Note: row shapes]
Whatever the columns are called, a row becomes one of three: ``messages`` (a chat), ``prompt`` + ``completion`` (the
loss is on the completion alone), or ``text``. Questions and instructions become a chat turn when the tokenizer has a
chat template, because that is what a model tuned for chat expects to see; columns already called ``prompt`` and
``completion`` are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]

BUILTIN = ("builtin:pydoc",)
SUFFIXES = (".jsonl", ".json", ".parquet")
ACCEPTED = "`messages`, `conversations`, `prompt`+`completion`, `question`+`answer`, `instruction`+`output` or `text`"
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


def load(names: Sequence[str], *, chat: bool, seed: int) -> Dataset:
    """Read data sets and put them one after the other.

    Args:
        names: Built-in names, files or hub names, each with an optional ``#N`` for its first N rows.
        chat: Whether the tokenizer has a chat template.
        seed: Seed of the built-in data sets' order.

    Returns:
        Rows of one shape. See [Note: row shapes].

    Raises:
        DataError: A data set cannot be found or read, is empty, or has columns that are not known.
        ConfigError: The part after ``#`` is not a number of rows, or the shapes of several data sets differ.
    """
    from datasets import Dataset

    shaped: list[Row] = []
    shapes: dict[str, tuple[str, ...]] = {}
    for name in names:
        rows = _read(name, seed)
        if not rows:
            raise DataError(f"data set {name!r} is empty", expected="at least one row")
        shape = _shape(rows[0], name, chat=chat)
        part = [_shaped(shape, row, name, number) for number, row in enumerate(rows, start=1)]
        shapes[name] = tuple(part[0])
        shaped += part
    if len(set(shapes.values())) > 1:
        described = ", ".join(f"{name}: {'+'.join(columns)}" for name, columns in shapes.items())
        raise ConfigError(f"the data sets differ in shape ({described})", expected="data sets of one shape")
    return Dataset.from_list(shaped)


def _read(name: str, seed: int) -> list[Row]:
    """Return the rows of one data set, as many as ``#N`` asks for."""
    place, hash_, count = name.rpartition("#")
    if not hash_ or Path(name).exists():
        place, limit = name, None
    elif count.isdigit() and int(count) > 0:
        limit = int(count)
    else:
        raise ConfigError(
            f"data set {name!r} ends in #{count}", expected="a number of rows above zero, as in NAME#1000"
        )
    if place.startswith("builtin:"):
        if place not in BUILTIN:
            hint = nearest(place, BUILTIN) or "the built-in data sets are " + ", ".join(BUILTIN)
            raise DataError(f"there is no data set {place!r}", hint=hint)
        from ebbtide_recipes.sft import pydoc

        return pydoc.rows(seed)[:limit]
    path = Path(place).expanduser()
    if path.suffix.lower() in SUFFIXES or path.exists():
        return _read_file(path, limit)
    return _read_hub(place, limit)


def _read_file(path: Path, limit: int | None) -> list[Row]:
    """Read a local file by its suffix."""
    if not path.is_file():
        folder = path.parent
        others = [other.name for other in folder.iterdir() if other.suffix in SUFFIXES] if folder.is_dir() else []
        what = "is a folder" if path.is_dir() else "is not there"
        hint = nearest(path.name, others, count=1) or f"looked in {folder.resolve()}"
        raise DataError(f"data set file {str(path)!r} {what}", expected="a file", hint=hint)
    readers: dict[str, Callable[[Path], Iterable[Any]]] = {
        ".jsonl": _json_lines,
        ".json": _json_document,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"data set file {str(path)!r} ends in {path.suffix!r}", expected="one of " + ", ".join(SUFFIXES)
        )
    if path.stat().st_size == 0:
        raise DataError(f"data set file {str(path)!r} is empty", expected="at least one row")
    rows = list(islice(reader(path), limit))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"row {number} of {path} is {row!r:.60}", expected="an object with named columns")
    return rows


def _json_lines(path: Path) -> Iterable[Any]:
    """Yield the objects of a file with one JSON object a line; blank lines are passed over."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, f"line {number} of {path}")


def _json_document(path: Path) -> Iterable[Any]:
    """Return the objects of a file that is one JSON list."""
    content = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds a JSON {type(content).__name__}",
            expected="a list of objects",
            hint="one object a line is .jsonl",
        )
    return content


def _parse(text: str, where: str) -> Any:
    """Parse JSON, or say where it is broken."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}", expected="a JSON object") from error


def _parquet(path: Path) -> Iterable[Any]:
    """Yield the rows of a parquet file, batch by batch."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}", expected="a parquet file") from error


def _read_hub(name: str, limit: int | None) -> list[Row]:
    """Read the training split of a data set by its hub name."""
    import datasets

    try:
        dataset = datasets.load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data set {name!r} is no local file and could not be loaded by that name: {error}",
            expected=f"{', '.join(BUILTIN)}, a {', '.join(SUFFIXES)} file, or a hub name with a train split",
        ) from error
    return list(islice(dataset, limit))


Shape = Callable[[Row], Row]


def _shape(row: Row, name: str, *, chat: bool) -> Shape:
    """Choose how rows with these columns are put into shape."""
    columns = set(row)
    if "messages" in columns or "conversations" in columns:
        if not chat:
            raise DataError(
                f"data set {name!r} holds chats, but the model's tokenizer has no chat template",
                expected="a tokenizer with a chat template, or `prompt`+`completion` or `text` columns",
                hint="use the model's instruct variant",
            )
        return _chat
    if {"prompt", "completion"} <= columns:
        return lambda row: {"prompt": row["prompt"], "completion": row["completion"]}
    pair: Callable[[str, str], Row] = _turn if chat else _plain_turn
    if {"question", "answer"} <= columns:
        return lambda row: pair(row["question"], row["answer"])
    if {"instruction", "output"} <= columns:
        return lambda row: pair("\n\n".join(filter(None, (row["instruction"], row.get("input")))), row["output"])
    if "text" in columns:
        return lambda row: {"text": row["text"]}
    raise DataError(f"data set {name!r} has the columns {', '.join(sorted(columns)) or '(none)'}", expected=ACCEPTED)


def _shaped(shape: Shape, row: Row, name: str, number: int) -> Row:
    """Put one row into shape, or say which row does not fit."""
    try:
        result = shape(row)
    except (KeyError, TypeError) as error:
        raise DataError(f"row {number} of data set {name!r} does not fit: {error!r}", expected=ACCEPTED) from error
    for column, value in result.items():
        # A prompt may be empty: then the completion is learned from nothing, which is what was asked for.
        if not isinstance(value, str | list) or not (value or column == "prompt"):
            raise DataError(
                f"row {number} of data set {name!r} has {value!r} as {column}", expected="text, or a list of messages"
            )
    return result


def _turn(question: str, answer: str) -> Row:
    """One question and its answer, as a chat."""
    return {"prompt": [_message("user", question)], "completion": [_message("assistant", answer)]}


def _plain_turn(question: str, answer: str) -> Row:
    """One question and its answer, as plain text."""
    if not isinstance(question, str):
        raise TypeError(f"{question!r} is not text")
    return {"prompt": f"{question}\n", "completion": answer}


def _chat(row: Row) -> Row:
    """A chat, with the keys and role names of either convention."""
    messages = row["messages"] if "messages" in row else row["conversations"]
    return {
        "messages": [
            dict(m) if "role" in m else _message(ROLES.get(m["from"], m["from"]), m["value"]) for m in messages
        ]
    }


def _message(role: str, content: str) -> dict[str, str]:
    """One message of a chat."""
    if not isinstance(content, str):
        raise TypeError(f"{content!r} is not text")
    return {"role": role, "content": content}
