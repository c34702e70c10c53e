"""The files of a run folder, and a reader of their lines.

``track`` writes them and ``report`` reads them, without importing each other; what they share is here.
``docs/reference/run-file.md`` lists the events.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
from bisect import bisect_left
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from ebbtide.base.errors import DataError

EVENTS_FILE = "run.jsonl"
OUTSIDE_FILE = "outside.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
OUTPUT_FILE = "output.txt"
LOCK_FILE = ".lock"
_ASIDE = re.compile(r"run-(\d+)\.jsonl")
LOCKSTEP_FILE = "lockstep"
LOCKSTEP_VARIABLE = "EBBTIDE_LOCKSTEP"
"""Environment variable: the pipe on which a run is given its turn after each step. See [Note: a fair comparison]."""

DETAILS_END = "details-end"
"""Code of the message after which a long run's record has no details, such as stalls."""

SCHEMA = 1
SETTLING = 1
"""Steps after a new plan whose time does not count: its recipes are verified, and allocators get new sizes."""

BOTH_PHASE = "forward and backward"
"""The phase of a step whose forward and backward cannot be distinguished."""

Event = dict[str, Any]

Curve = Sequence[tuple[float, int]]
"""Memory over time: seconds of the run's clock and bytes."""


class KeptBecause(StrEnum):
    """Why a plan of ``Auto`` keeps everything, in the events ``plan`` and ``verdict``."""

    GAINS_NOTHING = "gains_nothing"  # no plan saves memory within max_slowdown
    LONE = "lone"  # the same, and backward needs all of the one block that ran at once
    SMALL = "small"  # all storages that blocks save are below min_bytes
    FITS = "fits"  # the budget holds everything
    UNLIKE = "unlike"  # steps run other blocks each time, and the time of ordinary training could not be measured


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """A time range of a phase, in seconds of the run's clock."""

    name: str
    step: Any
    begin: float
    end: float


@contextmanager
def only_writer(folder: Path) -> Generator[None, None, None]:
    """Hold the lock on a folder, because two runs would write, rename and remove the same files.

    The system releases the lock with the process. Where a file system has no locks, nothing is locked.

    Raises:
        DataError: Another process holds the lock.
        OSError: The folder cannot be written.
    """
    import fcntl

    with (folder / LOCK_FILE).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise DataError(
                    f"another run ({file.read().strip() or 'unknown'}) writes into {folder}",
                    expected="one run in a folder at a time",
                    hint="wait for its end, or choose another folder; if that run has ended and a network file system "
                    f"still holds its lock, remove {folder / LOCK_FILE}",
                ) from error
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        yield


def records_aside(folder: Path) -> dict[int, Path]:
    """Return the records of earlier runs in a folder, by the number in their names."""
    found = [(_ASIDE.fullmatch(path.name), path) for path in folder.iterdir()]
    return {int(match[1]): path for match, path in found if match}


def put_record_aside(folder: Path) -> Path:
    """Rename a folder's record to ``run-1.jsonl``, ``run-2.jsonl``, ..., so that the next run can write its own.

    Samples of its memory from outside, which would be taken for the next run's, are removed.

    Raises:
        FileNotFoundError: There is none.
    """
    kept = (folder / EVENTS_FILE).rename(folder / f"run-{max(records_aside(folder), default=0) + 1}.jsonl")
    (folder / OUTSIDE_FILE).unlink(missing_ok=True)
    return kept


def check_results(folder: Path) -> None:
    """Raise if a folder has a summary or a report without a record: a comparison's, or another program's files.

    A run replaces those of an earlier run in its folder.

    Raises:
        DataError: It has one.
    """
    has_record = (folder / EVENTS_FILE).exists() or records_aside(folder)  # first: a run removes its results before it
    found = [name for name in (SUMMARY_FILE, REPORT_FILE) if (folder / name).exists()]
    if found and not has_record:
        raise DataError(
            f"{folder} already holds {' and '.join(found)} of something other than a run",
            expected="a folder without them",
            hint="choose another folder, or remove them",
        )


def check_schema(found: Mapping[str, Any], path: Path) -> None:
    """Raise for the schema of a later ebbtide: known fields have another meaning there.

    Args:
        found: The event ``run_begin``, or a summary.
        path: Its file.

    Raises:
        DataError: It has a later schema.
    """
    schema = found.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise DataError(
            f"{path} has schema {schema}",
            expected=f"schema {SCHEMA} or older",
            hint="a newer ebbtide wrote it: pip install --upgrade ebbtide",
        )


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    """Return the events of a kind."""
    return [event for event in events if event["event"] == kind]


def phase_spans(events: Iterable[Event]) -> list[PhaseSpan]:
    """Return the finished phases, in the order in which they ended."""
    spans: list[PhaseSpan] = []
    begun: dict[str, Event] = {}
    for event in of_kind(events, "phase"):
        name = event.get("name", "")
        if event.get("edge") == "begin":
            begun[name] = event
        elif name in begun:
            begin = begun.pop(name)
            spans.append(PhaseSpan(name=name, step=begin.get("step"), begin=begin["t"], end=event["t"]))
    return spans


def samples(events: Iterable[Event], field: str) -> Curve:
    """Return the samples of ``rss_bytes`` or ``device_bytes``."""
    return [(e["t"], e[field]) for e in of_kind(events, "memory") if e.get(field) is not None]


def nearest_sample(curve: Curve, t: float) -> int:
    """Return the index of the sample nearest to a time, on a curve that is not empty."""
    after = bisect_left(curve, (t, 0))
    return min(range(len(curve))[max(after - 1, 0) : after + 1], key=lambda index: abs(curve[index][0] - t))


def read_events(path: Path) -> list[Event]:
    """Read a file of events, sorted by time; numbers of steps that begin again are continued.

    Threads write concurrently, so adjacent lines may be out of order. An incomplete last line, which a killed process
    leaves, is skipped; a malformed line anywhere else is an error.

    Args:
        path: ``run.jsonl`` or ``outside.jsonl``.

    Returns:
        The events; each has at least ``t`` (monotonic seconds) and ``event``.

    Raises:
        DataError: No such file, or a line before the last is not an event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror})",
            expected=f"a run folder with {EVENTS_FILE}",
            hint="pass the folder of a run (--output_dir, or the argument of track_memory)",
        ) from error
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _parse(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            raise DataError(
                f"line {number} of {path} is {line[:60]!r}",
                expected="one JSON object per line, with 't' and 'event'",
                hint="the file was edited or damaged; only its last line may be incomplete",
            )
    events.sort(key=lambda event: event["t"])
    _continue_numbers(events)
    return events


def _continue_numbers(events: Sequence[Event]) -> None:
    """Continue the numbers of steps that begin again, as in each epoch of a loop that passes its batches' numbers.

    The ``step`` events decide. Events before one are of its step, except those with the number of the step before, such
    as its ``stats`` or an evaluation.
    """
    shift, before, ended = 0, None, -math.inf
    waiting: list[Event] = []
    for event in events:
        number: Any = event.get("step")
        if not isinstance(number, int):
            continue
        waiting.append(event)
        if event["event"] == "step":
            previous = shift
            if number + shift <= ended:
                shift = int(ended) + 1 - number
            for one in waiting:
                one["step"] += previous if one["step"] == before != number else shift
            waiting, before, ended = [], number, number + shift
    for one in waiting:
        one["step"] += shift


def outside_events(folder: Path, events: Sequence[Event]) -> list[Event]:
    """Return the events of a folder's ``outside.jsonl`` since a run began; none without one.

    Args:
        folder: The run folder.
        events: Those of its ``run.jsonl``.

    Raises:
        DataError: As ``read_events``.
    """
    path = folder / OUTSIDE_FILE
    found = read_events(path) if events and path.exists() else []
    return [event for event in found if event["t"] >= events[0]["t"]]  # it may also hold those of an earlier run


def _parse(line: bytes) -> Event | None:
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    event = cast("Event", value)
    known = isinstance(event.get("t"), (int, float)) and isinstance(event.get("event"), str)
    return event if known else None
