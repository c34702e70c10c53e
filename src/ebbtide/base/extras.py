"""Optional packages: whether they are installed and new enough, and how to get them.

[Note: one bound per package]
The oldest tested version of a package is in ``pyproject.toml`` and is read from the installed metadata. pip enforces it
only at installation, and a package downgraded later would fail with a missing attribute somewhere in a step. So the
version is checked once, from metadata and without an import, where a package is first used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from types import ModuleType

from ebbtide.base.errors import EbbtideError

BUILDS = (
    "torchvision was built for another torch: reinstall it from torch's package index, or pip uninstall torchvision"
)
"""``pip check`` finds nothing wrong with a CPU build of torch and a CUDA build of torchvision."""


def require(module: str, *, extra: str, use: str) -> ModuleType:
    """Import a package of an extra.

    Args:
        module: Its import name.
        extra: The extra of ebbtide that installs it.
        use: The feature that needs it, for the error.

    Raises:
        EbbtideError: It is not installed, too old, or cannot be imported.
    """
    check_version(module)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != module:
            reason = _reason(error)
            raise EbbtideError(
                f"{module} is installed but cannot be imported ({reason})",
                expected=f"{module} for {use}",
                hint=BUILDS if "torchvision::" in reason else "`pip check` names incompatible packages",
            ) from error
        raise _absent(module, extra, use) from error


def check_installed(module: str, *, extra: str, use: str) -> None:
    """Check a package of an extra like ``require``, without the seconds that its import may take.

    Raises:
        EbbtideError: It is not installed, or too old.
    """
    check_version(module)
    if importlib.util.find_spec(module) is None:
        raise _absent(module, extra, use)


@functools.cache
def check_version(package: str) -> None:
    """Raise if a package is older than the oldest tested version. See [Note: one bound per package].

    Raises:
        EbbtideError: It is installed, and too old.
    """
    bound, found = oldest(package), installed(package)
    if bound is not None and found is not None and is_older(found, bound):
        raise EbbtideError(
            f"{package} {found} is installed",
            expected=f"{bound} or newer",
            hint=f"pip install --upgrade '{package}>={bound}'; docs/reference/versions.md lists the tested versions",
        )


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def oldest(package: str) -> str | None:
    """Return the oldest version of a package that ebbtide's metadata allows; None if there is no bound."""
    try:
        requirements = importlib.metadata.requires("ebbtide") or []
    except importlib.metadata.PackageNotFoundError:  # run from source, not installed
        return None
    bounds = (re.match(rf"{re.escape(package)}\s*>=\s*([\d.]+)", line, re.IGNORECASE) for line in requirements)
    return next((bound[1] for bound in bounds if bound), None)


def is_older(version: str, bound: str) -> bool:
    """Whether a version is below a bound; a pre-release counts as its release."""
    return _numbers(version) < _numbers(bound)


def _reason(error: ImportError) -> str:
    """Return the message of a failed import and, if it has another cause, that of the first in the chain."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = str(error)[:200]
    return text if root is error else f"{text}; cause: {str(root)[:200]}"


def _absent(module: str, extra: str, use: str) -> EbbtideError:
    return EbbtideError(
        f"{module} is not installed", expected=f"{module} for {use}", hint=f"pip install 'ebbtide[{extra}]'"
    )


def _numbers(version: str) -> list[int]:
    """Return the first three numbers of a version; a pre-release counts as its release."""
    numbers = [int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return numbers + [0] * (3 - len(numbers))
