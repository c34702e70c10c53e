"""Views of one storage with their own entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.base.actions import Site
from ebbtide.engine import Block, Engine
from ebbtide.engine.index import MOST_PARTS, StorageIndex
from ebbtide.engine.layout import Layout
from ebbtide.engine.tickets import Entry
from ebbtide.schedule import LiveCount
from ebbtide.wrap.hooks import offloading
from tests.helpers.engines import open_engine


def loop(engine: Engine | None, frames: Tensor, steps: int) -> tuple[Tensor, list[int]]:
    """Loop over time, saving a view of the input in each step; return the gradient, and the sizes of moved storages."""
    weight, h = torch.ones(64, requires_grad=True), torch.zeros(64)

    def forward() -> Tensor:
        nonlocal h
        for t in range(steps):
            h = h * 0.5 + frames[t] * weight
        return h

    if engine is None:
        return torch.autograd.grad(forward().sum(), weight)[0], []
    engine.begin_pass()
    with offloading(engine, Block(name="loop", kind="loop", index=0, count=1, weights=tuple), []):
        out = forward()
    engine.end_pass()
    storage = frames.untyped_storage()
    entries = [entry for reference in engine.index.known[id(storage)][1] if (entry := reference()) is not None]
    sizes = [entry.nbytes for entry in entries if entry.storage_ref and entry.storage_ref() is storage]
    return torch.autograd.grad(out.sum(), weight)[0], sizes


def test_many_views_of_a_storage_move_it_whole() -> None:
    frames = torch.randn(400, 64)
    plain, _ = loop(None, frames, 400)
    with open_engine("offload") as engine:
        gradient, sizes = loop(engine, frames, 400)
    assert torch.equal(gradient, plain)
    assert len(sizes) == MOST_PARTS + 1 and sizes.count(400 * 64 * 4) == 1


def test_few_views_of_a_storage_move_alone() -> None:
    frames = torch.randn(400, 64)
    with open_engine("offload") as engine:
        _, sizes = loop(engine, frames, 8)
    assert len(sizes) == 8 and max(sizes) < 2048


def test_a_storage_that_is_not_known_has_no_parts() -> None:
    assert StorageIndex().bytes_apart(torch.zeros(3).untyped_storage(), 0) == 0


class Interrupted(dict[Any, Any]):
    """Is interrupted before it takes its first key."""

    armed = True

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        super().__setitem__(key, value)


def test_an_interrupt_while_a_storage_becomes_known_is_over_when_the_storage_dies() -> None:
    index, live = StorageIndex(), LiveCount()
    index._keys = Interrupted()

    def remember() -> None:
        tensor = torch.zeros(3)
        layout = Layout.of(tensor)
        site = Site("block", "", "node", 0)
        entry = Entry(torch.empty(0), site=site, region=(0, 12), base_layout=layout, at=0, live=live)
        index.remember(tensor.untyped_storage(), entry)
        assert index.find(tensor.untyped_storage(), 0, 0, 12) is entry

    with pytest.raises(KeyboardInterrupt):
        remember()
    for _ in range(3):
        remember()
    assert len(index.known) <= 1 and len(index._keys) <= 1
