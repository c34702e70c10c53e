"""Read a YAML file and flags into a config dataclass.

[Note: one path for values]
Values of the file and of flags become text under a canonical name, flags override the file, and tyro parses the text
into the dataclass. So YAML and flags follow the same rules, and names, suggestions and unsupported flags are handled in
one place.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.base.checks import FALSE, NOTHING, TRUE
from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.files import near
from ebbtide.cli.build import FlagValue, Values, build, print_help, takes_several, takes_text
from ebbtide.cli.translation import Translation
from ebbtide.cli.unknown import near_flags, near_keys
from ebbtide.cli.yamlfile import as_yaml, load_settings

ConfigT = TypeVar("ConfigT")

_OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)*)=(.*)", re.IGNORECASE | re.DOTALL)
"""hydra's ``section.key=value``, as verl's users write it; without a section for names that are no flags here."""


def read_arguments(
    kind: type[ConfigT], argv: Sequence[str], *, prog: str, others: Sequence[str] = ()
) -> ConfigT | None:
    """Read ``[file.yaml] [--flag value ...]`` into a config.

    Args:
        kind: A dataclass. Optional class attributes: ``unsupported`` maps known but unsupported flags to a hint; they
            are rejected unless their value turns them off (``none``, ``false``), or is one of ``granted`` for a name
            that has values there; a name that ends in a dot means a section. ``aliases`` maps other names to fields; a
            dotted one is a key inside a section of the file, or ``section.key=value``. ``translated`` has the keys,
            with a description, that the function ``translate`` turns into fields. ``groups`` maps the first parts of
            dotted keys of another program to its name: all of its keys that are in no table are refused in one error.
            ``page`` lists all names. Fields in ``mappings`` also take a mapping in the file, as JSON.
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
        print_help(kind, prog=prog)
        return None
    path, flags = _read_flags(argv, names)
    keys, names.keys = names.keys, {}  # the translated keys of flags; of the file, which they override, come next
    values = _read_file(path, names) if path is not None else {}
    values = names.translate({**names.keys, **keys}, {**values, **flags})
    names.refuse()
    return build(kind, values, prog=prog)


def set_names(kind: type[Any], argv: Sequence[str]) -> set[str]:
    """Return the fields and translated keys that arguments set, outside of the file; see ``read_arguments``."""
    names = _Names(kind, "", ())
    return {name for what, written, _ in _split(argv, names) if what and (name := names.known(written)) is not None}


class _Names:
    """The names that a config accepts, and the values of each."""

    def __init__(self, kind: type[Any], prog: str, others: Sequence[str]) -> None:
        self.prog, self.others = prog, others
        hints = typing.get_type_hints(kind)
        self.fields = tuple(field.name for field in dataclasses.fields(kind))
        self.booleans = {name for name in self.fields if hints[name] is bool}
        self.repeatable = {name for name in self.fields if takes_several(hints[name])}
        self.texts = {name for name in self.fields if takes_text(hints[name])}
        self.optional = {name for name in self.fields if type(None) in typing.get_args(hints[name])}
        self.unsupported: Mapping[str, str] = getattr(kind, "unsupported", {})
        self.granted: Mapping[str, Sequence[str]] = getattr(kind, "granted", {})
        self.aliases: Mapping[str, str] = getattr(kind, "aliases", {})
        self.mappings: Sequence[str] = getattr(kind, "mappings", ())
        self.translated: Mapping[str, str] = getattr(kind, "translated", {})
        self.groups: Mapping[str, str] = getattr(kind, "groups", {})
        self.page: str = getattr(kind, "page", "")
        self.others_keys: tuple[str, ...] = (*self.unsupported, *self.translated)
        self._translate: Callable[[Translation], None] | None = getattr(kind, "translate", None)
        self.keys: Values = {}  # the translated ones, as read
        self.unknown: dict[str, ConfigError] = {}  # another program's keys that are in no table
        self.refused: dict[str, str] = {}  # as the user wrote it, with its value: the hint

    def known(self, written: str) -> str | None:
        """Return the field of a written name, where hyphen equals underscore; ``None`` if there is none."""
        name = written.replace("-", "_")
        name = self.aliases.get(name, name)
        return name if name in self.fields or name in self.others_keys or self.hint(name) else None

    def hint(self, name: str) -> str | None:
        """Return the hint of an unsupported name, or of its section; ``None``: it is not unsupported."""
        section = next((key for key in self.unsupported if key.endswith(".") and name.startswith(key)), "")
        return self.unsupported.get(name) or self.unsupported.get(section)

    def override(self, token: str) -> re.Match[str] | None:
        """Return the key and value of an argument in hydra's form; ``None`` if it is not one."""
        found = _OVERRIDE.fullmatch(token)
        return found if found and ("." in found[1] or found[1] in self.others_keys) else None

    def canonical(self, written: str, *, what: str, where: str = "") -> str:
        """Return the field of a written name, or the name if another program's keys begin like it."""
        name = self.known(written)
        if name is not None:
            return name
        error = self._no_such(written, what, where)
        if not self._program(written):
            raise error
        self.unknown[written] = error
        return written

    def _no_such(self, written: str, what: str, where: str) -> ConfigError:
        """Return the error for a name that is in no table."""
        program = self._program(written)
        close = self._nearest(written)
        if program:
            whose = f"{written.partition('.')[0]} is a section of {program}'s keys, and this one is not translated"
            lists = f"{self.page} lists those that are"
            hint = f"{whose}: {close} {lists}" if close else f"{whose}; {lists}"
        else:
            hint = close or (f"{self.page} lists all names" if self.page else f"`{self.prog} --help` lists the flags")
        return ConfigError(f"unknown {what} {written!r}{where}", expected=f"a {what} of `{self.prog}`", hint=hint)

    def _nearest(self, written: str) -> str:
        """Return the nearest names as a question, or an empty string."""
        names = (*self.fields, *self.others)
        if "." in written:
            return near_keys(written, (key for key in (*self.others_keys, *self.aliases) if "." in key), names)
        aliases = {key: field for key, field in self.aliases.items() if "." not in key}
        return near_flags(written, (*names, *(key for key in self.others_keys if "." not in key)), aliases)

    def _program(self, written: str) -> str | None:
        """Return the program whose keys begin like a dotted name; ``None``: no such program."""
        group, dot, _ = written.partition(".")
        return self.groups.get(group) if dot else None

    def accept(self, name: str, flag: FlagValue) -> FlagValue | None:
        """Return the values for a field, ready to be parsed; ``None`` for a name that is no field."""
        # A translated key is left to `translate`, and a flag that this release cannot serve to `refuse`, unless its
        # value requests nothing.
        if name in self.unknown:
            program, close = self._program(name), self._nearest(name)
            self.refused[f"{flag.shown} {flag.text}"] = f"{program}'s, and not translated{': ' if close else ''}{close}"
            return None
        if name in self.translated:
            _add(self.keys, name, flag)
            return None
        if (hint := self.hint(name)) is not None:
            harmless = (*NOTHING, *self.granted.get(name, FALSE))
            if any(value.lower() not in harmless for value in flag.texts):
                self.refused[f"{flag.shown} {flag.text}"] = hint
            return None
        if name in self.booleans:
            word = flag.texts[0].lower() if len(flag.texts) == 1 else ""
            if word not in TRUE + FALSE:
                hint = nearest(word, ("true", "false")) or "yes and no, on and off, 1 and 0 work too"
                raise ConfigError(f"{flag.shown} is {flag.text!r}", expected="true or false", hint=hint)
            return FlagValue(shown=flag.shown, texts=["True" if word in TRUE else "False"])
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

    def translate(self, keys: Values, values: Values) -> Values:
        """Return the values of fields with those that translated keys set."""
        if self._translate is None or not keys:
            return values
        translation = Translation(keys, values)
        self._translate(translation)
        for key, hint in translation.refused.items():
            self.refused[f"{keys[key].shown} {keys[key].text}"] = hint
        return translation.values

    def refuse(self) -> None:
        """Raise one error for all flags that this release cannot serve: another trainer's command has several."""
        if len(self.refused) == 1 and self.unknown:
            [error] = self.unknown.values()
            raise error
        expected = f"flags that `{self.prog} --help` shows"
        if len(self.refused) == 1:
            [(shown, hint)] = self.refused.items()
            raise ConfigError(f"{shown} is not supported in this release", expected=expected, hint=hint)
        if self.refused:
            lines = [f"{shown}: {hint}" for shown, hint in self.refused.items()]
            lines += [f"{self.page} lists the keys that are translated"] if self.unknown else []
            what = "unknown or not supported" if self.unknown else "not supported"
            raise ConfigError(
                f"{len(self.refused)} flags are {what} in this release",
                expected=expected,
                hint="\n  ".join(["for each", *lines]),
            )


def _read_flags(argv: Sequence[str], names: _Names) -> tuple[Path | None, Values]:
    """Split the arguments into the YAML file, if there is one, and the values of each flag."""
    path: Path | None = None
    found: Values = {}
    for what, written, texts in _split(argv, names):
        if what == "key":
            _override(written, texts[0], found, names)
            continue
        if not what:
            if path is not None or found or written[:1] in ("-", "\u2013", "\u2014"):
                raise _stray(written, names)
            path = Path(written)
            continue
        name = names.canonical(written, what="flag")
        if not texts:
            raise ConfigError(
                f"--{written} has no value", expected="a value", hint=f"`{names.prog} --help` shows its values"
            )
        flag = names.accept(name, FlagValue(shown=f"--{written}", texts=texts))
        if flag is None:
            continue
        if name in names.repeatable and name in found:
            found[name] = FlagValue(shown=flag.shown, texts=[*found[name].texts, *flag.texts])
        else:
            _add(found, name, flag)
    return path, found


def _split(argv: Sequence[str], names: _Names) -> Iterator[tuple[str, str, list[str]]]:
    """Yield arguments: "key", its name and value; "flag", its name and values; or "" and another word."""
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if override := names.override(token):
            yield "key", override[1], [override[2]]
        elif token.startswith("--"):
            written, equals, value = token[2:].partition("=")
            yield "flag", written, [value] if equals else _following(rest, names.known(written) or written, names)
        else:
            yield "", token, []


def _override(written: str, value: str, found: Values, names: _Names) -> None:
    """Read one ``section.key=value``, hydra's form of a flag."""
    name = names.canonical(written, what="key", where=" (of the form key=value)")
    listed = value[1:-1].split(",") if value[:1] + value[-1:] == "[]" else [value]
    texts = [text.strip().strip("'\"") for text in listed]
    if texts in (["null"], ["None"]) and name not in names.unknown:
        return
    flag = names.accept(name, FlagValue(shown=written, texts=texts))
    if flag is not None:
        _add(found, name, flag)


def _add(found: Values, name: str, flag: FlagValue) -> None:
    before = found.setdefault(name, flag)
    if before.texts != flag.texts:
        what = f"{flag.shown} is set twice: {before.text}, {flag.text}"
        raise ConfigError(what, expected="one value", hint="leave one out")


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
    if name in names.booleans or name not in names.fields:
        return [rest.pop(0)] if rest and not rest[0].startswith("--") else ["true"]
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (name in names.repeatable or not values):
        values.append(rest.pop(0))
    return values


def _read_file(path: Path, names: _Names) -> Values:
    try:
        content = load_settings(path, example=names.fields[0])
    except FileNotFoundError:
        raise _no_file(path, names) from None
    found: Values = {}
    for key, value in _flat(content, names):
        name = names.canonical(str(key), what="key", where=f" in {path}")
        shown = f"{key} in {path}"
        if name not in names.texts:  # a text is taken as it was written: no is not False
            value = as_yaml(value)
        if name in names.unknown:
            names.accept(name, FlagValue(shown=shown, texts=[str(value)]))
            continue
        if name in found:
            raise ConfigError(f"{shown} is set twice", expected="each key once", hint="hyphen equals underscore")
        if value is None:
            if name in names.fields and name not in names.optional:
                raise ConfigError(f"{shown} has no value", expected="a value", hint=f"leave {name} out for its default")
            continue
        if name in names.mappings and isinstance(value, dict):
            value = json.dumps(as_yaml(value))
        items = typing.cast("list[Any]", value) if isinstance(value, list) else [value]
        if name not in names.fields:
            items = [str(item) for item in items]
        if not items or any(isinstance(item, (dict, list)) or item is None for item in items):
            several = name in names.repeatable
            raise ConfigError(
                f"{shown} is {as_yaml(value)!r:.80}",
                expected="a value, or a list of values" if several else "a value",
                hint=f"such as `{key}: [first, second]`" if several else f"such as `{key}: value`",
            )
        flag = names.accept(name, FlagValue(shown=shown, texts=[str(item) for item in items]))
        if flag is not None:
            found[name] = flag
    return found


def _flat(content: Mapping[str, Any], names: _Names) -> list[tuple[str, Any]]:
    """Return keys and values; a section with known dotted names, or of another program's, is flattened."""
    found: list[tuple[str, Any]] = []
    dotted = (*names.aliases, *names.others_keys)
    for key, value in content.items():
        group = str(key).partition(".")[0] in names.groups
        if isinstance(value, dict) and (group or any(name.startswith(f"{key}.") for name in dotted)):
            inner = {f"{key}.{name}": item for name, item in typing.cast("dict[str, Any]", value).items()}
            found += _flat(inner, names)
        else:
            found.append((str(key), value))
    return found


def _no_file(path: Path, names: _Names) -> DataError:
    name = str(path).partition("=")[0]
    hint = f"flags begin with two hyphens: --{name}" if names.known(name) else near(path, "*.y*ml")
    usage = f"{names.prog} [file.yaml] [--flag value ...]"
    return DataError(
        f"there is no file {str(path)!r}", expected=usage, hint=hint or "name a YAML file, or pass only flags"
    )
