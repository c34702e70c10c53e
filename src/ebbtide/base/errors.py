"""The error tree.

[Note: errors]
Every message says what was found, what was expected, and after ``hint:`` what to do:

    EbbtideError
    ├── ConfigError            a value, key, flag or size that cannot be used        (also a ValueError)
    ├── StrategyError          the model is not wrapped as the strategy says
    ├── BlocksError            a model without parameters, or a glob that matches nothing
    ├── ConflictError          two offloaders on one model; offloading inside a checkpointed function
    ├── TargetError            no such target on this machine
    │   └── DiskError          a failed read or write                                (also an OSError)
    │       ├── DiskFullError  the disk has too little space for offloaded bytes or a checkpoint
    │       └── DiskPathError  a disk path that cannot serve
    ├── CapError               host memory, its budget, or the disk has no room
    ├── BudgetError            no plan fits the memory budget
    ├── TrainingError          training cannot continue, for example after a NaN loss
    ├── DataError              a data set, model or run folder that cannot be read
    ├── ModifiedInPlaceError   a saved tensor was changed in place                    (also a RuntimeError)
    └── RestoreError           restored or recomputed bytes differ from the saved     (also a RuntimeError)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ebbtide.base.pages import with_addresses


class EbbtideError(Exception):
    """Root of every error that ebbtide raises on purpose.

    Args:
        found: What was found, with its value.
        expected: What was expected.
        hint: What the reader can do about it.
    """

    def __init__(self, found: str, *, expected: str = "", hint: str = "") -> None:
        self.found, self.expected, self.hint = found, expected, hint
        self.places: list[str] = []
        super().__init__(found)  # one argument: OSError would parse three as errno, strerror and filename

    def __reduce__(self) -> tuple[Callable[..., EbbtideError], tuple[str], dict[str, list[str]]]:
        # Errors are pickled between processes (ranks, runs of a comparison).
        return partial(type(self), expected=self.expected, hint=self.hint), (self.found,), {"places": self.places}

    def __str__(self) -> str:
        text = self.found
        if self.expected:
            text = f"{text.removesuffix('.')}; expected {with_addresses(self.expected)}"  # another library's sentence
        text = "\n".join([text, *self.places])
        return f"{text}\nhint: {with_addresses(self.hint)}" if self.hint else text


class ConfigError(EbbtideError, ValueError):
    """A value, key, flag or size that cannot be used."""


class StrategyError(EbbtideError):
    """The model is not wrapped as the strategy says."""


class BlocksError(EbbtideError):
    """The model has no parameters, or a glob matches nothing."""


class ConflictError(EbbtideError):
    """Two offloaders on one model, or offloading inside a checkpointed function.

    Args:
        found: What was found, with its value.
        expected: What was expected.
        hint: What the reader can do about it.
        handle: The open handle of ebbtide that offloads the model already; not pickled.
    """

    def __init__(self, found: str, *, expected: str = "", hint: str = "", handle: Any = None) -> None:
        super().__init__(found, expected=expected, hint=hint)
        self.handle = handle


class TargetError(EbbtideError):
    """No such target for offloaded bytes on this machine."""


class DiskError(TargetError, OSError):
    """A failed read or write."""


class DiskFullError(DiskError):
    """The disk has too little space for offloaded bytes or a checkpoint."""


class DiskPathError(DiskError):
    """A disk path that cannot serve: missing, not writable, or in RAM."""


class CapError(EbbtideError):
    """Host memory, its budget, or the disk has no room; in training such tensors stay on the device, with a warning."""


class BudgetError(EbbtideError):
    """No plan fits the memory budget."""


class TrainingError(EbbtideError):
    """Training cannot continue, for example after a NaN loss."""


class DataError(EbbtideError):
    """A data set, model or run folder that cannot be read."""


class ModifiedInPlaceError(EbbtideError, RuntimeError):
    """A saved tensor was changed in place: ordinary autograd raises RuntimeError here too."""


class RestoreError(EbbtideError, RuntimeError):
    """Restored or recomputed bytes differ from what was saved.

    Recomputed tensors and checkpointed blocks are compared in every run; restored bytes with ``verify=True``.
    """


def note_place(error: BaseException, place: str) -> None:
    """Add to an error where it happened, keeping class and message.

    ``str()`` of an ``EbbtideError`` includes the place, for one-line logs.

    Args:
        error: Any exception.
        place: What was being done, such as ``"while saving ..."``.
    """
    if isinstance(error, EbbtideError):
        error.places.append(place)
    else:
        error.add_note(place)


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Generator[None, None, None]:
    """Call ``undo`` if the code inside raises, also by an interrupt."""
    try:
        yield
    except BaseException:
        undo()
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or what the error is if it has none."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """Return ``did you mean 'a', 'b'?`` for the known names nearest to ``name``, or an empty string."""
    close = nearest_names(name, known, count=count)
    return f"did you mean {', '.join(repr(c) for c in close)}?" if close else ""


def nearest_names(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Return the known names nearest to ``name``, the nearest first.

    Names that contain ``name`` as a whole word (``fsdp`` in ``fsdp_strategy``) rank before similar spellings.
    """
    names = list(known)
    word = re.compile(rf"(?:^|[_:.\-]){re.escape(name)}(?:[_:.\-]|$)", re.IGNORECASE)
    holding = [k for k in names if word.search(k)] if len(name) > 2 and name not in names else []
    close = holding + [k for k in difflib.get_close_matches(name, names, n=count, cutoff=0.5) if k not in holding]
    return close[:count]


def few(names: Iterable[str], *, count: int = 3) -> str:
    """Return the first names as text, and how many more there are."""
    found = list(names)
    return ", ".join(found[:count]) + (f" and {len(found) - count} more" if len(found) > count else "")


def counted(number: int, noun: str) -> str:
    """Return a number of things as text."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def spelled(ranks: Sequence[int]) -> str:
    """Return ranks as text."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
