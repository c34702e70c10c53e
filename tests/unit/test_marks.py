"""A step in torch's profiler: spans named after ebbtide's actions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import ebbtide
from ebbtide import Auto, Minimal, Offload
from ebbtide.config import Policy
from tests.helpers.models import build


def _spans(path: Path, policy: Policy, steps: int) -> Counter[str]:
    """Count each of our spans in the exported trace of the last of several steps."""
    torch.manual_seed(0)
    tiny = build("mlp")
    handle = ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1024)
    try:
        for _ in range(steps - 1):
            tiny.loss()[0].backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            tiny.loss()[0].backward()
    finally:
        handle.disable()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if str(event.get("name", "")).startswith("ebbtide::"))


def test_copies_are_spans(tmp_path: Path) -> None:
    found = _spans(tmp_path / "trace.json", Offload(), 2)
    assert found["ebbtide::copy_out"] > 0 and found["ebbtide::copy_in"] > 0
    assert not found["ebbtide::recompute"]


def test_recomputes_are_spans(tmp_path: Path) -> None:
    assert _spans(tmp_path / "trace.json", Minimal(), 2)["ebbtide::recompute"] > 0


def test_planning_is_a_span(tmp_path: Path) -> None:
    assert _spans(tmp_path / "trace.json", Auto(), 4)["ebbtide::plan"] == 1
