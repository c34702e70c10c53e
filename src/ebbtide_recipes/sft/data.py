"""Finding and reading data sets; ``shapes.py`` puts their rows into the shapes the trainer knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide_recipes.sft import hubs, images
from ebbtide_recipes.sft.shapes import EXAMPLE, Row, answer_apart, one_kind, shape_of, shaped_row, with_system

if TYPE_CHECKING:
    from datasets import Dataset

LOGGER = logging.getLogger("ebbtide.sft")

BUILTIN = ("builtin:pydoc",)
SUFFIXES = (".jsonl", ".json", ".parquet")
OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".zip", ".zst", ".arrow", ".yaml", ".yml")
"""Of files that are not read: names that end so are no hub names, and are refused at once."""

PLACES = f"{', '.join(BUILTIN)}, a {', '.join(SUFFIXES)} file, or a hub name with a train split"


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
        rows = _read(name, reading)
        if not rows:
            raise DataError(f"data set {name!r} is empty", expected="at least one row", hint="leave it out")
        part = _shaped(rows, name, reading)
        kinds[name] = one_kind(part, name)
        shaped += part
    if len(set(kinds.values())) > 1:
        described = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise ConfigError(
            f"the data sets differ in shape ({described})",
            expected="data sets of one shape",
            hint="train on one after the other, or bring their columns into line",
        )
    made = _as_dataset(shaped, names)
    return images.as_images(made) if "images" in made.column_names else made


def split(dataset: Dataset, ratio: float, *, seed: int) -> tuple[Dataset, Dataset]:
    """Keep back a share of the rows for evaluation.

    Returns:
        What is trained on, and what was kept back: at least one row.

    Raises:
        ConfigError: Nothing would be left to train on.
    """
    kept = max(1, round(len(dataset) * ratio))
    if kept >= len(dataset):
        raise ConfigError(
            f"split_dataset_ratio {ratio} of {len(dataset)} rows leaves none to train on",
            expected="a share that leaves some",
            hint="give a smaller share, or --eval_dataset",
        )
    parts = dataset.train_test_split(test_size=kept, seed=seed)
    return parts["train"], parts["test"]


def _shaped(rows: Sequence[Row], name: str, reading: Reading) -> list[Row]:
    """Put the rows of one data set into the shape that the first of them has."""
    shape = shape_of(rows[0], name, chat=reading.chat)
    seen = any(column in rows[0] for column in images.COLUMNS)
    if seen and not reading.vision:
        raise DataError(
            f"data set {name!r} has images, and the model takes none",
            expected="rows of text, or a vision-language model",
            hint="give a vision-language model with --model, or take the column out of the data set",
        )
    folder = Path(_split(name)[0]).expanduser().parent
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


def check(names: Sequence[str]) -> None:
    """Refuse data sets that are neither built in, nor a file with rows, nor a name the hub can know.

    Args:
        names: As ``load`` takes them.

    Raises:
        DataError: There is no such built-in data set or file, or the file is empty or of an unknown kind.
        ConfigError: The part after ``#`` is not a number of rows.
    """
    for name in names:
        place, _ = _split(name)
        if place.startswith("builtin:"):
            if place not in BUILTIN:
                raise DataError(
                    f"there is no data set {place!r}",
                    expected=f"one of {', '.join(BUILTIN)}",
                    hint=nearest(place, BUILTIN) or "a file or a hub name will do too",
                )
        elif _is_file(Path(place).expanduser(), place):
            _reader(Path(place).expanduser())


def _as_dataset(rows: list[Row], names: Sequence[str]) -> Dataset:
    """Put rows into the form the trainer takes."""
    import pyarrow
    from datasets import Dataset

    try:
        return Dataset.from_list(rows)
    except (pyarrow.ArrowException, TypeError) as error:
        raise DataError(
            f"the rows of {', '.join(names)} do not make one table: {error}",
            expected="rows whose columns hold the same kind of value throughout",
            hint="look for a message whose content is a list in one row and text in another",
        ) from error


def _split(name: str) -> tuple[str, int | None]:
    """Split ``NAME#N`` into the name and the number of rows; ``None``: all of them."""
    place, hash_, count = name.rpartition("#")
    if not hash_ or Path(name).expanduser().exists():
        return name, None
    if place.strip() and count.isascii() and count.isdigit() and int(count) > 0:
        return place, int(count)
    raise ConfigError(
        f"data set {name!r} ends in #{count}",
        expected="a name, and a number of rows above zero",
        hint="NAME#1000 takes the first thousand rows; NAME alone takes all",
    )


def _read(name: str, reading: Reading) -> list[Row]:
    """Return the rows of one data set, as many as ``#N`` asks for."""
    check([name])
    place, limit = _split(name)
    path = Path(place).expanduser()
    if place.startswith("builtin:"):
        from ebbtide_recipes.sft import pydoc

        rows = pydoc.rows(reading.seed)[:limit]
    elif _is_file(path, place):
        rows = _read_file(path, limit)
    else:
        rows = _read_hub(place if reading.use_hf else hubs.modelscope_data(place), limit)
    if limit is not None and len(rows) < limit:
        LOGGER.warning("data set %r has %d rows, fewer than the %d asked for: all are taken", place, len(rows), limit)
    return rows


def _is_file(path: Path, written: str) -> bool:
    """Whether a name means a local file: by its suffix or one spelt like it, by its look, or because it is there."""
    suffix = path.suffix.lower()
    return (
        suffix in (*SUFFIXES, *OTHER_SUFFIXES)
        or (suffix[1:2] in ("j", "p") and nearest(suffix, SUFFIXES) != "")
        or written.startswith((".", "/", "~"))
        or written.count("/") > 1
        or path.exists()
    )


def _reader(path: Path) -> Callable[[Path], Iterable[Any]]:
    """Return what reads a local file; refuse one that is not there, empty, or of an unknown kind."""
    if not path.is_file():
        folder = path.parent
        others = sorted(o.name for o in folder.iterdir() if o.suffix in SUFFIXES) if folder.is_dir() else []
        what = "is a folder" if path.is_dir() else "is not there"
        hint = nearest(path.name, others, count=1) or f"looked in {folder.resolve()}"
        raise DataError(f"data set file {str(path)!r} {what}", expected=f"a {', '.join(SUFFIXES)} file", hint=hint)
    readers: dict[str, Callable[[Path], Iterable[Any]]] = {
        ".jsonl": _json_lines,
        ".json": _json_document,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"data set file {str(path)!r} ends in {path.suffix!r}",
            expected="one of " + ", ".join(SUFFIXES),
            hint="one JSON object a line is .jsonl",
        )
    if path.stat().st_size == 0:
        raise DataError(
            f"data set file {str(path)!r} is empty", expected="at least one row", hint="look at what was to write it"
        )
    return reader


def _read_file(path: Path, limit: int | None) -> list[Row]:
    """Read a local file by its suffix."""
    reader = _reader(path)
    try:
        rows = list(islice(reader(path), limit))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}",
            expected="text in UTF-8",
            hint="convert it, or look whether it is compressed",
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error})",
            expected="a file you may read",
            hint="check its rights",
        ) from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"row {number} of {path} is {row!r:.60}",
                expected="an object with named columns",
                hint=f"such as {EXAMPLE}",
            )
    return rows


def _json_lines(path: Path) -> Iterable[Any]:
    """Yield the objects of a file with one JSON object a line; blank lines are passed over."""
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, f"line {number} of {path}")


def _json_document(path: Path) -> Iterable[Any]:
    """Return the objects of a file that is one JSON list."""
    content = _parse(path.read_text(encoding="utf-8-sig"), str(path))
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
        raise DataError(f"{where} is not JSON: {error}", expected="a JSON object", hint=f"such as {EXAMPLE}") from error


def _parquet(path: Path) -> Iterable[Any]:
    """Yield the rows of a parquet file, batch by batch."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="a parquet file", hint="look whether it was written to its end"
        ) from error


def _read_hub(name: str, limit: int | None) -> list[Row]:
    """Read the training split of a data set by its hub name."""
    import datasets

    try:
        dataset = datasets.load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data set {name!r} is no local file and could not be loaded by that name: {error}",
            expected=PLACES,
            hint=_near(name) or "without a network give a local file, or a data set that was fetched before",
        ) from error
    return list(islice(dataset, limit))


def _near(name: str) -> str:
    """Name the built-in data sets and local files with names like this one."""
    local = sorted(other.name for other in Path().iterdir() if other.suffix in SUFFIXES)
    return nearest(name, (*BUILTIN, *local), count=1)
