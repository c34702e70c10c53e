"""The host cost of a saved tensor: calls of our Python functions are counted, because times vary."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

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
BLOCKS = 4
INLINED = "<listcomp>", "<dictcomp>", "<setcomp>"
"""Calls in Python 3.11 only."""

BLOCK = Block(name="chain", kind="chain", index=0, count=1, weights=tuple)


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        pytest.param(Keep(), 11, id="keep"),
        pytest.param(Offload(), 40, id="offload"),
        pytest.param(Minimal(), 35, id="recompute"),
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
        ours = frame.f_code.co_filename.startswith(root) and frame.f_code.co_name not in INLINED
        calls += event == "call" and ours

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


@pytest.mark.parametrize(
    ("sampled", "of_a_block", "of_a_tensor"),
    [
        # Pack, its sample, what is left of it; saved and compared; unpack.
        pytest.param(True, 243, 6, id="host"),
        # What a device computes is compared in one block of many: no sample.
        pytest.param(False, 194, 4, id="device"),
    ],
)
def test_calls_for_each_checkpointed_block(sampled: bool, of_a_block: int, of_a_tensor: int) -> None:
    """What a second forward costs the host besides its operators: for each block, and for each tensor that it drops.

    Without copies of its inputs, whose waits vary.
    """
    few, many = (_calls_of_a_checkpointed_block(operators, sampled=sampled) for operators in (10, 60))
    # Each operator saves its operand and its result.
    assert many - few == of_a_tensor * 2 * 50
    assert few - of_a_tensor * 2 * 10 == of_a_block


class _Layer(nn.Module):
    """Saves tensors that no rule recomputes.

    Args:
        operators: Operators that save them.
    """

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.up, self.norm, self._operators = nn.Linear(64, 64), nn.LayerNorm(64), operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x))
        for _ in range(self._operators):
            x = torch.special.i0e(x)
        return x


def _calls_of_a_checkpointed_block(operators: int, *, sampled: bool) -> int:
    """Return the calls of our functions for one checkpointed block and step, once steps repeat."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer(operators) for _ in range(BLOCKS)))
    x, calls = torch.randn(64, 64), 0
    parts = "wrap/", "engine/fingerprint", "engine/guard", "engine/weights", "engine/trust", "engine/engine"
    roots = *(f"{ebbtide.__path__[0]}/{part}" for part in parts), pytree.__file__

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        ours = frame.f_code.co_filename.startswith(roots) and frame.f_code.co_name not in INLINED
        calls += event == "call" and ours

    with ebbtide.enable_activation_offloading(model, policy=Minimal(), min_bytes=0) as handle:
        for step in range(8):
            handle._engine.trust.fingerprints = sampled or step < 2
            sys.setprofile(count if step == 7 else None)
            try:
                model(x).sum().backward()
            finally:
                sys.setprofile(None)
        assert handle.stats().checkpointed_blocks == BLOCKS
    return calls // BLOCKS


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
