"""Functions of a user's file, named on the command line as ``path.py:function``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.files import near


def load_function(place: str, names: Sequence[str], *, what: str, example: str) -> Callable[..., Any]:
    """Return the first of several functions that a file has.

    Args:
        place: The file's path.
        names: The functions' names, in order of preference.
        what: Description for errors, such as "a reward function".
        example: An example function, for hints.

    Raises:
        ConfigError: There is no such file or function, or the file cannot be imported.
    """
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"there is no file {place!r} with {what}",
            expected="path.py:function",
            hint=near(path, "*.py") or f"looked in {path.parent.resolve()}",
        )
    found = vars(_module(path))
    for name in names:
        if callable(found.get(name)):
            return found[name]
    functions = [key for key, value in found.items() if inspect.isfunction(value)]
    raise ConfigError(
        f"{place} has no function {' or '.join(repr(name) for name in names)}",
        expected=f"one of {', '.join(functions) or 'its functions, and it has none'}",
        hint=nearest(names[0], functions) or f"such as {example}",
    )


def _module(path: Path) -> Any:
    """Import a file once, as a module: what it defines can be pickled, and it finds the files in its folder."""
    # Its folder stays at the end of `sys.path`, for imports inside its functions.
    path = path.resolve()
    folder, name = str(path.parent), f"{path.stem}_of_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported", expected="a Python file", hint="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if not isinstance(error, Exception):
            raise
        raise ConfigError(
            f"{path} cannot be imported: {type(error).__name__}: {error}",
            expected="a file that Python imports",
            hint=f"`python {path}` shows where it fails",
        ) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.append(folder)
    return module
