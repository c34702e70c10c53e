"""What a step leaves to Python's garbage collector.

What is alive from forward to backward survives the young generations, so it brings a full collection nearer, which
visits every object of the process.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action, Candidate
from ebbtide.config import Keep, Minimal, Offload
from ebbtide.engine.fingerprint import Fingerprint, host_sample
from tests.helpers.engines import ByTable

FEW, MANY = 2, 6


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(16), *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).to(torch.bfloat16).float()
        h = self.up(y).view(2, 2, 8).transpose(0, 1)
        h = torch.cat([torch.sin(h), -torch.cos(h)], -1).mean(0)
        for _ in range(4):
            h = torch.sigmoid(h) * torch.exp(h * 0.1)
        return x + self.down(nn.functional.silu(self.gate(y)) * h)


def _mixed(candidate: Candidate) -> Action:
    if candidate.recompute_flops is not None and candidate.site.ordinal != 1:
        return Action.RECOMPUTE
    return Action.OFFLOAD if candidate.block_input or candidate.site.ordinal else Action.KEEP


POLICIES = {
    "keep": (Keep(), 150),
    "offload": (Offload(), 193),
    "mixed": (ByTable(_mixed), 249),
}
"""Policies, and the objects for each block, with two or three to spare. No tensor is so large that a thread writes it
to disk."""


@pytest.fixture(autouse=True)
def paused() -> Generator[None]:
    """Collect only when a test calls it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _tracked(policy: Any, blocks: int) -> Counter[str]:
    """Return how many tracked objects of each type a forward adds, once steps repeat.

    Of three steps, the one with the fewest: other threads of this process (earlier tests', the test runner's) add
    objects of their own.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(*(_Block() for _ in range(blocks))), torch.randn(2, 16)
    with ebbtide.enable_activation_offloading(model, policy=policy, target="disk", min_bytes=0) as handle:
        for _ in range(4):
            model(x).sum().backward()
        counts = []
        for _ in range(3):
            gc.collect()
            before = gc.get_objects()
            known = set(map(id, before))
            loss = model(x).sum()
            counts.append(Counter(type(one).__name__ for one in gc.get_objects() if id(one) not in known))
            loss.backward()
            assert handle.stats().live_tickets == handle.stats().store_bytes == 0
            del before
    return min(counts, key=Counter.total)


@pytest.mark.parametrize("name", POLICIES)
def test_objects_that_a_block_keeps_until_backward(name: str) -> None:
    policy, most = POLICIES[name]
    few, many = (_tracked(policy, blocks) for blocks in (FEW, MANY))
    each = {kind: count / (MANY - FEW) for kind, count in (many - few).most_common()}
    assert sum(each.values()) <= most, each


@pytest.mark.parametrize(
    "policy", [*(policy for policy, _ in POLICIES.values()), Minimal()], ids=[*POLICIES, "minimal"]
)
def test_a_step_leaves_no_garbage(policy: Any) -> None:
    """Everything dies by its reference count, with the graph."""
    model, x = nn.Sequential(*(_Block() for _ in range(MANY))), torch.randn(2, 16)
    with ebbtide.enable_activation_offloading(model, policy=policy, target="disk", min_bytes=0):
        for _ in range(4):
            model(x).sum().backward()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            model(x).sum().backward()
            gc.collect()
            found = Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert not found


def test_lengths_that_never_repeat_make_no_classes() -> None:
    """Each would be a cycle of several kilobytes, which a cache of thousands of layouts keeps."""
    before = len(ctypes.Array.__subclasses__())
    for length in range(5000, 5100):
        x = torch.randn(length)
        sample = host_sample(x)
        assert sample is not None and sample.same(x)
        assert Fingerprint(x, full=False).same(x) and Fingerprint(x[:9], full=True).same(x[:9])
    assert len(ctypes.Array.__subclasses__()) == before
