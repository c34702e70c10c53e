"""Rows from files, hubs and built-in data sets; a recipe normalizes them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ebbtide.base.errors import ConfigError, DataError, few, nearest, nearest_names
from ebbtide_recipes.skeleton import hubs
from ebbtide_recipes.skeleton.hubs import ON_MODELSCOPE

LOGGER = logging.getLogger("ebbtide.recipes")

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")
OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".zip", ".zst", ".arrow", ".yaml", ".yml")
"""Of files that are not read: names that end so are no hub names, and are refused at once."""


FIRST_ROWS = 100
"""Rows of a file that are read in advance."""

LARGEST_DOCUMENT_BYTES = 32 * 1024**2
"""Above this, a JSON document is not read in advance: its first rows come with all others."""

_HUBS = {"hf": "true", "ms": "false"}
"""What ms-swift writes before a name, and the value of ``--use_hf`` that means the same."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """What the name of a data set says.

    Attributes:
        place: A built-in data set, a file, or the name on a hub.
        subset: The configuration of a data set on a hub; ``None``: its only one, or the default.
        split: The part of a data set on a hub.
        limit: Number of first rows; ``None``: all of them.
    """

    place: str
    subset: str | None = None
    split: str = "train"
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads data sets by name: built-in ones, files, and those of a hub, as ``parsed`` takes it.

    Attributes:
        builtin: Built-in data sets: their names, and functions that take a seed and return rows.
        example: A row as JSON, for hints.
    """

    builtin: Mapping[str, Callable[[int], list[Row]]]
    example: str

    def check(self, names: Iterable[str]) -> dict[str, list[Row]]:
        """Reject names that are neither a built-in data set, nor a file with rows, nor a possible hub name.

        Of a file the first rows are read, as ``read`` reads them; the rest of it may still be broken. A large JSON
        document is left to ``read``.

        Args:
            names: As ``parsed`` takes them.

        Returns:
            The first rows of each file that was read, by its name in ``names``.

        Raises:
            DataError: There is no such built-in data set or file, or the file's first rows cannot be read.
            ConfigError: The name is incomplete, or the part after ``#`` is not a number of rows.
        """
        first: dict[str, list[Row]] = {}
        for name in names:
            named = parsed(name)
            path = self._file(named.place)
            if path is not None and (count := read_in_advance(path, named.limit)):
                first[name] = _not_empty(read_file(path, count, self.example), name)
        return first

    def read(self, name: str, *, seed: int, use_hf: bool) -> list[Row]:
        """Return the rows of one data set, the first ``N`` with ``#N``.

        Args:
            name: As ``check`` takes it.
            seed: Seed of a built-in data set's order.
            use_hf: Whether names on a hub are Hugging Face's; else ModelScope's.

        Raises:
            DataError: The data set cannot be found or read, or is empty.
            ConfigError: The name is incomplete, or the part after ``#`` is not a number of rows.
        """
        named = parsed(name)
        place, limit = named.place, named.limit
        path = self._file(place)
        if path is not None:
            rows = read_file(path, limit, self.example)
        elif place in self.builtin:
            rows = self.builtin[place](seed)[:limit]
        else:
            rows = self._read_hub(named, use_hf=use_hf)
        if limit is not None and len(rows) < limit:
            LOGGER.warning("data set %r has %d rows, fewer than %d: all are used", place, len(rows), limit)
        return _not_empty(rows, name)

    def _file(self, place: str) -> Path | None:
        """Return the path of a local file that can be read by its suffix; ``None``: built in, or of a hub."""
        path = Path(place).expanduser()
        if place.startswith("builtin:"):
            check_builtin("data set", place, tuple(self.builtin), "or a file, or a hub name")
        elif _is_file(path, place):
            _reader(path)
            return path
        return None

    def _read_hub(self, named: Named, *, use_hf: bool) -> list[Row]:
        """Read a split of a data set of a hub."""
        import datasets

        place = named.place if use_hf else hubs.from_modelscope("data set", named.place)
        try:
            with hubs.cached_without_network():
                dataset = datasets.load_dataset(place, named.subset, split=named.split)
        except (OSError, ValueError, RuntimeError) as error:
            first, *others = str(error).splitlines() or [repr(error)]
            raise DataError(
                f"data set {named.place!r} is no local file and could not be loaded by that name: {first}",
                expected=f"{', '.join(self.builtin)}, a {', '.join(SUFFIXES)} file, or a hub's NAME, also as "
                "NAME:SUBSET:SPLIT",
                hint=_listed(named, first, *others)
                or self._near(named.place)
                or f"without a network use a local file, or a data set fetched before; {ON_MODELSCOPE}",
            ) from error
        return list(map(_as_written, islice(dataset, named.limit)))

    def _near(self, name: str) -> str:
        """Name the built-in data sets and local files with names like this one."""
        local = sorted(other.name for other in Path().iterdir() if other.suffix in SUFFIXES)
        return nearest(name, (*self.builtin, *local), count=1)


def check_builtin(what: str, name: str, known: Sequence[str], other: str) -> None:
    """Raise ``DataError`` unless a name that begins with ``builtin:`` is known; ``other`` is the hint for others."""
    if name not in known:
        found, hint = f"there is no {what} {name!r}", nearest(name, known) or other
        raise DataError(found, expected=f"one of {', '.join(known)}", hint=hint)


def _not_empty(rows: list[Row], name: str) -> list[Row]:
    if not rows:
        raise DataError(f"data set {name!r} is empty", expected="at least one row", hint="leave it out")
    return rows


def parsed(name: str) -> Named:
    """Return what ``NAME:SUBSET:SPLIT#N`` says; all but the name may be left out, the subset also by ``NAME::SPLIT``.

    Built-in data sets and files have neither subset nor split.

    Raises:
        ConfigError: A part is empty, a file has a subset, or the part after ``#`` is no number of rows.
    """
    place, limit = split_name(name)
    path = Path(place).expanduser()
    written, colon, rest = place.partition(":")
    local = place.startswith("builtin:") or rest.startswith("//") or path.exists()
    if not colon or local or path.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES):
        return Named(place=place, limit=limit)
    subset, _, split = rest.partition(":")
    if written.lower() in _HUBS and not subset:
        raise ConfigError(
            f"data set {name!r} begins with a hub",
            expected="the data set's name",
            hint=f"--use_hf {_HUBS[written.lower()]} --dataset {split}",
        )
    if not written.strip() or rest.endswith(":") or not rest:
        raise ConfigError(
            f"data set {name!r} has an empty part",
            expected="NAME, NAME:SUBSET, NAME:SUBSET:SPLIT or NAME::SPLIT",
            hint="such as openai/gsm8k:main:test",
        )
    if _is_file(Path(written).expanduser(), written):
        raise ConfigError(
            f"data set {name!r} names a part {rest!r} of a file",
            expected="a file alone: subsets and splits are those of data sets on a hub",
            hint=f"{written}#1000 is its first thousand rows",
        )
    return Named(place=written, subset=subset or None, split=split or "train", limit=limit)


def _listed(named: Named, *lines: str) -> str:
    """Return a hint with a name that exists, if an error of ``datasets`` lists the subsets or the splits."""
    text = " ".join(lines)
    found = re.findall(r"'([^']+)'", (re.findall(r"\[([^\[\]]*)\]", text) or [""])[0])
    if not found:
        return ""
    first = lines[0].lower()
    if "split" not in first and "config" not in first:
        return ""
    begin = f"{named.place}:{named.subset or ''}:" if "split" in first else f"{named.place}:"
    return f"such as {', '.join(begin + part for part in found[:8])}"


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
        folder = path if path.is_dir() else path.parent
        others = {o.stem: o.name for o in sorted(folder.glob("*")) if o.suffix in SUFFIXES}
        what = "is a folder" if path.is_dir() else "does not exist"
        near = nearest_names(path.stem, others, count=1)  # nearly all have one of two suffixes
        found = f"has {few(others.values()) or 'none'}" if folder.is_dir() else "does not exist either"
        hint = f"did you mean {others[near[0]]!r}?" if near else f"{folder.resolve()} {found}"
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
            hint="one JSON object per line is .jsonl",
        )
    if path.stat().st_size == 0:
        raise DataError(
            f"data set file {str(path)!r} is empty",
            expected="at least one row",
            hint="check the program that writes it",
        )
    return reader


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Name a data file that cannot be read, or is no text in UTF-8.

    Args:
        path: The file that is read inside.

    Raises:
        DataError: It cannot be read.
    """
    try:
        yield
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
            hint="check its permissions",
        ) from error


def read_in_advance(path: Path, limit: int | None) -> int:
    """Return how many first rows of a file are read before anything else: none of a large JSON document."""
    if path.suffix.lower() == ".json" and path.stat().st_size > LARGEST_DOCUMENT_BYTES:
        return 0
    return min(limit or FIRST_ROWS, FIRST_ROWS)


def read_file(path: Path, limit: int | None, example: str) -> list[Row]:
    """Return the first rows of a local file, which its suffix says how to read.

    Args:
        path: The file.
        limit: Number of rows; ``None``: all of them.
        example: A row as JSON, for hints.

    Raises:
        DataError: It cannot be read, or a row is no object.
    """
    reader = _reader(path)
    with reading(path):
        rows = list(islice(reader(path, example), limit))
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
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise _no_json(error, f"line {number} of {path}", example) from error


def _json_document(path: Path, example: str) -> Iterable[Any]:
    """Return the objects of a file that is one JSON list; one object per line is read too."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _json_lines(path, example)
        raise _no_json(error, str(path), example) from error
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds a JSON {type(content).__name__}",
            expected="a list of objects",
            hint="one object per line is .jsonl",
        )
    return content


def _no_json(error: json.JSONDecodeError, where: str, example: str) -> DataError:
    """Return the error of a text that is not JSON, with its position."""
    return DataError(f"{where} is not JSON: {error}", expected="a JSON object", hint=f"such as {example}")


def _as_written(value: Any, *, of_tools: bool = False) -> Any:
    """Return a table's value without the empty fields that columns of structs give every tool and every call of one."""
    if isinstance(value, dict):
        return {
            name: _as_written(inner, of_tools=of_tools or name in ("tools", "tool_calls"))
            for name, inner in value.items()
            if inner is not None or not of_tools
        }
    return [_as_written(inner, of_tools=of_tools) for inner in value] if isinstance(value, list) else value


_BATCH_ROWS = 1024
"""Rows of a parquet file in memory at a time."""


def _parquet(path: Path, example: str) -> Iterable[Any]:
    """Yield the rows of a parquet file, batch by batch."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from map(_as_written, batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="a parquet file", hint="check whether it is complete"
        ) from error
