"""Read a YAML file of settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.base.extras import require


class Written(str):
    """A scalar that YAML takes for a truth value, a number or a date, as the file has it: ``no``, ``1.10``, ``0123``.

    Attributes:
        value: What YAML takes it for.
    """

    value: Any


def as_yaml(value: Any) -> Any:
    """Return a value of ``load_settings`` with each ``Written`` as YAML takes it."""
    if isinstance(value, dict):
        return {as_yaml(key): as_yaml(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [as_yaml(inner) for inner in cast("list[Any]", value)]
    return value.value if isinstance(value, Written) else value


def load_settings(path: Path, *, example: str) -> Mapping[Any, Any]:
    """Read ``key: value`` lines; an empty file has none. Scalars that are no text to YAML are ``Written``.

    Args:
        path: The file.
        example: A key, for the hint.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: It cannot be read, or repeats a key.
        ConfigError: It does not consist of keys and values.
    """
    yaml = require("yaml", extra="cli", use="settings in a file")
    try:
        content: Any = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader(yaml))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: bytes that are no text, or no such date
        of_file = "name a file that you may read; a model goes after --model"
        of_lines = "indent with spaces, never with tabs, and put quotes around dates and text with a colon in it"
        raise DataError(
            f"{path} cannot be read: {_why(error)}",
            expected="a YAML file of `key: value` lines, each key once",
            hint=of_file if isinstance(error, OSError) else of_lines,
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a {type(content).__name__}",
            expected="`key: value` lines",
            hint=f"such as `{example}: value`",
        )
    return cast("dict[Any, Any]", content)


def _loader(yaml: Any) -> Any:
    """Return PyYAML's safe loader, which keeps what was written, and takes no key twice: PyYAML takes the last."""

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            made = super().construct_object(node, deep)
            if made is None or not isinstance(node, yaml.ScalarNode) or isinstance(made, str):
                return made
            written = Written(node.value)
            written.value = made
            return written

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is set a second time", key.start_mark
                    )
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Loader


def _why(error: Exception) -> str:
    """Return the reason in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is not None and problem:
        return f"line {mark.line + 1}: {problem}"
    return getattr(error, "strerror", None) or str(error).replace("\n", " ")
