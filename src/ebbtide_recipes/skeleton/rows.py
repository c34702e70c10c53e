"""Rows from files, hubs and built-in data sets; a recipe normalizes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide_recipes.skeleton import hubs
from ebbtide_recipes.skeleton.hubs import ON_MODELSCOPE

LOGGER = logging.getLogger("ebbtide.recipes")

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")
OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".zip", ".zst", ".arrow", ".yaml", ".yml")
"""Of files that are not read: names that end so are no hub names, and are refused at once."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads data sets by name: built-in ones, files, and those of a hub; each with an optional ``#N``.

    Attributes:
        builtin: Built-in data sets: their names, and functions that take a seed and return rows.
        example: A row as JSON, for hints.
    """

    builtin: Mapping[str, Callable[[int], list[Row]]]
    example: str

    def check(self, names: Iterable[str]) -> None:
        """Reject names that are neither a built-in data set, nor a file with rows, nor a possible hub name.

        Raises:
            DataError: There is no such built-in data set or file, or the file is empty or of an unknown kind.
            ConfigError: The part after ``#`` is not a number of rows.
        """
        for name in names:
            place, _ = split_name(name)
            if place.startswith("builtin:"):
                if place not in self.builtin:
                    raise DataError(
                        f"there is no data set {place!r}",
                        expected=f"one of {', '.join(self.builtin)}",
                        hint=nearest(place, tuple(self.builtin)) or "or a file, or a hub name",
                    )
            elif _is_file(Path(place).expanduser(), place):
                _reader(Path(place).expanduser())

    def read(self, name: str, *, seed: int, use_hf: bool) -> list[Row]:
        """Return the rows of one data set, the first ``N`` with ``#N``.

        Args:
            name: As ``check`` takes it.
            seed: Seed of a built-in data set's order.
            use_hf: Whether names on a hub are Hugging Face's; else ModelScope's.

        Raises:
            DataError: The data set cannot be found or read, or is empty.
            ConfigError: The part after ``#`` is not a number of rows.
        """
        self.check([name])
        place, limit = split_name(name)
        path = Path(place).expanduser()
        if place.startswith("builtin:"):
            rows = self.builtin[place](seed)[:limit]
        elif _is_file(path, place):
            rows = _read_file(path, limit, self.example)
        else:
            rows = self._read_hub(place if use_hf else hubs.modelscope_data(place), limit)
        if limit is not None and len(rows) < limit:
            LOGGER.warning("data set %r has %d rows, fewer than %d: all are used", place, len(rows), limit)
        if not rows:
            raise DataError(f"data set {name!r} is empty", expected="at least one row", hint="leave it out")
        return rows

    def _read_hub(self, name: str, limit: int | None) -> list[Row]:
        """Read the training split of a data set by its hub name."""
        import datasets

        try:
            with hubs.cached_without_network():
                dataset = datasets.load_dataset(name, split="train")
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"data set {name!r} is no local file and could not be loaded by that name: {error}",
                expected=self._places,
                hint=self._near(name)
                or f"without a network use a local file, or a data set fetched before; {ON_MODELSCOPE}",
            ) from error
        return list(islice(dataset, limit))

    @property
    def _places(self) -> str:
        return f"{', '.join(self.builtin)}, a {', '.join(SUFFIXES)} file, or a hub name with a train split"

    def _near(self, name: str) -> str:
        """Name the built-in data sets and local files with names like this one."""
        local = sorted(other.name for other in Path().iterdir() if other.suffix in SUFFIXES)
        return nearest(name, (*self.builtin, *local), count=1)


def split_name(name: str, *, of: str = "rows") -> tuple[str, int | None]:
    """Split ``NAME#N`` into the name and a number of rows; ``None``: all of them.

    Args:
        name: The user's text.
        of: The counted objects, for errors.

    Raises:
        ConfigError: The part after ``#`` is no such number.
    """
    place, hash_, count = name.rpartition("#")
    if not hash_ or Path(name).expanduser().exists():
        return name, None
    if place.strip() and count.isascii() and count.isdigit() and int(count) > 0:
        return place, int(count)
    raise ConfigError(
        f"data set {name!r} ends in #{count}",
        expected=f"a name, and a number of {of} above zero",
        hint=f"NAME#1000 is the first thousand {of}; NAME is all of them",
    )


def _is_file(path: Path, written: str) -> bool:
    """Whether a name means a local file: by its suffix or a similar one, its form, or because it exists."""
    suffix = path.suffix.lower()
    return (
        suffix in (*SUFFIXES, *OTHER_SUFFIXES)
        or (suffix[1:2] in ("j", "p") and nearest(suffix, SUFFIXES) != "")
        or written.startswith((".", "/", "~"))
        or written.count("/") > 1
        or path.exists()
    )


def _reader(path: Path) -> Callable[[Path, str], Iterable[Any]]:
    """Return a reader for a local file; raise if it is missing, empty, or of an unknown kind."""
    if not path.is_file():
        folder = path.parent
        others = sorted(o.name for o in folder.iterdir() if o.suffix in SUFFIXES) if folder.is_dir() else []
        what = "is a folder" if path.is_dir() else "is not there"
        hint = nearest(path.name, others, count=1) or f"looked in {folder.resolve()}"
        raise DataError(f"data set file {str(path)!r} {what}", expected=f"a {', '.join(SUFFIXES)} file", hint=hint)
    readers: dict[str, Callable[[Path, str], Iterable[Any]]] = {
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
            f"data set file {str(path)!r} is empty",
            expected="at least one row",
            hint="check the program that writes it",
        )
    return reader


def _read_file(path: Path, limit: int | None, example: str) -> list[Row]:
    """Read a local file by its suffix."""
    reader = _reader(path)
    try:
        rows = list(islice(reader(path, example), limit))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}",
            expected="text in UTF-8",
            hint="convert it, or check whether it is compressed",
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
                hint=f"such as {example}",
            )
    return rows


def _json_lines(path: Path, example: str) -> Iterable[Any]:
    """Yield the objects of a file with one JSON object per line; blank lines are skipped."""
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, f"line {number} of {path}", example)


def _json_document(path: Path, example: str) -> Iterable[Any]:
    """Return the objects of a file that is one JSON list."""
    content = _parse(path.read_text(encoding="utf-8-sig"), str(path), example)
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds a JSON {type(content).__name__}",
            expected="a list of objects",
            hint="one object a line is .jsonl",
        )
    return content


def _parse(text: str, where: str, example: str) -> Any:
    """Parse JSON, or report the position of the error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}", expected="a JSON object", hint=f"such as {example}") from error


def _parquet(path: Path, example: str) -> Iterable[Any]:
    """Yield the rows of a parquet file, batch by batch."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="a parquet file", hint="check whether it is complete"
        ) from error
