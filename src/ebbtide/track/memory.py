"""``track_memory``: record memory around any training loop, with offloading or without."""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ebbtide.base.checks import check_path, check_value
from ebbtide.base.errors import ConfigError
from ebbtide.track.runfile import RunFile

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def track_memory(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | str | None = None,
    sample_seconds: float = 0.05,
    overwrite: bool = False,
    **fields: Any,
) -> Generator[RunFile, None, None]:
    """Record memory, steps and every event of ebbtide into a run folder, around any training loop.

    A thread samples host and device memory. Steps are numbered and timed by a hook on every optimizer of torch, phases
    by the passes of ebbtide's engine; if a loop marks both by hand (``run.phase``, ``run.step``), only that counts.
    Use it with or without offloading, in one process of several. A record inside another one continues its
    numbers of steps.

    Example::

        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ebbtide.track_memory("run", model=model) as run:
            for _ in range(2):
                loss = model(torch.randn(4, 8)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss=loss.item())  # optional: the loss, for the curve

    Then ``ebbtide report run`` writes ``run/report.html``.

    Args:
        folder: Where ``run.jsonl`` and, at the end, ``summary.json`` are written.
        model: The module whose forward and backward are distinguished if ebbtide is not enabled on it; or just a name
            for the report.
        sample_seconds: Time between two samples.
        overwrite: Replace the files of an earlier run in the same folder.
        **fields: Fields of ``run_begin``, such as ``mode`` and ``config``.

    Yields:
        The open run file.

    Raises:
        ConfigError: An argument cannot be used.
        DataError: The folder already holds a run or a comparison, or cannot be written.
        EbbtideError: This system needs psutil to read memory, and it is not installed.
    """
    from torch import nn  # which reports do not need

    from ebbtide.track.steps import emit_ended_step, marking

    check_path("folder", folder, hint="such as 'run'; '.' is the working directory")
    check_value("model", model, nn.Module | str | None, advice="pass one module, or a name for the report")
    check_value("sample_seconds", sample_seconds, float)
    check_value("overwrite", overwrite, bool)
    if not 0 < sample_seconds < math.inf:
        found = f"sample_seconds is {sample_seconds}"
        raise ConfigError(found, expected="a time above zero", hint="such as sample_seconds=0.05")
    emit_ended_step()
    name = model if model is None or isinstance(model, str) else type(model).__name__
    run = RunFile(folder, sample_seconds=sample_seconds, overwrite=overwrite, model=name, **fields)
    with run, marking(None if isinstance(model, str) else model) as run.marker:
        yield run
