"""Ranks that load one model succeed together, or raise the same error.

[Note: together]
Loading has points at which ranks wait for each other: whether the arguments can be used, what each sees of the
checkpoint, whether it fits, whether it was read. A rank that failed brings its error to the next point, so no other
waits for it in a collective; all ranks raise what any raised. The exchange itself is passed in: without a collective,
through the store that started the process group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ebbtide.base import errors
from ebbtide.base.errors import ConfigError, DataError, EbbtideError, spelled

Meet = Callable[[Sequence[int], str, str], Mapping[int, str]]
"""Meets ranks about something with a text; returns the text of each rank, or of this one alone if all are equal."""
SAME_TENSORS = "one shape and dtype of a name on all ranks that have it"
"""What ranks expect of each other's tensors."""


class Ranks:
    """The ranks that load together: those of the default process group, or this process alone."""

    def __init__(self, meet: Meet) -> None:
        alone = not dist.is_available() or not dist.is_initialized()
        self.me = 0 if alone else dist.get_rank()
        self.count = 1 if alone else dist.get_world_size()
        self._meet = meet

    def run_on_all_ranks(self, about: str, act: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run a function on every rank and return each rank's result; raise the same error on all if any fails.

        Args:
            about: In words that finish "rank 1 did not ...".
            act: Returns JSON-able values.

        Raises:
            EbbtideError: It failed here or on any other rank: the same error on all.
        """
        failure: BaseException | None = None
        answer: dict[str, Any] = {}
        try:
            answer = {"result": act()}
        except BaseException as error:
            failure, answer = error, {"error": _described(error)}
        if self.count == 1:
            if failure is not None:
                raise failure
            return [answer["result"]]
        answers = self._meet(range(self.count), about, json.dumps(answer))
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        everybody = [json.loads(answers.get(rank, answers[self.me])) for rank in range(self.count)]
        error = _common({rank: one["error"] for rank, one in enumerate(everybody) if "error" in one}, self.count)
        if error is not None:
            raise error from failure
        return [one["result"] for one in everybody]


def same_on_all_ranks(
    tables: Sequence[Mapping[str, Any]],
    *,
    expected: str,
    hint: str,
    spell: Callable[[Any], str] = str,
    error: type[EbbtideError] = ConfigError,
) -> dict[str, tuple[int, Any]]:
    """Return, by name, the first rank that has a value and the value.

    Args:
        tables: By rank, its values by name.
        expected: For the error.
        hint: For the error.
        spell: Returns a value as text.
        error: What is raised.

    Raises:
        EbbtideError: A name has another value on another rank.
    """
    found: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(tables):
        for name, value in values.items():
            first, before = found.setdefault(name, (rank, value))
            if value != before:
                text = f"{name!r} is {spell(before)} on rank {first} and {spell(value)} on rank {rank}"
                raise error(text, expected=expected, hint=hint)
    return found


def _described(error: BaseException) -> dict[str, str]:
    if isinstance(error, EbbtideError):
        text = "\n".join([error.found, *error.places])
        return {"kind": type(error).__name__, "found": text, "expected": error.expected, "hint": error.hint}
    found = "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())])
    hint = "the rank where this happened shows the traceback above this error"
    if isinstance(error, MemoryError) or "memory" in str(error):
        hint = "use more memory for that rank, or more ranks"
    return {"kind": "DataError", "found": found, "expected": "a call that succeeds on every rank", "hint": hint}


def _common(failed: Mapping[int, dict[str, str]], count: int) -> EbbtideError | None:
    """Return one error for the errors of several ranks; the same on each of them."""
    if not failed:
        return None
    first = next(iter(failed.values()))
    texts = {rank: error["found"] for rank, error in failed.items()}
    everywhere = len(failed) == count and len({*texts.values()}) == 1
    found = first["found"] if everywhere else by_rank(texts)
    kind: Any = getattr(errors, first["kind"], DataError)
    return kind(found, expected=first["expected"], hint=first["hint"])


def by_rank(texts: Mapping[int, str]) -> str:
    """Return texts with the ranks that have them: ``rank 0: one; ranks 1, 2: another``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{spelled(ranks)}: {text}" for text, ranks in ranks_of.items())
