"""Convert rows to the tables that trainers take."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.skeleton.rows import Row

if TYPE_CHECKING:
    from datasets import Dataset, Features

LOGGER = logging.getLogger("ebbtide.recipes")


def as_dataset(rows: list[Row], names: Sequence[str]) -> Dataset:
    """Return rows as one table.

    Args:
        rows: All with the same columns.
        names: The data sets they are from, for errors.

    Raises:
        DataError: A column holds values of different kinds.
    """
    import pyarrow
    from datasets import Dataset

    try:
        return Dataset.from_list(rows, features=_kept_apart(rows) if any(map(_has_more, rows)) else None)
    except (pyarrow.ArrowException, TypeError, UnicodeEncodeError, OverflowError) as error:
        raise DataError(
            f"the rows of {', '.join(names)} do not make one table: {error}",
            expected="rows with the same type of value in each column",
            hint="find a value that is text in one row and another type elsewhere, or text cut inside a character",
        ) from error


def _kept_apart(rows: list[Row]) -> Features:
    """Return the columns' types, with chats as JSON."""
    # A table would give every message, and every call of a tool, all others' fields, empty, and make all numbers of a
    # field floats. The JSON of `datasets` is pandas', which keeps ten decimals of a number: replace it by Python's.
    from datasets import Dataset, Features, Json, List, arrow_writer
    from datasets.features import features
    from datasets.utils import json as helpers

    for module in (arrow_writer, features, helpers):
        vars(module).update(ujson_dumps=partial(json.dumps, ensure_ascii=False), ujson_loads=json.loads)
    chats = {
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, list) and value and type(value[0]) is dict
    }
    chats -= {name for row in rows for name, value in row.items() if not (value is None or isinstance(value, list))}
    rest = [{name: value for name, value in row.items() if name not in chats} for row in rows]
    others = Dataset.from_list(rest, on_mixed_types="use_json")
    return Features({name: List(Json()) if name in chats else others.features[name] for name in rows[0]})


def _has_more(row: Row) -> bool:
    """Whether a message of a row has other fields than who speaks and what, or a part has other fields than text."""
    messages = [m for value in row.values() if isinstance(value, list) for m in value if isinstance(m, dict)]
    parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
    return any(m.keys() - {"role", "content"} for m in messages) or any(
        isinstance(part, dict) and part.keys() - {"type", "text"} for part in parts
    )


def check_kinds(rows: Sequence[Row], name: str, columns: Iterable[str]) -> None:
    """Raise ``DataError`` if one of the columns holds text in one row of a data set and messages in another."""
    kinds = {column: type(rows[0][column]) for column in columns}
    for number, row in enumerate(rows, start=1):
        for column, kind in kinds.items():
            if type(row[column]) is not kind:
                raise DataError(
                    f"row {number} of data set {name!r} has a {type(row[column]).__name__} as {column}, the first row "
                    f"a {kind.__name__}",
                    expected="text in every row, or messages in every row",
                    hint="split the file in two, or convert one half to the shape of the other",
                )


def check_known(rows: Iterable[Sequence[int]], names: Sequence[str], tokenizer: Any, count: int) -> None:
    """Refuse a token that the model has no embedding of: some tokenizers have more tokens than their models.

    Args:
        rows: Numbers of tokens.
        names: The data sets they are from, for errors.
        tokenizer: Made them.
        count: How many tokens the model has.

    Raises:
        DataError: There is one.
    """
    if len(tokenizer) <= count:
        return
    found = next((token for row in rows for token in row if token >= count), None)
    if found is not None:
        raise DataError(
            f"the rows of {', '.join(names)} have the token {found}, {tokenizer.decode([found])!r}, and the model has "
            f"{count} tokens",
            expected="tokens of the model",
            hint="remove it from the rows, or from the tokenizer's files; or save the model with more embeddings: "
            "model.resize_token_embeddings(len(tokenizer))",
        )


def named_once(names: Iterable[str]) -> list[str]:
    """Return each name once; warn of those that come several times."""
    counts = Counter(names)
    for name, count in sorted(counts.items()):
        if count > 1:
            LOGGER.warning("data set %r is named %d times: its rows are used once", name, count)
    return [*counts]


def split(dataset: Dataset, ratio: float, *, seed: int, in_order: bool = False) -> tuple[Dataset, Dataset]:
    """Hold out a share of the rows for evaluation.

    Args:
        dataset: The rows.
        ratio: The share.
        seed: Draws the held-out rows.
        in_order: Whether the rows to train on keep their order; else they are shuffled.

    Returns:
        Rows to train on, and held-out rows: at least one.

    Raises:
        ConfigError: Nothing would be left to train on.
    """
    kept = max(1, round(len(dataset) * ratio))
    if kept >= len(dataset):
        raise ConfigError(
            f"split_dataset_ratio {ratio} of {len(dataset)} rows leaves none to train on",
            expected="a share that leaves some",
            hint="use a smaller share, or --eval_dataset",
        )
    if in_order:
        numbered = dataset.from_dict({"number": list(range(len(dataset)))})
        parts = numbered.train_test_split(test_size=kept, seed=seed)
        return dataset.select(sorted(parts["train"]["number"])), dataset.select(parts["test"]["number"])
    parts = dataset.train_test_split(test_size=kept, seed=seed)
    return parts["train"], parts["test"]
