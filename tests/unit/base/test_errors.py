from __future__ import annotations

import pickle

import pytest

from ebbtide.base import errors
from ebbtide.base.errors import EbbtideError, counted, first_line, nearest

ALL = sorted(
    (x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, EbbtideError)), key=lambda x: x.__name__
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "window is 0"),
        ({"expected": "a size"}, "window is 0; expected a size"),
        ({"hint": "leave it out"}, "window is 0\nhint: leave it out"),
        ({"expected": "a size", "hint": "leave it out"}, "window is 0; expected a size\nhint: leave it out"),
    ],
)
def test_message_says_found_expected_and_hint(arguments: dict[str, str], text: str) -> None:
    assert str(EbbtideError("window is 0", **arguments)) == text


@pytest.mark.parametrize("error", ALL, ids=lambda x: x.__name__)
def test_every_error_survives_pickling(error: type[EbbtideError]) -> None:
    # Errors cross process borders: distributed runs, `compare`, data loader workers.
    one = error("found", expected="expected", hint="hint")
    again = pickle.loads(pickle.dumps(one))
    assert type(again) is error
    assert (str(again), again.found, again.hint) == (str(one), one.found, one.hint)


@pytest.mark.parametrize(
    ("error", "also"),
    [
        ("ConfigError", ValueError),
        ("DiskError", OSError),
        ("DiskFullError", OSError),
        ("ModifiedInPlaceError", RuntimeError),
        ("RestoreError", RuntimeError),
    ],
)
def test_errors_are_what_callers_already_catch(error: str, also: type[Exception]) -> None:
    cls = getattr(errors, error)
    with pytest.raises(also, match="found") as caught:
        raise cls("found", expected="expected", hint="hint")
    assert getattr(caught.value, "errno", None) is None


def test_disk_full_is_a_disk_error_is_a_target_error() -> None:
    assert issubclass(errors.DiskFullError, errors.DiskError)
    assert issubclass(errors.DiskError, errors.TargetError)


def test_the_note_names_every_error_and_its_parent() -> None:
    for error in ALL:
        assert f"{error.__name__} " in errors.__doc__ or f"{error.__name__}\n" in errors.__doc__, error
        assert error.__doc__


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("max_slowdwn", ["max_slowdown", "min_bytes"], "did you mean 'max_slowdown'?"),
        ("fsdp3", ["fsdp", "fsdp2", "ddp"], "did you mean 'fsdp', 'fsdp2', 'ddp'?"),
        ("zzz", ["fsdp", "fsdp2"], ""),
        ("fsdp", ["fp16", "fsdp_strategy", "fsdp_config"], "did you mean 'fsdp_strategy', 'fsdp_config', 'fp16'?"),
        ("pydoc", ["builtin:pydoc", "other"], "did you mean 'builtin:pydoc'?"),
        ("", ["a_b", "c"], ""),
        ("x", [], ""),
    ],
)
def test_nearest_suggests_only_what_is_near(name: str, known: list[str], text: str) -> None:
    assert nearest(name, known) == text


def test_nearest_takes_no_more_than_count() -> None:
    assert nearest("ab1", ["ab2", "ab3", "ab4"], count=1).count("ab") == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("\n one\ntwo"), "one"),
        (EOFError(), "EOFError()"),
        (OSError(" \n"), repr(OSError(" \n"))),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(error: Exception, text: str) -> None:
    assert first_line(error) == text


def test_numbers_of_things_are_words() -> None:
    numbers = [counted(1, "block"), counted(2, "block"), counted(1, "micro-batch"), counted(0, "micro-batch")]
    assert numbers == ["1 block", "2 blocks", "1 micro-batch", "0 micro-batches"]


def test_a_sentence_of_another_library_has_one_end() -> None:
    assert str(EbbtideError("It failed.", expected="a file")) == "It failed; expected a file"
