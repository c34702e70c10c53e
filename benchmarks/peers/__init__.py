"""Modes of saving activation memory, ours and others', behind one interface.

A *mode* prepares a model and defines the contexts of its forward and of its whole step. Peers run from their own
published packages, at the setting their documentation recommends; where that is a choice, both are here. Nothing of
a package is imported before its mode is prepared, in the process of its case.
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
        notes: Return the mode's own report after the last step, for its row.
        settled: Whether further steps will be like the latest.
    """

    model: nn.Module
    forward: Around = nullcontext
    step: Around = nullcontext
    notes: Callable[[], dict[str, Any]] = dict[str, Any]
    settled: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One mode, at one setting.

    Attributes:
        name: Its name in tables.
        prepare: Generator of a context manager: yields the prepared model, and undoes the changes afterwards.
        package: Distribution that has it; empty: torch, transformers or ebbtide.
        accelerator: Whether its package runs on an accelerator only.
        setting: The chosen setting, for readers.
        once: It cannot be undone, so a model is prepared once.
    """

    name: str
    prepare: Callable[[nn.Module], Generator[Prepared]]
    package: str = ""
    accelerator: bool = False
    setting: str = ""
    once: bool = False


def absent(mode: Mode, *, accelerated: bool) -> str | None:
    """Return why a mode cannot run here, or None.

    Args:
        mode: The mode.
        accelerated: Whether the case runs on an accelerator.
    """
    if mode.package:
        try:
            importlib.metadata.version(mode.package)
        except importlib.metadata.PackageNotFoundError:
            return f"not installed: pip install {mode.package}"
    if mode.accelerator and not accelerated:
        return "not run: its package needs an accelerator"
    return None


def all_modes() -> dict[str, Mode]:
    """Return every mode by name, ordinary training first."""
    from benchmarks.peers.builtin import MODES as builtin
    from benchmarks.peers.packages import MODES as packages

    return {mode.name: mode for mode in (*builtin, *packages)}


def mode_named(name: str) -> Mode:
    """Return one of ``all_modes()``, hooks alone, or one with settings in its name, as ``planned(...)`` makes them."""
    from benchmarks.peers.builtin import HOOKS_ALONE, with_settings

    return (all_modes() | {HOOKS_ALONE.name: HOOKS_ALONE}).get(name) or with_settings(name)


def planned(**aim: float | str) -> str:
    """Return the name of the mode that trains under ``Auto`` with these arguments: see ``mode_named``."""
    return "ebbtide auto, " + ", ".join(f"{key}={value}" for key, value in aim.items())
