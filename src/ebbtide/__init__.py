"""Train PyTorch models that do not fit: keep, offload or recompute every tensor that autograd saves, bitwise."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.api import Handle as Handle
    from ebbtide.api import enable_activation_offloading as enable_activation_offloading
    from ebbtide.api import make_plan as make_plan
    from ebbtide.api import offload_saved_tensors as offload_saved_tensors
    from ebbtide.api import register_recompute as register_recompute
    from ebbtide.base.errors import EbbtideError as EbbtideError
    from ebbtide.config import Auto as Auto
    from ebbtide.config import Inputs as Inputs
    from ebbtide.config import Keep as Keep
    from ebbtide.config import Minimal as Minimal
    from ebbtide.config import Offload as Offload
    from ebbtide.engine import Stats as Stats
    from ebbtide.loading import load_sharded as load_sharded
    from ebbtide.loading import save_sharded as save_sharded
    from ebbtide.track import track_memory as track_memory

__version__ = "0.1.0"

_HOMES = {
    "Auto": "ebbtide.config",
    "EbbtideError": "ebbtide.base.errors",
    "Handle": "ebbtide.api",
    "Inputs": "ebbtide.config",
    "Keep": "ebbtide.config",
    "Minimal": "ebbtide.config",
    "Offload": "ebbtide.config",
    "Stats": "ebbtide.engine",
    "enable_activation_offloading": "ebbtide.api",
    "load_sharded": "ebbtide.loading",
    "make_plan": "ebbtide.api",
    "offload_saved_tensors": "ebbtide.api",
    "register_recompute": "ebbtide.api",
    "save_sharded": "ebbtide.loading",
    "track_memory": "ebbtide.track",
}
"""Where each public name lives. They are imported when first used, so that the command line's help needs no torch."""

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
