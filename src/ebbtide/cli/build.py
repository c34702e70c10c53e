"""Make a config dataclass from text with tyro. See [Note: one path for values] in ``arguments.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ebbtide.base.checks import in_words, known_names
from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.extras import require

ConfigT = TypeVar("ConfigT")


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


def build(kind: type[ConfigT], values: Values, *, prog: str) -> ConfigT:
    """Make the config; an error names the flag whose value cannot be parsed.

    Tyro parses into a copy of the dataclass without its checks, so errors of the checks reach the user unchanged.
    """
    bare = _bare(kind, [field.name for field in dataclasses.fields(typing.cast(Any, kind))])
    read = _try_tyro(bare, values, prog=prog)
    if read is not None:
        return kind(**{field.name: getattr(read, field.name) for field in dataclasses.fields(bare)})
    fields: list[Any] = list(dataclasses.fields(typing.cast(Any, kind)))
    help_ = f"`{prog} --help` shows its values"
    missing = dataclasses.MISSING
    required = {field.name for field in fields if field.default is missing and field.default_factory is missing}
    for name in sorted(required - set(values)):
        raise ConfigError(f"--{name} is missing", expected="a value", hint=help_)
    for name, flag in values.items():
        if _try_tyro(_bare(kind, [name]), {name: flag}, prog=prog) is None:
            wanted = typing.get_type_hints(kind)[name]
            hint = nearest(flag.text, known_names(wanted)) or help_
            raise ConfigError(f"{flag.shown} is {flag.text!r}", expected=in_words(wanted), hint=hint)
    shown = {flag.shown: flag.text for flag in values.values()}
    found = f"the values {shown} do not make a {kind.__name__}"
    raise ConfigError(found, expected="values that go together", hint=help_)


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
            return _call_tyro(kind, _as_flags(kind, values), prog=prog)
    except SystemExit:
        return None


def takes_several(hint: Any) -> bool:
    """Whether a field takes a list of values, possibly empty."""
    return any(typing.get_origin(kind) is tuple for kind in (hint, *typing.get_args(hint)))


def takes_text(hint: Any) -> bool:
    """Whether a field takes texts or words, and no truth value or number."""
    return hint not in (bool, int, float) and all(takes_text(kind) for kind in typing.get_args(hint))


def _as_flags(kind: type[Any], values: Values) -> list[str]:
    """Format values as arguments for tyro; ``=`` protects values that begin with a hyphen."""
    hints = typing.get_type_hints(kind)
    flags: list[str] = []
    for name, flag in values.items():
        several = takes_several(hints[name])
        flags += [f"--{name}", *flag.texts] if several else [f"--{name}={text}" for text in flag.texts]
    return flags


def print_help(kind: type[Any], *, prog: str) -> None:
    """Print the flags of a config; of those whose default is ``None``, the text alone describes the default."""
    tyro, hints = require("tyro", extra="recipes", use=f"`{prog}`"), typing.get_type_hints(kind)
    fields: list[Any] = []
    for name in (field.name for field in dataclasses.fields(kind) if field.default is None):
        shown = tyro.conf.arg(help_behavior_hint="", metavar="[STR [STR ...]]" if takes_several(hints[name]) else None)
        fields.append((name, typing.Annotated[hints[name], shown], dataclasses.field(default=None)))
    bases = (kind,)  # whose docstrings tyro reads
    described = dataclasses.make_dataclass(kind.__name__, fields, bases=bases, frozen=True, kw_only=True)
    with contextlib.suppress(SystemExit):
        _call_tyro(described, ["--help"], prog=prog, description=_description(kind))


def _call_tyro(kind: type[Any], flags: list[str], *, prog: str, description: str = "") -> Any:
    tyro = require("tyro", extra="recipes", use=f"`{prog}`")
    config = (tyro.conf.FlagConversionOff, *([tyro.conf.DisallowNone] if description else []))
    return tyro.cli(kind, args=flags, prog=prog, description=description, config=config, use_underscores=True)


def _description(kind: type[Any]) -> str:
    """Return the docstring above its fields, in lines of 80; indented, because tyro joins other lines."""
    paragraphs = (inspect.getdoc(kind) or "").partition("\nAttributes:")[0].strip().split("\n\n")
    indent = "  "
    wrap = textwrap.TextWrapper(width=80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(wrap.fill(" ".join(paragraph.split())) for paragraph in paragraphs)
