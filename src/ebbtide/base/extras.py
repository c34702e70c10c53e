"""Packages that are not needed until a feature is used, and the extra that installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from ebbtide.base.errors import EbbtideError


def require(module: str, *, extra: str, use: str) -> ModuleType:
    """Import a package of an extra.

    Args:
        module: Its import name.
        extra: The extra of ebbtide that installs it.
        use: What needs it; stands in the error.

    Raises:
        EbbtideError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EbbtideError(
            f"{module} is not installed", expected=f"{module} for {use}", hint=f"pip install 'ebbtide[{extra}]'"
        ) from error
