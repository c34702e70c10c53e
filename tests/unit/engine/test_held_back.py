"""What is held back for backward is a small part of what a forward offloads, whatever its blocks are."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action, Candidate
from ebbtide.engine import Engine
from ebbtide.schedule.window import LEAST_WINDOW, PARTS
from tests.helpers.engines import forward_pass, open_engine
from tests.helpers.oracle import same_bits

STEPS = 4


class Some:
    """Offloads what some blocks save, and keeps the rest.

    Args:
        names: Of these blocks.
    """

    name, recomputes = "some", False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def choose(self, candidate: Candidate) -> Action:
        return Action.OFFLOAD if candidate.block_name in self._names else Action.KEEP

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.KEEP

    def explain(self) -> str:
        return "offloads some blocks"


def chain(engine: Engine, x: Tensor) -> tuple[int, int]:
    """Save sixty tensors in one block; return the bytes that were offloaded, and the saved ones."""
    leaf = y = x.detach().requires_grad_()
    with forward_pass(engine):
        for _ in range(60):
            y = y.sin()
    tally = engine.last_tally
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    leaf = y = x.detach().requires_grad_()
    for _ in range(60):
        y = y.sin()
    assert same_bits(gradient, torch.autograd.grad(y.sum(), leaf)[0])
    return tally.offloaded, tally.unique


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_forward_that_is_one_block_goes_on_offloading(tier: str) -> None:
    """As in ``offload_saved_tensors``, whose second context kept everything."""
    x = torch.linspace(0.1, 1.0, 1 << 18)
    with open_engine("offload", tier, rate=1e12, window_bytes=None) as engine:
        offloaded = [chain(engine, x) for _ in range(STEPS)]
        window = engine._window
    saved = offloaded[0][1]
    assert offloaded[0] == (saved, saved) and saved >= 60 << 20
    assert all(found >= saved - max(saved // PARTS, LEAST_WINDOW) and total == saved for found, total in offloaded)
    assert window.in_bytes == LEAST_WINDOW, "not as large as the forward"


def test_figures_say_how_much_is_on_the_device_when_a_forward_has_ended() -> None:
    """What is kept, and what is still being copied: of all that is saved the rest has left."""
    x = torch.linspace(0.1, 1.0, 1 << 14)
    with open_engine("offload", "host", window_bytes=1 << 19) as engine:
        for step in range(STEPS):
            y = x.detach().requires_grad_()
            storages: list[weakref.ref[torch.UntypedStorage]] = []
            with forward_pass(engine):
                for _ in range(60):
                    storages.append(weakref.ref(y.untyped_storage()))
                    y = y.sin()
            alive = sum(s.nbytes() for reference in storages[1:] if (s := reference()) is not None)
            stats = engine.stats()
            assert stats.kept_bytes + stats.in_flight_bytes == alive < stats.unique_bytes == 60 * x.nbytes
            assert (stats.in_flight_bytes > 0) is (step == 0), "in later steps as much is held back as the window has"
            y.sum().backward()


@pytest.mark.parametrize(
    ("names", "staying"), [({"0"}, 0), ({"0", "1"}, 0), ({"0", "2"}, 1), ({"2"}, 1), ({"0", "1", "2"}, 1)]
)
def test_only_what_the_last_blocks_offload_is_held_back(names: set[str], staying: int) -> None:
    """The backward of later blocks, which keep everything, hides the first copy-ins."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    x = torch.randn(32, 64)
    with ebbtide.enable_activation_offloading(model, policy=Some(names), min_bytes=0) as handle:
        for step in range(STEPS):
            model(x).square().sum().backward()
            stats = handle.stats()
            of_a_block = stats.unique_bytes // 3
            held = staying if step else 0  # nobody knows how much the first will offload
            assert abs(stats.offloaded_bytes - (len(names) - held) * of_a_block) < of_a_block // 3
