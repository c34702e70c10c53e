"""Values that fit an annotation, and the errors for values that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from ebbtide.base.checks import check_fields, check_value, fits, in_words, known_names
from ebbtide.base.errors import ConfigError

Kind = Literal["full", "lora"]


@pytest.mark.parametrize(
    ("kind", "fitting", "other"),
    [
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [0.5, 3], [True, "0.5", None]),
        (bool, [True, False], [0, 1, "true", None]),
        (str, ["", "a"], [1, None, b"a"]),
        (float | None, [None, 1.5], ["x", False]),
        (Kind, ["full"], ["half", 1, None, ["full"]]),
        (Kind | None, [None, "lora"], ["half"]),
        (tuple[str, ...], [(), ("a", "b")], ["a", ["a"], (1,), None]),
    ],
)
def test_a_value_fits_or_not(kind: Any, fitting: list[Any], other: list[Any]) -> None:
    assert [value for value in fitting if not fits(value, kind)] == []
    assert [value for value in other if fits(value, kind)] == []


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy

    assert fits(numpy.int64(3), int) and fits(numpy.float32(0.5), float) and not fits(numpy.bool_(True), int)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "an integer"),
        (float | None, "a number"),
        (Kind, "one of full, lora"),
        (Kind | None, "one of full, lora"),
        (str | int | None, "text or an integer"),
        (tuple[str, ...], "a tuple of text"),
        (dict, "dict"),
    ],
)
def test_a_kind_in_words(kind: Any, words: str) -> None:
    assert in_words(kind) == words


def test_names_are_found_inside_a_union() -> None:
    assert known_names(Kind | None) == ["full", "lora"]
    assert known_names(str | None) == []


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = 1
    kind: Kind = "full"

    def __post_init__(self) -> None:
        check_fields(self, {"steps": "count from one"})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": "3"}, "steps is '3'; expected an integer\nhint: count from one"),
        ({"kind": "lroa"}, "kind is 'lroa'; expected one of full, lora\nhint: did you mean 'lora'?"),
        ({"kind": "none"}, "kind is 'none'; expected one of full, lora\nhint: such as kind='full'"),
        ({"kind": None}, "kind is None; expected one of full, lora\nhint: leave it out for its default"),
    ],
)
def test_a_field_of_another_kind_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    assert str(caught.value) == text
    assert Settings() == Settings(steps=1)


def test_what_was_found_is_not_printed_for_ever() -> None:
    with pytest.raises(ConfigError) as caught:
        check_value("steps", "x" * 10_000, int)
    assert len(str(caught.value)) < 200
