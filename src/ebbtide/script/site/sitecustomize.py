"""Python imports this when a process of a switched command starts: see [Note: any script].

The environment's own ``sitecustomize`` is run as well, and torch is never imported early.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent


class _WaitForTorch:
    """Finds torch normally, and arms the switch once torch's import is complete."""

    def __init__(self) -> None:
        self._finding = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return torch's spec with a watched loader; ``None`` for other modules."""
        if name != "torch" or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: object) -> None:
        """Extend the loader, which remains torch's own, for example for reading its source."""
        execute = loader.exec_module  # pyright: ignore[reportAttributeAccessIssue]

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _arm()

        loader.exec_module = exec_module  # pyright: ignore[reportAttributeAccessIssue]


def _arm() -> None:
    """Import the switch, now that torch is imported."""
    try:
        switch = importlib.import_module("ebbtide.script.switch")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("ebbtide"):
            raise
        raise SystemExit(
            f"error: {sys.executable} imported torch and cannot import {error.name}; expected the ebbtide that runs "
            f"this command to be installed there too\nhint: {sys.executable} -m pip install ebbtide"
        ) from None
    switch.arm()


def _chain() -> None:
    """Run the ``sitecustomize`` that this one hides; Python reports its errors."""
    elsewhere = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(_HERE)]
    sys.path[:] = elsewhere
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "EBBTIDE_SCRIPT" in os.environ:
    sys.meta_path.insert(0, _WaitForTorch())  # pyright: ignore[reportArgumentType]
_chain()
