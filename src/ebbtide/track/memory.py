"""``track_memory``: record memory around any training loop, with offloading or without."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ebbtide.track.runfile import RunFile


@contextmanager
def track_memory(
    folder: str | os.PathLike[str], *, sample_seconds: float = 0.05, overwrite: bool = False, **fields: Any
) -> Generator[RunFile, None, None]:
    """Record host and device memory, and every event of ebbtide, into a run folder.

    A thread samples memory, and every event of ebbtide is written as one JSON line; ``ebbtide report`` draws them. Use
    it around any training loop, with or without offloading.

    Example::

        model = torch.nn.Linear(8, 8)
        with ebbtide.track_memory("run", model="my model") as run:
            for step in range(2):
                with run.phase("forward", step=step):
                    loss = model(torch.randn(4, 8)).sum()

    Then ``ebbtide report run`` writes ``run/report.html``.

    Args:
        folder: Where ``run.jsonl`` and, at the end, ``summary.json`` are written.
        sample_seconds: Time between two samples.
        overwrite: Replace the files of an earlier run in the same folder.
        **fields: Fields of ``run_begin``, such as ``model``, ``mode`` and ``config``.

    Yields:
        The open run file.

    Raises:
        DataError: The folder already holds a run, or cannot be written.
        EbbtideError: This system needs psutil to read memory, and it is not installed.
    """
    with RunFile(folder, sample_seconds=sample_seconds, overwrite=overwrite, **fields) as run:
        yield run
