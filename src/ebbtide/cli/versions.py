"""``ebbtide doctor --versions``: versions, for bug reports."""

from __future__ import annotations

import os
import platform

from ebbtide.base.extras import installed

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


def lines() -> list[str]:
    """Return the versions of the packages that ebbtide uses, and the device."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        **{name: installed(name) or "not installed" for name in PACKAGES},
        "device": _device(),
    }
    return [f"{name:<14}{value}" for name, value in found.items()]


def _device() -> str:
    """Return the accelerator that torch sees."""
    try:
        import torch
    except Exception as error:  # OSError or ValueError where a library of CUDA is missing
        return f"unknown (torch cannot be imported: {error})"
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    name = torch.cuda.get_device_name(0) if kind is not None and kind.type == "cuda" else ""
    return f"{torch.accelerator.device_count()} x {kind} {name}".strip()
