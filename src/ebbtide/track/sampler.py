"""Read resident and device memory, once or repeatedly in a thread.

A run that samples itself and ``compare``, which samples its children from outside, use the same reader.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ebbtide.base.extras import require

# Listing descendants reads the whole process table, and they change only when workers start.
_CHILDREN_SECONDS = 0.25


def _psutil() -> ModuleType:
    return require("psutil", extra="track", use="reading the memory of processes")


class MemoryReader:
    """Reads the memory of one process, alone or with its descendants.

    Args:
        pid: The process; this one if ``None``.
        children: Add its descendants' resident bytes. Shared pages count once per process.
        device: Read the accelerator's allocated bytes too (this process only).

    Raises:
        EbbtideError: psutil is needed and not installed.
    """

    def __init__(self, pid: int | None = None, *, children: bool = False, device: bool = False) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._children = children
        self._statm = Path(f"/proc/{self._pid}/statm")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if self._statm.exists() else 0
        if children or not self._page_bytes:
            _psutil()
        self._figures: Any = None
        if device:
            import torch

            from ebbtide.store.device_memory import allocator_figures
            from ebbtide.store.meter import DevicePeak

            self._figures = allocator_figures if torch.accelerator.is_available() else None
            self._peak = DevicePeak()
        self._device_index: int | None = None
        self._family: list[MemoryReader] = []
        self._family_read_at = float("-inf")

    def rss_bytes(self) -> int | None:
        """Return the resident bytes, or ``None`` when the process has ended."""
        own = self._own_bytes()
        if own is None or not self._children:
            return own
        now = time.monotonic()
        if now - self._family_read_at >= _CHILDREN_SECONDS:
            self._family, self._family_read_at = self._descendants(), now
        return own + sum(child._own_bytes() or 0 for child in self._family)

    def device_bytes(self) -> int | None:
        """Return the accelerator's allocated bytes, or ``None`` without one."""
        return None if self._figures is None else self._figures(self._device_index).allocated_bytes

    def take_device_peak_bytes(self) -> int | None:
        """Return the accelerator's most allocated bytes since the last call, or ``None`` without one; resets it."""
        return None if self._figures is None else self._peak.take_bytes(self._device_index)

    def follow_fullest_device(self) -> None:
        """Read the device on which this process has most from now on.

        The current device is per thread, and a model need not be on any thread's.
        """
        if self._figures is not None:
            import torch

            figures, current = self._figures, torch.accelerator.current_device_index()
            everywhere, before = range(torch.accelerator.device_count()), self._device_index
            self._device_index = max(everywhere, key=lambda index: (figures(index).allocated_bytes, index == current))
            if self._device_index != before:
                self.take_device_peak_bytes()  # of memory that may have been freed before

    def peaks(self) -> dict[str, int | None]:
        """Return the system's peaks since the process began; ``None`` if it keeps none."""
        from ebbtide.store.share import fields_of  # imports torch, which a sampler of other processes does not

        device = None
        if self._figures is not None:
            from ebbtide.store.device_memory import peak_bytes

            device = peak_bytes(self._device_index)
        status = fields_of(Path(f"/proc/{self._pid}/status"), unit=1024)
        return {"peak_rss_bytes": status.get("VmHWM:"), "peak_device_bytes": device}

    def _own_bytes(self) -> int | None:
        if self._page_bytes:
            try:
                return int(self._statm.read_bytes().split()[1]) * self._page_bytes
            except (OSError, IndexError):
                return None
        psutil = _psutil()
        try:
            return int(psutil.Process(self._pid).memory_info().rss)
        except psutil.Error:
            return None

    def _descendants(self) -> list[MemoryReader]:
        psutil = _psutil()
        try:
            return [MemoryReader(child.pid) for child in psutil.Process(self._pid).children(recursive=True)]
        except psutil.Error:
            return []


class Sampler:
    """A thread that reads memory at regular intervals.

    Args:
        reader: Reads the memory.
        sink: Called with ``rss_bytes`` and ``device_bytes``, in the sampler's thread.
        seconds: Time between two samples.
    """

    def __init__(self, reader: MemoryReader, sink: Callable[[int, int | None], None], *, seconds: float) -> None:
        self._reader, self._sink, self._seconds = reader, sink, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ebbtide-memory", daemon=True)

    def start(self) -> None:
        """Start; the first sample is taken at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and join the thread. May be called repeatedly."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            rss = self._reader.rss_bytes()
            if rss is None:
                return
            self._sink(rss, self._reader.device_bytes())
            if self._stop.wait(self._seconds):
                return
