"""Keys of another program whose values become those of one or more fields, or that are read together with others."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.base.checks import FALSE, NOTHING, TRUE
from ebbtide.base.errors import ConfigError
from ebbtide.cli.build import FlagValue, Values


class Translation:
    """The keys that a command or a file has, and the fields that they set.

    Args:
        keys: The keys, with the user's values.
        values: The values of the fields, as flags, aliases and the file set them.
    """

    def __init__(self, keys: Mapping[str, FlagValue], values: Values) -> None:
        self.keys = {key: flag for key, flag in keys.items() if flag.text.lower() not in NOTHING}
        self.values = dict(values)
        self.refused: dict[str, str] = {}

    def texts(self, key: str) -> list[str]:
        """Return the values of a key; empty: it is not set."""
        return self.keys[key].texts if key in self.keys else []

    def text(self, key: str) -> str | None:
        """Return the value of a key as the user wrote it; ``None``: it is not set."""
        return self.keys[key].text if key in self.keys else None

    def truth(self, key: str) -> bool | None:
        """Return the value of a key that is true or false; ``None``: it is not set.

        Raises:
            ConfigError: It is neither.
        """
        word = (self.text(key) or "").lower()
        if key in self.keys and word not in TRUE + FALSE:
            raise ConfigError(self.shown(key), expected="true or false", hint=f"{key}=true, or leave it out")
        return word in TRUE if key in self.keys else None

    def number(self, key: str, *, least: int | None = None) -> int | None:
        """Return the whole number of a key; ``None``: it is not set.

        Raises:
            ConfigError: It is no whole number, or below ``least``.
        """
        if key not in self.keys:
            return None
        text = self.keys[key].text
        if not text.removeprefix("-").isdecimal() or (least is not None and int(text) < least):
            expected = "a whole number" if least is None else f"{least} or more"
            raise ConfigError(self.shown(key), expected=expected, hint=f"leave {key} out for the default")
        return int(text)

    def field(self, name: str, default: int) -> int:
        """Return the whole number of a field as the flags set it, else its default.

        Raises:
            ConfigError: It is no whole number above zero.
        """
        if name not in self.values:
            return default
        flag = self.values[name]
        if not flag.text.isdecimal() or int(flag.text) < 1:
            raise ConfigError(
                f"{flag.shown} is {flag.text!r}", expected="1 or more", hint=f"leave {name} out for its default"
            )
        return int(flag.text)

    def shown(self, key: str) -> str:
        """Return a key and its value, for errors."""
        return f"{self.keys[key].shown} is {self.keys[key].text!r}"

    def set(self, field: str, *texts: str, of: str) -> None:
        """Set a field.

        Args:
            field: The field.
            texts: Its values; ``True`` or ``False`` for one that is true or false.
            of: The key that means this.

        Raises:
            ConfigError: The field has another value already.
        """
        before = self.values.get(field)
        if before is not None and before.texts != list(texts):
            raise ConfigError(
                f"{self.shown(of)}, which sets {field} to {' '.join(texts)}, and {before.shown} is {before.text!r}",
                expected="one value",
                hint="leave one of the two out",
            )
        self.values[field] = FlagValue(shown=self.keys[of].shown, texts=list(texts))

    def unset(self, field: str, *, of: str) -> None:
        """Leave a field at its default.

        Raises:
            ConfigError: The field is set.
        """
        if field in self.values:
            before = self.values[field]
            raise ConfigError(
                f"{self.shown(of)}, and {before.shown} is {before.text!r}",
                expected="one value",
                hint="leave one of the two out",
            )

    def drop(self, field: str) -> None:
        """Leave a field at its default, whatever was set."""
        self.values.pop(field, None)

    def refuse(self, key: str, hint: str) -> None:
        """Add a key to those that are refused by name, all in one error."""
        self.refused[key] = hint
