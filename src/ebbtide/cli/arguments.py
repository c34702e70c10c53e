"""Read a YAML file and flags into a config dataclass.

[Note: one road for values]
Values of the file and of flags become text under a canonical name, flags override the file, and tyro parses the text
into the dataclass. So YAML and flags follow the same rules, and names, suggestions and unsupported flags are handled in
one place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.base.checks import in_words, known_names
from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.extras import require
from ebbtide.cli.yamlfile import load_settings

ConfigT = TypeVar("ConfigT")

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", re.IGNORECASE | re.DOTALL)
"""hydra's ``section.key=value``, as verl's users write it."""

_ASKS_FOR_NOTHING = ("none", "null", "", *_FALSE)


@dataclass(frozen=True, kw_only=True)
class FlagValue:
    """The values of one name.

    Args:
        shown: How the user wrote it: ``--max-steps``, or ``max_steps in run.yaml``.
        texts: The values.
    """

    shown: str
    texts: list[str]

    @property
    def text(self) -> str:
        """The values as one text."""
        return " ".join(self.texts)


Values = dict[str, FlagValue]


def read_arguments(
    kind: type[ConfigT], argv: Sequence[str], *, prog: str, others: Sequence[str] = ()
) -> ConfigT | None:
    """Read ``[file.yaml] [--flag value ...]`` into a config.

    Args:
        kind: A dataclass. Optional class attributes: ``unsupported`` maps known but unsupported flags to a hint; they
            are rejected unless their value turns them off (``none``, ``false``) or ``granted`` lists it for the name.
            ``aliases`` maps other names to fields; a dotted one is a key inside a section of the file, or
            ``section.key=value``. Fields in ``mappings`` also take a mapping in the file, as JSON.
        argv: The arguments after the verb.
        prog: The command, for help and hints.
        others: Names of flags read elsewhere, used only as suggestions for unknown flags.

    Returns:
        The config, or ``None`` if help was printed.

    Raises:
        ConfigError: An unknown key or flag, a flag without its value or twice, a value that cannot be read.
        DataError: The file cannot be read.
    """
    names = _Names(kind, prog, others)
    if any(argument in ("-h", "--help") for argument in argv):
        with contextlib.suppress(SystemExit):
            _tyro(kind, ["--help"], prog=prog)
        return None
    path, flags = _read_flags(argv, names)
    values = _read_file(path, names) if path is not None else {}
    names.refuse()
    return _build(kind, {**values, **flags}, prog=prog)


class _Names:
    """The names that a config accepts, and the values of each."""

    def __init__(self, kind: type[Any], prog: str, others: Sequence[str]) -> None:
        self.prog, self.others = prog, others
        hints = typing.get_type_hints(kind)
        self.fields = tuple(field.name for field in dataclasses.fields(kind))
        self.booleans = {name for name in self.fields if hints[name] is bool}
        self.repeatable = {name for name in self.fields if _takes_several(hints[name])}
        self.optional = {name for name in self.fields if type(None) in typing.get_args(hints[name])}
        self.unsupported: Mapping[str, str] = getattr(kind, "unsupported", {})
        self.granted: Mapping[str, Sequence[str]] = getattr(kind, "granted", {})
        self.aliases: Mapping[str, str] = getattr(kind, "aliases", {})
        self.mappings: Sequence[str] = getattr(kind, "mappings", ())
        self.refused: dict[str, str] = {}  # as the user wrote it, with its value: the hint

    def known(self, written: str) -> str | None:
        """Return the field of a written name, where hyphen equals underscore; ``None`` if there is none."""
        name = written.replace("-", "_")
        name = self.aliases.get(name, name)
        return name if name in self.fields or name in self.unsupported else None

    def canonical(self, written: str, *, what: str, where: str = "") -> str:
        """Return the field of a written name.

        Raises:
            ConfigError: There is no such field.
        """
        name = self.known(written)
        if name is None:
            # Suggest dotted names for a dotted key, else fields; aliases without a dot are never suggested.
            known = (*self.fields, *self.others, *self.unsupported, *(key for key in self.aliases if "." in key))
            names = [key for key in known if ("." in key) is ("." in written)]
            close = nearest(written.replace("-", "_").lower(), names)
            raise ConfigError(
                f"unknown {what} {written!r}{where}",
                expected=f"a {what} of `{self.prog}`",
                hint=close or f"`{self.prog} --help` lists the flags",
            )
        return name

    def accept(self, name: str, flag: FlagValue) -> FlagValue | None:
        """Return the values for a field, ready to be parsed; ``None`` for a flag that this release cannot serve.

        Unless its value asks for nothing, such a flag is left to ``refuse``.

        Raises:
            ConfigError: A boolean field has another value; a value is empty.
        """
        if name in self.unsupported:
            harmless = (*_ASKS_FOR_NOTHING, *self.granted.get(name, ()))
            if any(value.lower() not in harmless for value in flag.texts):
                self.refused[f"{flag.shown} {flag.text}"] = self.unsupported[name]
            return None
        if name in self.booleans:
            word = flag.texts[0].lower() if len(flag.texts) == 1 else ""
            if word not in _TRUE + _FALSE:
                hint = nearest(word, ("true", "false")) or "yes and no, on and off, 1 and 0 work too"
                raise ConfigError(f"{flag.shown} is {flag.text!r}", expected="true or false", hint=hint)
            return FlagValue(shown=flag.shown, texts=["True" if word in _TRUE else "False"])
        if len(flag.texts) != 1 and name not in self.repeatable:
            raise ConfigError(
                f"{flag.shown} has {len(flag.texts)} values: {flag.text}",
                expected="one value",
                hint="quote a value with spaces",
            )
        if not all(text.strip() for text in flag.texts):
            raise ConfigError(
                f"{flag.shown} is {flag.text!r}", expected="a value", hint=f"leave {name} out for its default"
            )
        return flag

    def refuse(self) -> None:
        """Raise one error for all flags that this release cannot serve: a command of another trainer has several.

        Raises:
            ConfigError: There are any.
        """
        if len(self.refused) == 1:
            [(shown, hint)] = self.refused.items()
            raise ConfigError(f"{shown} is not supported in this release", hint=hint)
        if self.refused:
            raise ConfigError(
                f"{len(self.refused)} flags are not supported in this release",
                hint="\n  ".join(["for each", *(f"{shown}: {hint}" for shown, hint in self.refused.items())]),
            )


def _read_flags(argv: Sequence[str], names: _Names) -> tuple[Path | None, Values]:
    """Split the arguments into the YAML file, if there is one, and the values of each flag."""
    path: Path | None = None
    found: Values = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if override := _OVERRIDE.fullmatch(token):
            _override(override[1], override[2], found, names)
            continue
        if not token.startswith("--"):
            if path is not None or found or token[:1] in ("-", "\u2013", "\u2014"):
                raise _stray(token, names)
            path = Path(token)
            continue
        written, equals, value = token[2:].partition("=")
        name = names.canonical(written, what="flag")
        texts = [value] if equals else _following(rest, name, names)
        if not texts:
            raise ConfigError(
                f"--{written} has no value", expected="a value", hint=f"`{names.prog} --help` shows its values"
            )
        flag = names.accept(name, FlagValue(shown=f"--{written}", texts=texts))
        if flag is None:
            continue
        before = found.get(name)
        if before is not None and name in names.repeatable:
            flag = FlagValue(shown=flag.shown, texts=[*before.texts, *flag.texts])
        elif before is not None and before.texts != flag.texts:
            raise ConfigError(
                f"--{written} is set twice: {before.text}, {flag.text}", expected="one value", hint="leave one out"
            )
        found[name] = flag
    return path, found


def _override(written: str, value: str, found: Values, names: _Names) -> None:
    """Read one ``section.key=value``, hydra's form of a flag."""
    name = names.canonical(written, what="key", where=" (of the form key=value)")
    listed = value[1:-1].split(",") if value[:1] + value[-1:] == "[]" else [value]
    texts = [text.strip().strip("'\"") for text in listed]
    if texts in (["null"], ["None"]):
        return
    flag = names.accept(name, FlagValue(shown=written, texts=texts))
    if flag is None:
        return
    before = found.get(name)
    if before is not None and before.texts != flag.texts:
        raise ConfigError(
            f"{written} is set twice: {before.text}, {flag.text}", expected="one value", hint="leave one out"
        )
    found[name] = flag


def _stray(token: str, names: _Names) -> ConfigError:
    """Return the error for a word that is neither a flag, nor a flag's value, nor the leading file."""
    name, equals, _ = token.lstrip("-\u2013\u2014").partition("=")
    if token[:1] in ("-", "\u2013", "\u2014"):
        hint = f"flags begin with two hyphens; see `{names.prog} --help`"
        if names.known(name):
            hint = f"flags begin with two hyphens: --{name}"
        return ConfigError(f"unknown flag {token!r}", expected=f"a flag of `{names.prog}`", hint=hint)
    hint = f"flags begin with two hyphens: --{token}" if equals and names.known(name) else "the file has to come first"
    return ConfigError(
        f"{token!r} is an unexpected argument", expected=f"{names.prog} [file.yaml] [--flag value ...]", hint=hint
    )


def _following(rest: list[str], name: str, names: _Names) -> list[str]:
    """Remove a flag's values from the front of ``rest`` and return them."""
    if name in names.booleans or name in names.unsupported:
        return [rest.pop(0)] if rest and not rest[0].startswith("--") else ["true"]
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (name in names.repeatable or not values):
        values.append(rest.pop(0))
    return values


def _read_file(path: Path, names: _Names) -> Values:
    """Read a YAML file of keys and values."""
    try:
        content = load_settings(path, example=names.fields[0])
    except FileNotFoundError:
        raise _no_file(path, names) from None
    found: Values = {}
    for key, value in _flat(content, names):
        name = names.canonical(str(key), what="key", where=f" in {path}")
        shown = f"{key} in {path}"
        if name in found:
            raise ConfigError(f"{shown} is set twice", expected="each key once", hint="hyphen equals underscore")
        if value is None:
            if name in names.fields and name not in names.optional:
                raise ConfigError(f"{shown} has no value", expected="a value", hint=f"leave {name} out for its default")
            continue
        if name in names.mappings and isinstance(value, dict):
            value = json.dumps(value)
        items = typing.cast("list[Any]", value) if isinstance(value, list) else [value]
        if name in names.unsupported:
            items = [str(item) for item in items]
        if not items or any(isinstance(item, (dict, list)) or item is None for item in items):
            several = name in names.repeatable
            raise ConfigError(
                f"{shown} is {value!r:.80}",
                expected="a value, or a list of values" if several else "a value",
                hint=f"such as `{key}: [first, second]`" if several else f"such as `{key}: value`",
            )
        flag = names.accept(name, FlagValue(shown=shown, texts=[str(item) for item in items]))
        if flag is not None:
            found[name] = flag
    return found


def _flat(content: Mapping[str, Any], names: _Names) -> list[tuple[str, Any]]:
    """Return keys and values; a section with known dotted names is flattened."""
    found: list[tuple[str, Any]] = []
    dotted = (*names.aliases, *names.unsupported)
    for key, value in content.items():
        if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in dotted):
            inner = {f"{key}.{name}": item for name, item in typing.cast("dict[str, Any]", value).items()}
            found += _flat(inner, names)
        else:
            found.append((str(key), value))
    return found


def _no_file(path: Path, names: _Names) -> DataError:
    """Return the error for a missing YAML file."""
    name = str(path).partition("=")[0]
    others = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = f"flags begin with two hyphens: --{name}" if names.known(name) else nearest(path.name, others)
    usage = f"{names.prog} [file.yaml] [--flag value ...]"
    return DataError(f"there is no file {str(path)!r}", expected=usage, hint=hint or "give a YAML file, or only flags")


def _build(kind: type[ConfigT], values: Values, *, prog: str) -> ConfigT:
    """Make the config; an error names the flag whose value cannot be parsed.

    Tyro parses into a copy of the dataclass without its checks, so errors of the checks reach the user unchanged.
    """
    bare = _bare(kind, [field.name for field in dataclasses.fields(typing.cast(Any, kind))])
    read = _try_tyro(bare, values, prog=prog)
    if read is not None:
        return kind(**{field.name: getattr(read, field.name) for field in dataclasses.fields(bare)})
    fields: list[Any] = list(dataclasses.fields(typing.cast(Any, kind)))
    help_ = f"`{prog} --help` shows its values"
    for name in sorted({field.name for field in fields if _required(field)} - set(values)):
        raise ConfigError(f"--{name} is missing", expected="a value", hint=help_)
    for name, flag in values.items():
        if _try_tyro(_bare(kind, [name]), {name: flag}, prog=prog) is None:
            wanted = typing.get_type_hints(kind)[name]
            hint = nearest(flag.text, known_names(wanted)) or help_
            raise ConfigError(f"{flag.shown} is {flag.text!r}", expected=in_words(wanted), hint=hint)
    shown = {flag.shown: flag.text for flag in values.values()}
    raise ConfigError(f"the values {shown} do not make a {kind.__name__}", hint=help_)


def _bare(kind: type[Any], names: Sequence[str]) -> type[Any]:
    """Return a dataclass with some of the fields of ``kind`` and without its checks."""
    hints = typing.get_type_hints(kind)
    fields = [
        (field.name, hints[field.name], dataclasses.field(default=field.default, default_factory=field.default_factory))
        for field in dataclasses.fields(kind)
        if field.name in names
    ]
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True, kw_only=True)


def _try_tyro(kind: type[Any], values: Values, *, prog: str) -> Any:
    """Parse values with tyro; ``None`` if that fails. Its message is dropped: ours names the flag."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _tyro(kind, _as_flags(kind, values), prog=prog)
    except SystemExit:
        return None


def _takes_several(hint: Any) -> bool:
    """Whether a field takes a list of values, possibly empty."""
    return any(typing.get_origin(kind) is tuple for kind in (hint, *typing.get_args(hint)))


def _required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _as_flags(kind: type[Any], values: Values) -> list[str]:
    """Format values as arguments for tyro; ``=`` protects values that begin with a hyphen."""
    hints = typing.get_type_hints(kind)
    flags: list[str] = []
    for name, flag in values.items():
        several = _takes_several(hints[name])
        flags += [f"--{name}", *flag.texts] if several else [f"--{name}={text}" for text in flag.texts]
    return flags


def _tyro(kind: type[Any], flags: list[str], *, prog: str) -> Any:
    """Call tyro the one way this command line does."""
    tyro = require("tyro", extra="recipes", use=f"`{prog}`")
    config = (tyro.conf.FlagConversionOff,)
    return tyro.cli(kind, args=flags, prog=prog, description=_description(kind), config=config, use_underscores=True)


def _description(kind: type[Any]) -> str:
    """Return the docstring above its fields, in lines of 80; indented, because tyro joins other lines."""
    paragraphs = (inspect.getdoc(kind) or "").partition("\nAttributes:")[0].strip().split("\n\n")
    indent = "  "
    wrap = textwrap.TextWrapper(width=80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(wrap.fill(" ".join(paragraph.split())) for paragraph in paragraphs)
