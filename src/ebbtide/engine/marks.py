"""Spans in the traces of ``torch.profiler``: ``ebbtide::copy_out``, ``copy_in``, ``recompute``, ``plan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

recording: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Whether a profiler of torch records."""


def marked(name: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; where a profiler of torch records, as a span ``ebbtide::<name>``.

    Args:
        name: What is done.
        work: Does it.
    """
    if not recording():  # entering a span costs microseconds even where nobody records
        return work()
    with torch.autograd.profiler.record_function(f"ebbtide::{name}"):
        return work()
