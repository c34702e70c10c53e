"""Memory-efficient loading of a sharded model: no process ever holds the whole of it."""

from __future__ import annotations

from ebbtide.load.load import Loading, LoadOptions, Weights
from ebbtide.load.save import Saving
from ebbtide.load.targets import empty_module

__all__ = ["LoadOptions", "Loading", "Saving", "Weights", "empty_module"]
