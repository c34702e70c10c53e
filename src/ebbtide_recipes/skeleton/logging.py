"""Log lines to the terminal and into ``training.log``."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LOGGER = logging.getLogger("ebbtide.recipes")

LOG_FILE = "training.log"


def interactive() -> bool:
    """Whether the terminal is interactive: a progress bar in a file or in CI is noise."""
    return sys.stderr.isatty() and not os.environ.get("CI")


@functools.cache
def console() -> Console:
    """Return the console shared by the bar and the log lines, so that they do not overwrite each other."""
    from rich.console import Console

    return Console(stderr=True)


class _LogFile(logging.FileHandler):
    """Appends lines to a file, and knows which are of earlier runs; a full disk costs lines, and no traceback.

    Args:
        path: The file.
        keeps: Whether the lines of earlier runs stay.
    """

    def __init__(self, path: Path, *, keeps: bool) -> None:
        super().__init__(path, encoding="utf-8")
        self._earlier_bytes = 0 if keeps else path.stat().st_size
        self._lacks_lines = False

    def remove_earlier(self) -> None:
        """Remove the lines of earlier runs."""
        if not self._earlier_bytes:
            return
        self.acquire()
        try:
            path = Path(self.baseFilename)
            path.write_bytes(path.read_bytes()[self._earlier_bytes :])
            self._earlier_bytes = 0
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once of a line that the disk does not take."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._lacks_lines:
            self._lacks_lines = True
            LOGGER.warning("%s lacks lines from here on: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file, without the last lines if the disk does not take them."""
        with suppress(OSError):
            super().close()


def remove_earlier_lines() -> None:
    """Remove what a log has of earlier runs: training begins, and until then it could have been refused."""
    for handler in logging.getLogger("ebbtide").handlers:
        if isinstance(handler, _LogFile):
            handler.remove_earlier()


@contextmanager
def logging_to(folder: Path, level: str, *, append: bool = False, rank: int = 0) -> Generator[None, None, None]:
    """Send the lines of the ``ebbtide.*`` loggers to standard error and to ``training.log``.

    Only the ``ebbtide`` logger is changed, and restored afterwards.

    Args:
        folder: The existing folder of ``training.log``.
        level: The lowest shown level, such as ``"info"``.
        append: Append to an earlier file; else ``remove_earlier_lines`` empties it.
        rank: Rank of this process; above 0 it writes ``training-rankN.log`` and nothing to the terminal.
    """
    logger = logging.getLogger("ebbtide")
    before = logger.level
    name = f"training-rank{rank}.log" if rank else LOG_FILE
    file = _LogFile(folder / name, keeps=append)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file] if rank else [file, _terminal()]
    logger.setLevel(level.upper())
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    except BaseException:
        # The error is shown as one line; its traceback only with debug lines.
        logger.debug("the run ends with an error", exc_info=True)
        raise
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before)


def _terminal() -> logging.Handler:
    """Return a handler for standard error; on a terminal, rich keeps its lines above the progress bar."""
    if not interactive():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        return handler
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    return RichHandler(console=console(), show_path=False, show_time=False, highlighter=NullHighlighter())


@contextmanager
def quiet_bitsandbytes() -> Generator[None, None, None]:
    """Hide the warning that bitsandbytes logs at import where the package ``kernels`` is missing.

    PEFT imports bitsandbytes also where nothing has 4 bits, before the first line of a run. What the warning names is a
    faster product on some CPUs; bitsandbytes 0.50 computes without it. Its other lines stay.
    """

    def is_news(record: logging.LogRecord) -> bool:  # one for each call: calls are nested
        return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward from kernels-community")

    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


@contextmanager
def quiet_hosts() -> Generator[None, None, None]:
    """Hide warnings between host libraries, and their progress bars off a terminal.

    TRL 1.16 and PEFT call transformers' checkpointing by names that transformers 5.2x deprecates.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        with nullcontext() if interactive() else _without_bars():
            yield


@contextmanager
def _without_bars() -> Generator[None, None, None]:
    """Hide the progress bars of datasets and transformers."""
    import datasets
    from transformers.utils import logging as transformers_logging

    bars = datasets.are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if not bars[0]:
            datasets.enable_progress_bars()
        if bars[1]:
            transformers_logging.enable_progress_bar()
