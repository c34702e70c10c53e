"""Ways to save activation memory, ours and others', behind one interface.

A *way* prepares a model and defines the contexts of its forward and of its whole step. Peers run from their own
published packages, at the setting their documentation recommends; where that is a choice, both are here. Nothing of
a package is imported before its way is prepared, in the process of its case.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

Around = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared model and its contexts.

    Attributes:
        model: The model to call: the original, or a wrapper.
        forward: Opened around each forward.
        step: Opened around each forward and backward.
        notes: Return the way's own report after the last step, for its row.
        settled: Whether further steps will be like the latest.
    """

    model: nn.Module
    forward: Around = nullcontext
    step: Around = nullcontext
    notes: Callable[[], dict[str, Any]] = dict[str, Any]
    settled: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way, at one setting.

    Attributes:
        name: Its name in tables.
        prepare: Generator of a context manager: yields the prepared model, and undoes the changes afterwards.
        package: Distribution that has it; empty: torch, transformers or ebbtide.
        accelerator: Whether its package runs on an accelerator only.
        setting: The chosen setting, for readers.
    """

    name: str
    prepare: Callable[[nn.Module], Generator[Prepared]]
    package: str = ""
    accelerator: bool = False
    setting: str = ""


def absent(way: Way, *, accelerated: bool) -> str | None:
    """Return why a way cannot run here, or None.

    Args:
        way: The way.
        accelerated: Whether the case runs on an accelerator.
    """
    if way.package:
        try:
            importlib.metadata.version(way.package)
        except importlib.metadata.PackageNotFoundError:
            return f"not installed: pip install {way.package}"
    if way.accelerator and not accelerated:
        return "not run: its package needs an accelerator"
    return None


def all_ways() -> dict[str, Way]:
    """Return every way by name, ordinary training first."""
    from benchmarks.peers.builtin import WAYS as builtin
    from benchmarks.peers.packages import WAYS as packages

    return {way.name: way for way in (*builtin, *packages)}


def way_named(name: str) -> Way:
    """Return one of ``all_ways()``, hooks alone, or one with settings in its name, as ``planned(...)`` makes them."""
    from benchmarks.peers.builtin import HOOKS_ALONE, with_settings

    return (all_ways() | {HOOKS_ALONE.name: HOOKS_ALONE}).get(name) or with_settings(name)


def planned(**aim: float | str) -> str:
    """Return the name of the way that trains under ``Auto`` with these arguments: see ``way_named``."""
    return "ebbtide auto, " + ", ".join(f"{key}={value}" for key, value in aim.items())
