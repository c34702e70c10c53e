"""Reading a YAML file and flags into a config dataclass.

[Note: one road for values]
A value from the file and a value from a flag take the same road: both become text under a canonical name, flags replace
the file's, and tyro turns the text into the dataclass. So a number in YAML and a number on the command line are judged
by the same rules, and there is one place that knows names, near names and refused flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.extras import require

ConfigT = TypeVar("ConfigT")
Values = dict[str, list[str]]

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_ASKS_FOR_NOTHING = ("none", "null", "", *_FALSE)


def read_arguments(kind: type[ConfigT], argv: Sequence[str], *, prog: str) -> ConfigT | None:
    """Read ``[file.yaml] [--flag value ...]`` into a config.

    Args:
        kind: A dataclass. A class attribute ``unsupported`` may map the names of known flags that this release cannot
            serve to a hint; they are refused unless their value asks for nothing (``none``, ``false``).
        argv: The arguments after the verb.
        prog: The command, for help and hints.

    Returns:
        The config, or ``None`` when help was asked for and printed.

    Raises:
        ConfigError: An unknown key or flag, a flag without its value, a value that cannot be read.
        DataError: The file cannot be read.
    """
    names = _Names(kind, prog)
    if any(argument in ("-h", "--help") for argument in argv):
        with contextlib.suppress(SystemExit):
            _tyro(kind, ["--help"], prog=prog)
        return None
    path, flags = _read_flags(argv, names)
    values = _read_file(path, names) if path is not None else {}
    return _build(kind, {**values, **flags}, prog=prog)


class _Names:
    """The names a config knows, and what each takes."""

    def __init__(self, kind: type[Any], prog: str) -> None:
        self.prog = prog
        hints = typing.get_type_hints(kind)
        self.fields = tuple(field.name for field in dataclasses.fields(kind))
        self.booleans = {name for name in self.fields if hints[name] is bool}
        self.repeatable = {name for name in self.fields if typing.get_origin(hints[name]) is tuple}
        self.unsupported: Mapping[str, str] = getattr(kind, "unsupported", {})

    def canonical(self, written: str, *, what: str) -> str:
        """Return the field's name for what was written; hyphen equals underscore."""
        name = written.replace("-", "_")
        if name in self.fields or name in self.unsupported:
            return name
        close = nearest(name, self.fields)
        raise ConfigError(f"unknown {what} {written!r}", hint=close or f"`{self.prog} --help` lists the flags")

    def accept(self, name: str, values: list[str], *, shown: str) -> bool:
        """Say whether the values are for a field; a refused flag that asks for nothing is not.

        Raises:
            ConfigError: The flag is known, but this release cannot serve it; or a boolean is no boolean.
        """
        if name in self.unsupported:
            if all(value.lower() in _ASKS_FOR_NOTHING for value in values):
                return False
            raise ConfigError(
                f"{shown} {' '.join(values)} is not supported in this release", hint=self.unsupported[name]
            )
        if name in self.booleans:
            word = values[0].lower() if len(values) == 1 else ""
            if word not in _TRUE + _FALSE:
                raise ConfigError(f"{shown} is {' '.join(values)!r}", expected="true or false")
            values[:] = ["True" if word in _TRUE else "False"]
        elif len(values) != 1 and name not in self.repeatable:
            raise ConfigError(f"{shown} has {len(values)} values: {' '.join(values)}", expected="one value")
        return True


def _read_flags(argv: Sequence[str], names: _Names) -> tuple[Path | None, Values]:
    """Split the arguments into the YAML file, if there is one, and the values of each flag."""
    path: Path | None = None
    found: Values = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token.startswith("-") and not token.startswith("--"):
            raise ConfigError(
                f"unknown flag {token!r}", hint=f"flags begin with two hyphens; see `{names.prog} --help`"
            )
        if not token.startswith("--"):
            if path is not None or found:
                raise ConfigError(
                    f"{token!r} stands alone",
                    expected=f"{names.prog} [file.yaml] [--flag value ...]",
                    hint="the file comes first",
                )
            path = Path(token)
            continue
        written, equals, value = token[2:].partition("=")
        name = names.canonical(written, what="flag")
        values = [value] if equals else _following(rest, name, names)
        if not values:
            raise ConfigError(f"--{written} has no value", hint=f"`{names.prog} --help` says what it takes")
        if names.accept(name, values, shown=f"--{written}"):
            found[name] = [*found.get(name, []), *values] if name in names.repeatable else values
    return path, found


def _following(rest: list[str], name: str, names: _Names) -> list[str]:
    """Take the values that belong to a flag off the front of ``rest``."""
    if name in names.booleans or name in names.unsupported:
        takes = bool(rest) and (
            rest[0].lower() in _TRUE + _FALSE if name in names.booleans else not rest[0].startswith("--")
        )
        return [rest.pop(0)] if takes else ["true"]
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (name in names.repeatable or not values):
        values.append(rest.pop(0))
    return values


def _read_file(path: Path, names: _Names) -> Values:
    """Read a YAML file of keys and values."""
    yaml = require("yaml", extra="cli", use="settings in a file")
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise DataError(
            f"there is no file {str(path)!r}", hint=nearest(path.name, others) or "give a YAML file"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {error}", expected="a YAML file of `key: value` lines") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}", expected="`key: value` lines")
    found: Values = {}
    for key, value in typing.cast("dict[Any, Any]", content).items():
        name = names.canonical(str(key), what="key")
        if value is None:
            continue
        items = typing.cast("list[Any]", value) if isinstance(value, list) else [value]
        if not items or any(isinstance(item, (dict, list)) for item in items):
            raise ConfigError(f"{key} in {path} is {value!r}", expected="a value, or a list of values")
        values = [str(item) for item in items]
        if names.accept(name, values, shown=f"{key} in {path}"):
            found[name] = values
    return found


def _build(kind: type[ConfigT], values: Values, *, prog: str) -> ConfigT:
    """Make the config; name the flag whose value cannot be read.

    Tyro reads into a copy of the dataclass without its checks, so that an error raised by a check reaches the user as
    it was written.
    """
    bare = _bare(kind, [field.name for field in dataclasses.fields(typing.cast(Any, kind))])
    read = _try_tyro(bare, values, prog=prog)
    if read is not None:
        return kind(**{field.name: getattr(read, field.name) for field in dataclasses.fields(bare)})
    fields: list[Any] = list(dataclasses.fields(typing.cast(Any, kind)))
    for name in sorted({field.name for field in fields if _required(field)} - set(values)):
        raise ConfigError(f"--{name} is missing", hint=f"`{prog} --help` says what it takes")
    for name, texts in values.items():
        if _try_tyro(_bare(kind, [name]), {name: texts}, prog=prog) is None:
            expected = _in_words(typing.get_type_hints(kind)[name])
            hint = f"`{prog} --help` says what it takes"
            raise ConfigError(f"--{name} is {' '.join(texts)!r}", expected=expected, hint=hint)
    raise ConfigError(f"the values {values} do not make a {kind.__name__}", hint=f"see `{prog} --help`")


def _bare(kind: type[Any], names: Sequence[str]) -> type[Any]:
    """Return a dataclass with some of the fields of ``kind``, and none of its checks."""
    hints = typing.get_type_hints(kind)
    fields = [
        (field.name, hints[field.name], dataclasses.field(default=field.default, default_factory=field.default_factory))
        for field in dataclasses.fields(kind)
        if field.name in names
    ]
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True, kw_only=True)


def _try_tyro(kind: type[Any], values: Values, *, prog: str) -> Any:
    """Let tyro read values; ``None`` when it cannot. Its own account of why is dropped: ours names the flag."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _tyro(kind, _as_flags(kind, values), prog=prog)
    except SystemExit:
        return None


def _required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _in_words(hint: Any) -> str:
    """Say in words what a type takes."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if arguments:
        return " or ".join(_in_words(argument) for argument in arguments if argument not in (type(None), ...))
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


def _as_flags(kind: type[Any], values: Values) -> list[str]:
    """Write values as arguments for tyro; ``=`` keeps a value that begins with a hyphen a value."""
    hints = typing.get_type_hints(kind)
    flags: list[str] = []
    for name, texts in values.items():
        several = typing.get_origin(hints[name]) is tuple
        flags += [f"--{name}", *texts] if several else [f"--{name}={text}" for text in texts]
    return flags


def _tyro(kind: type[Any], flags: list[str], *, prog: str) -> Any:
    """Call tyro the one way this command line does."""
    tyro = require("tyro", extra="cli", use="the command line")
    return tyro.cli(kind, args=flags, prog=prog, config=(tyro.conf.FlagConversionOff,), use_underscores=True)
