"""``ebbtide env``: versions, for bug reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from ebbtide.base.errors import ConfigError

PACKAGES = (
    "ebbtide",
    "torch",
    "safetensors",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "gguf",
    "numpy",
    "tyro",
    "PyYAML",
    "rich",
    "psutil",
)


def run(argv: Sequence[str]) -> int:
    """Print the versions of what ebbtide stands on, and what device there is.

    Args:
        argv: The arguments after ``env``; there are none to give.

    Returns:
        0.

    Raises:
        ConfigError: Arguments were given.
    """
    if argv and argv[0] in ("-h", "--help"):
        print("usage: ebbtide env\n\nPrints versions, for bug reports.")
        return 0
    if argv:
        raise ConfigError(
            f"ebbtide env was given {' '.join(argv)!r}", expected="no arguments", hint="run `ebbtide env`"
        )
    lines = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        **{name: _installed(name) for name in PACKAGES},
        "device": _device(),
    }
    print("\n".join(f"{name:<14}{value}" for name, value in lines.items()))
    return 0


def _installed(name: str) -> str:
    """Return a package's version, or say that it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    """Say which accelerator torch sees."""
    try:
        import torch
    except ImportError as error:
        return f"unknown (torch cannot be imported: {error})"
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    name = torch.cuda.get_device_name(0) if kind is not None and kind.type == "cuda" else ""
    return f"{torch.accelerator.device_count()} x {kind} {name}".strip()
