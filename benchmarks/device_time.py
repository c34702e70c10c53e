"""How a device spent a step: kernels, copies, and the gaps between kernels, from the trace of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

MOST_NAMES = 16


class DeviceTime(NamedTuple):
    """What a device did.

    Attributes:
        kernels: Number of kernels of the stream that was busy longest.
        busy_seconds: Their time.
        gap_seconds: Time between its first and last kernel in which it ran none: it waited for the host, or a copy.
        largest_gaps: The ten largest, in seconds, each with the name of the kernel after it.
        other_seconds: Time of kernels on other streams.
        copy_seconds: Time of copies, by direction.
        names: The kernels with the most time: name, number and seconds.
    """

    kernels: int
    busy_seconds: float
    gap_seconds: float
    largest_gaps: list[tuple[float, str]]
    other_seconds: float
    copy_seconds: dict[str, float]
    names: list[tuple[str, int, float]]


def device_time(act: Callable[[], object]) -> DeviceTime | None:
    """Return how CUDA's device spent an action; None on other devices.

    Only the device is traced, so the host loses little time to it.

    Args:
        act: The action; it ends when the device is done.
    """
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        act()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return summarized(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def summarized(events: list[dict[str, Any]]) -> DeviceTime | None:
    """Return what a trace's events say of its device; None if they hold no kernel.

    Args:
        events: ``traceEvents`` of a trace in Chrome's format: ``cat``, ``name``, ``ts`` and ``dur`` in microseconds,
            and the stream among ``args``.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return None
    streams: Counter[Any] = Counter()
    copies: Counter[str] = Counter()
    for event in kernels:
        streams[event["args"]["stream"]] += event["dur"]
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            copies[event["name"]] += event["dur"] / 1e6
    [(main, busy)] = streams.most_common(1)
    mine = sorted((event for event in kernels if event["args"]["stream"] == main), key=lambda event: event["ts"])
    gaps = [
        ((after["ts"] - before["ts"] - before["dur"]) / 1e6, after["name"][:80])
        for before, after in zip(mine, mine[1:], strict=False)
    ]
    number, seconds = Counter(event["name"] for event in mine), Counter[str]()
    for event in mine:
        seconds[event["name"]] += event["dur"] / 1e6
    return DeviceTime(
        kernels=len(mine), busy_seconds=busy / 1e6, gap_seconds=sum(max(0.0, gap) for gap, _ in gaps),
        largest_gaps=sorted(gaps, reverse=True)[:10], other_seconds=(sum(streams.values()) - busy) / 1e6,
        copy_seconds=dict(copies),
        names=[(name[:120], number[name], took) for name, took in seconds.most_common(MOST_NAMES)],
    )  # fmt: skip
