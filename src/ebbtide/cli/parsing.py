"""The argument parser of ``doctor``, ``report``, ``run`` and ``compare``.

These verbs take words or the user's own command besides flags, for which a config dataclass has no place. Verbs with
settings, ``plan`` and the recipes, read them into one: ``ebbtide.cli.arguments``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ebbtide.base.errors import ConfigError, nearest


class _Store(argparse.Action):
    """Store a value; raise if its flag has another value already, as verbs with settings do."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = namespace.__dict__.setdefault("_set", {}).setdefault(self.dest, values)
        if option_string is not None and before != values:
            found = f"{option_string} is set twice: {before}, {values}"
            raise ConfigError(found, expected="one value", hint="leave one out")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse with this command line's errors and without abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("action", None, _Store)
        self.register("action", "store", _Store)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments and reject unknown ones.

        Raises:
            ConfigError: A flag is unknown or lacks its value, or there is an extra word.
        """
        own, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            close = nearest(unknown[0].partition("=")[0], list(self._option_string_actions))
            raise ConfigError(
                f"unknown argument {unknown[0]!r}",
                expected=f"arguments of `{self.prog}`",
                hint=close or f"`{self.prog} --help` lists the flags",
            )
        return own

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(message, expected=f"arguments of `{self.prog}`", hint=f"`{self.prog} --help` lists the flags")


def choice(name: str, text: str, known: Sequence[str]) -> str:
    """Return a value that must be one of several names.

    Raises:
        ConfigError: It is none of them.
    """
    if text not in known:
        listed = ", ".join(known)
        raise ConfigError(
            f"{name} is {text!r}",
            expected=f"one of {listed}",
            hint=nearest(text, known) or f"such as {name} {known[0]}",
        )
    return text


def count(name: str, text: str) -> int:
    """Return a number that must be 1 or more.

    Raises:
        ConfigError: It is not an integer, or below 1.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}", expected="an integer, 1 or more", hint=f"such as {name} 3")
    return int(text)


def named_folder(flag: str, text: str) -> Path:
    """Return the folder that a flag names; ``~`` is a home folder, which a shell leaves as it is after ``=``.

    Raises:
        ConfigError: The name is empty, as of a variable that is not set, or there is no such home folder.
    """
    if not text.strip():
        raise ConfigError(f"{flag} is {text!r}", expected="a folder", hint=f"leave {flag} out for its default")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        found = f"{flag} is {text!r}, and there is no such home folder"
        raise ConfigError(found, expected="a folder", hint="write its path from / on") from error
