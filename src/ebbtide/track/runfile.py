"""Write a run's events to one file.

[Note: record, then report]
Training emits events, and this listener only writes them. Every number and picture is made later from the files, so
reports can be reproduced, compared and verified without the run.

Each event is one ``write`` of a complete line to a file opened for appending: lines of threads do not mix, and the file
of a killed process is readable up to its last event.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.base.events import BUS, Bus
from ebbtide.base.extras import installed
from ebbtide.base.runs import (
    BOTH_PHASE,
    DETAILS_END,
    EVENTS_FILE,
    OUTSIDE_FILE,
    REPORT_FILE,
    SCHEMA,
    SUMMARY_FILE,
    check_results,
)
from ebbtide.base.units import format_size
from ebbtide.track.lockstep import Lockstep
from ebbtide.track.messages import Messages
from ebbtide.track.sampler import MemoryReader, Sampler
from ebbtide.track.summary import write_summary

if TYPE_CHECKING:
    from ebbtide.track.steps import StepMarker

logger = logging.getLogger("ebbtide.track")

_EDGES = ("phase", "pass_end", "load")
_DETAILS = frozenset(("memory", "phase", "pass_begin", "pass_end", "block", "block_backward", "stall"))
"""Events that are emitted many times per step."""
_DETAIL_BYTES = 64 * 2**20
"""From this size of the file on, details are left out: a summary reads the file into memory, some 7 times its size. So
are the totals, some kilobytes in each step of a deep model; the last ones are written at the end, and some before."""
_TOTALS_SECONDS = 600.0
"""Time after which totals are written, too, once details are left out: a killed run has no end."""
_HIGHER = 1.01
"""A sample is a new peak from this multiple of the latest one on."""


class RunFile:
    """Records a run into a folder while it is open.

    On exit it writes ``run_end`` (``ok``, ``interrupted`` or ``error``) and then ``summary.json``. With several
    processes, open it in one of them.

    Args:
        folder: Created if missing.
        bus: The source of events.
        sample_seconds: Time between two memory samples; memory is also read at the edges of phases,
            passes and loads.
        overwrite: Replace the files of an earlier run in the same folder.
        **run_begin_fields: Fields of ``run_begin``: ``model``, ``mode``, ``config``, ``world_size``, ...

    Raises:
        DataError: The folder already holds a run or a comparison, or cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        bus: Bus = BUS,
        sample_seconds: float = 0.05,
        overwrite: bool = False,
        **run_begin_fields: Any,
    ) -> None:
        self.folder = Path(folder).absolute()  # the program may change its directory
        self._bus, self._sample_seconds, self._overwrite = bus, sample_seconds, overwrite
        self._fields = run_begin_fields
        # Reentrant: the garbage collector may run a finalizer that emits an event while this thread is writing.
        self._lock = threading.RLock()
        self._file: int | None = None
        self._bytes = 0
        self._highest: dict[str, float] = {}
        self._left_out: list[dict[str, Any]] = []  # ``stats`` of the latest step, one of each model
        self._totals_at = math.inf  # when totals were last written
        self._pid = os.getpid()
        self._lockstep: Lockstep | None = None
        self._removers: list[Callable[[], None]] = []
        self.marker: StepMarker | None = None
        """Numbers and times the steps that the loop does not mark."""

    def __enter__(self) -> RunFile:
        self._reader = MemoryReader(device=True)
        self._reader.follow_fullest_device()
        self._open()
        self._latest, self._forwards = "", False
        self._write("run_begin", {**_run_begin(), **self._fields, **self._reader.peaks()})
        self._since = time.monotonic()
        self._sampler = Sampler(self._reader, self._memory, seconds=self._sample_seconds)
        self._sampler.start()
        self._lockstep = lockstep = Lockstep.requested(self.folder)
        if lockstep is not None:  # no time of a step: a plan that is being measured leaves it out
            self._removers.append(self._bus.provide("paused", lambda: {"seconds": lockstep.waited_seconds}))
        self._removers.append(self._bus.subscribe(self._hear))
        self._removers.append(Messages(self._hear).attach())
        for plan in self._bus.ask("plan"):  # of models that were enabled earlier
            self._write("plan", plan)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        while self._removers:
            self._removers.pop()()
        if self._is_forked:
            return
        self._sampler.stop()
        if self._lockstep is not None:
            self._lockstep.close()
        for totals in self._left_out:
            self._write("stats", totals, always=True)
        self._write("run_end", {**_ending(error), **self._reader.peaks()})
        self._close()
        try:
            write_summary(self.folder)
        except Exception as failure:  # a record must not end a training run
            logger.warning("no summary of the run was written: %s", failure)

    @contextmanager
    def phase(self, name: str, *, step: int) -> Generator[None, None, None]:
        """Mark a phase of a step, for loops that do so by hand.

        Memory is compared at the edges of ``forward``; other names are only reported.
        """
        self._bus.emit("phase", name=name, edge="begin", step=step)
        try:
            yield
        finally:
            self._bus.emit("phase", name=name, edge="end", step=step)

    def step(
        self,
        step: int | None = None,
        *,
        seconds: float | None = None,
        loss: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Add figures to the step that an optimizer has just ended, or mark the end of a step manually.

        ::

            optimizer.step()
            run.step(loss=loss.item(), tokens=batch.numel())

        Args:
            step: Its number, if the loop marks all its steps manually; default: counted. Where numbers begin again, as
                in each epoch, the reports continue them.
            seconds: Its time, likewise; default: measured.
            loss: Its loss; dropped with a warning if no optimizer has stepped, as where a gradient scaler skips it.
            tokens: Tokens of the step, over all processes.

        Raises:
            ConfigError: Only one of number and time.
        """
        seconds, loss, tokens = _number(seconds), _number(loss), _number(tokens)
        if step is None and seconds is None and self.marker is not None:
            self.marker.finish(loss=loss, tokens=tokens)
        elif step is None or seconds is None:
            raise ConfigError(
                f"run.step has step={step} and seconds={seconds}",
                expected="both, to mark the step by hand, or under ebbtide.track_memory neither",
                hint="such as run.step(loss=loss.item()) after optimizer.step()",
            )
        else:
            self._bus.emit("step", step=step, loss=loss, seconds=seconds, tokens=tokens)

    def _open(self) -> None:
        path = self.folder / EVENTS_FILE
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_results(self.folder)
            if self._overwrite:
                self._remove_results()
                with suppress(FileNotFoundError):  # without a record, samples from outside are this run's
                    path.unlink()
                    (self.folder / OUTSIDE_FILE).unlink()
            self._file = os.open(path, flags if self._overwrite else flags | os.O_EXCL, 0o666)
            self._remove_results()
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():  # maybe of a process that began at the same time
                raise DataError(
                    f"{self.folder} already holds a run ({EVENTS_FILE})",
                    expected="a folder without one",
                    hint="choose another folder, or pass overwrite=True to replace that run",
                ) from error
            raise DataError(
                f"{self.folder} cannot be written ({error.strerror})",
                expected="a folder for the run's files",
                hint="choose a folder that you may write to",
            ) from error

    def _remove_results(self) -> None:
        for name in (SUMMARY_FILE, REPORT_FILE):
            (self.folder / name).unlink(missing_ok=True)

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child, whose events are not the run's."""
        return os.getpid() != self._pid

    def _hear(self, kind: str, fields: dict[str, Any]) -> None:
        if self._is_forked:
            return
        # The first backward of a block is an edge, too: before it memory is that of the loss.
        dates = kind in _EDGES or (kind == "block_backward" != self._latest)
        if dates:
            self._peak(kind)
        self._write(kind, fields)
        if dates:
            self._since = time.monotonic()
        if kind == "step" and self._lockstep is not None:
            self._write("wait", {"step": fields.get("step")})
            if self._file is None or not self._lockstep.wait():  # without a record nobody would permit a step
                self._lockstep.close()
                self._lockstep = None
        if kind in _EDGES:
            # Memory is compared at the edges, and the thread's nearest sample may be sample_seconds away.
            if not self._forwards:
                self._reader.follow_fullest_device()
            self._forwards = self._forwards or fields.get("name") in ("forward", BOTH_PHASE)
            rss = self._reader.rss_bytes()
            if rss is not None:
                self._memory(rss, self._reader.device_bytes())
            self._since = time.monotonic()

    def _peak(self, kind: str) -> None:
        """Write the device's peak since the latest edge, dated between the two: samples miss what is freed at once."""
        peak, since, now = self._reader.take_device_peak_bytes(), self._since, time.monotonic()
        self._latest = kind
        if peak is not None:
            self._write("memory", {"t": (since + now) / 2, "rss_bytes": None, "device_bytes": peak})

    def _memory(self, rss_bytes: int, device_bytes: int | None) -> None:
        self._write("memory", {"rss_bytes": rss_bytes, "device_bytes": device_bytes})

    def _write(self, kind: str, fields: Mapping[str, Any], *, always: bool = False) -> None:
        always = (kind == "memory" and self._is_higher(fields)) or always
        if self._bytes > _DETAIL_BYTES and not always:
            if kind == "stats":
                self._leave_out(fields)
                return
            if kind in _DETAILS:
                return
        # Fields may have their own "t", for events that are recognized later.
        line = json.dumps({"t": time.monotonic(), "event": kind, **_plain(fields)}, allow_nan=False) + "\n"
        data = line.encode()
        with self._lock:
            if self._file is None:
                return
            try:
                rest = memoryview(data)
                while rest:  # a full disk takes a part of the line first, and raises at the next write
                    if not (count := os.write(self._file, rest)):
                        raise OSError(errno.EIO, "short write")
                    rest = rest[count:]
            except OSError as error:
                # A full disk must not end a training run; only the record ends.
                logger.warning("The run file in %s is no longer written: %s", self.folder, error.strerror)
                self._close()
                return
            before, self._bytes = self._bytes, self._bytes + len(data)
            if before <= _DETAIL_BYTES < self._bytes:
                self._end_details()

    def _is_higher(self, sample: Mapping[str, Any]) -> bool:
        """Whether a sample is clearly above all before it: a record without details still has the peak."""
        sizes = {name: sample[name] or 0 for name in ("rss_bytes", "device_bytes")}
        above = {name: size for name, size in sizes.items() if size > _HIGHER * self._highest.get(name, 0)}
        self._highest.update(above)
        return bool(above)

    def _leave_out(self, totals: Mapping[str, Any]) -> None:
        """Keep a model's totals until the end of the run, or those of a later step; write some of them."""
        step, others = totals.get("step"), self._left_out
        if others and (step is None or others[0].get("step") != step):
            if others[-1]["t"] - self._totals_at >= _TOTALS_SECONDS:
                self._totals_at = others[-1]["t"]
                for one in others:
                    self._write("stats", one, always=True)
            others = []
        self._left_out = [*others, {"t": time.monotonic(), **totals}]

    def _end_details(self) -> None:
        self._totals_at = time.monotonic()
        text = (
            f"run.jsonl has {format_size(self._bytes)}: from here on it holds steps, new peaks of memory and, at the "
            "end, the totals, but no other samples, and no phases, blocks or stalls"
        )
        logger.warning("%s: %s", self.folder, text)
        self._write("message", {"level": "warning", "code": DETAILS_END, "text": text})


def _number(value: Any) -> Any:
    """Return the number in a tensor or array of one: it would be written as text of four digits."""
    item: Any = getattr(value, "item", None)
    return value if item is None else item()


def _plain(value: Any) -> Any:
    """Convert a value for strict JSON: non-finite numbers become text, unknown objects their ``str``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (Sequence, set, frozenset)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return str(value)


def _run_begin() -> dict[str, Any]:
    import torch
    from torch import distributed as dist

    group = dist.is_available() and dist.is_initialized()
    ranks = str(dist.get_world_size()) if group else os.environ.get("WORLD_SIZE", "").strip()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "schema": SCHEMA,
        "unix_time": time.time(),
        "pid": os.getpid(),
        "ebbtide": installed("ebbtide"),
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "device": "cpu" if accelerator is None else accelerator.type,
        "world_size": max(1, int(ranks)) if ranks.isdecimal() else 1,
        "model": None,
        "mode": None,
        "config": {},
    }


def _ending(error: BaseException | None) -> dict[str, str | None]:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return {"status": "ok", "error": None}
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted", "error": None}
    return {"status": "error", "error": f"{type(error).__name__}: {error}"}
