"""The host cost of a saved tensor: calls of our Python functions are counted, because times vary."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.base.events import Bus
from ebbtide.config import Keep, Minimal, Offload, Options, Policy
from ebbtide.engine import Block, Engine
from ebbtide.planner import plan_for
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from ebbtide.store.spill import SpillTier
from ebbtide.wrap.hooks import offloading
from tests.helpers.fakedevice import FakeDevice

SAVED = 100
BLOCK = Block(name="chain", kind="chain", index=0, count=1, weights=tuple)


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        pytest.param(Keep(), 11, id="keep"),
        pytest.param(Offload(), 40, id="offload"),
        pytest.param(Minimal(), 42, id="recompute"),
    ],
)
def test_calls_for_each_saved_tensor(policy: Policy, most: int) -> None:
    """Each saved tensor is a separate storage, the costliest kind; costs of passes and blocks are spread over them."""
    host = HostTier(FakeDevice(1e12, 1e12), budget_bytes=1 << 30)
    tier = SpillTier(host, DiskTier, budget_bytes=1 << 30)  # as users get it
    engine = Engine(plan_for(policy), tier, Options(min_bytes=0, window_bytes=1 << 19), Bus())
    x = torch.linspace(0.1, 1.0, 4096).view(64, 64)
    for _ in range(3):
        _chain(engine, x)
    calls = 0
    root = ebbtide.__path__[0]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(root)

    before = engine.stats()
    sys.setprofile(count)
    try:
        gradient = _chain(engine, x)
    finally:
        sys.setprofile(None)
    after = engine.stats()
    assert torch.equal(gradient, _chain(None, x)) and after.packs == SAVED
    moved = (after.total_copy_out_bytes > before.total_copy_out_bytes, after.recomputed_bytes > 0)
    assert moved == (isinstance(policy, Offload), isinstance(policy, Minimal))
    assert 5 * SAVED < calls <= most * SAVED


def _chain(engine: Engine | None, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    y = leaf
    if engine is None:
        for _ in range(SAVED):
            y = torch.sin(y)
    else:
        engine.begin_pass()
        with offloading(engine, BLOCK, []):
            for _ in range(SAVED):
                y = torch.sin(y)
        engine.end_pass()
    return torch.autograd.grad(y.sum(), leaf)[0]
