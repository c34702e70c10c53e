"""Check values against annotations, and describe annotations in words."""

from __future__ import annotations

import dataclasses
import numbers
import os
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ebbtide.base.errors import ConfigError, nearest

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
"""Words of files and of other programs' keys."""
NOTHING = ("none", "null", "")
"""Words that leave such a key unset."""

_KINDS = {
    bool: ("true or false", "pass True or False"),
    int: ("an integer", "pass a whole number, such as 3"),
    float: ("a number", "pass a number, such as 0.5"),
    str: ("text", "pass text, in quotes"),
}
"""A class in words, and how to pass such a value."""
_LEAVE_OUT = "leave it out for its default"
_ABSTRACT = {int: numbers.Integral, float: numbers.Real}
"""Other packages' numbers are accepted as numbers; their booleans are not."""


def in_words(kind: Any) -> str:
    """Describe the values that an annotation allows.

    Args:
        kind: A class, ``Literal``, a union, or a tuple of one type.
    """
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is tuple:
        return f"a tuple of {in_words(arguments[0])}"
    if arguments:
        return " or ".join(in_words(argument) for argument in arguments if argument is not type(None))
    return _KINDS[kind][0] if kind in _KINDS else getattr(kind, "__name__", str(kind))


def fits(value: object, kind: Any) -> bool:
    """Whether a value matches an annotation."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in arguments
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(fits(item, arguments[0]) for item in typing.cast("Any", value))
    if arguments:
        return any(fits(value, argument) for argument in arguments)
    if kind in _ABSTRACT:
        return isinstance(value, _ABSTRACT[kind]) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_value(name: str, value: object, kind: Any, *, advice: str = "") -> None:
    """Raise if a value does not match an annotation.

    Args:
        name: The name of the value, for the error.
        value: The value.
        kind: An annotation, as ``in_words`` takes it.
        advice: The hint if no known name is similar.

    Raises:
        ConfigError: It does not match.
    """
    if fits(value, kind):
        return
    hint = ""
    if isinstance(value, str) and (known := known_names(kind)):
        hint = nearest(value, known) or advice or f"such as {name}={known[0]!r}"
    if not hint and not advice:
        advice = (
            "pass the value itself, without quotes" if isinstance(value, str) else _KINDS.get(kind, ("", _LEAVE_OUT))[1]
        )
    raise ConfigError(f"{name} is {value!r:.80}", expected=in_words(kind), hint=hint or advice)


def check_path(name: str, value: object, *, hint: str) -> None:
    """Raise if a value is no path, or an empty one, as of a variable that is not set.

    Args:
        name: The name of the value, for the error.
        value: The value.
        hint: The hint.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value).strip():
        raise ConfigError(f"{name} is {value!r:.80}", expected="a path", hint=hint)


def check_fields(values: Any, advice: Mapping[str, str] | None = None) -> None:
    """Raise if a field of a dataclass does not match its annotation.

    Args:
        values: An instance of a dataclass.
        advice: Field → hint if no known name is similar.

    Raises:
        ConfigError: A field does not match.
    """
    kinds = typing.get_type_hints(type(values))
    for field in dataclasses.fields(values):
        hint = (advice or {}).get(field.name, "")
        check_value(field.name, getattr(values, field.name), kinds[field.name], advice=hint)


def known_names(kind: Any) -> list[str]:
    """Return the names in an annotation's ``Literal``, which may be inside a union."""
    if typing.get_origin(kind) is Literal:
        return [str(argument) for argument in typing.get_args(kind)]
    return [name for argument in typing.get_args(kind) for name in known_names(argument)]
