"""``explain()`` and ``stats()`` speak of the same bytes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.units import format_size
from ebbtide.store.host import HostTier
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.handles import enable_over
from tests.helpers.models import PRECISIONS, build
from tests.helpers.pairs import all_pairs

NAMES = ("block", "conv", "lstm", "lstm_stack", "llama", "t5")
POLICIES = ("auto", "offload", "inputs", "minimal", "keep")
LINE = re.compile(r" *(\S+ [KMGT]?i?B)  (keep|offload|recompute|checkpoint) +x(\d+) +(\S+)")


def assert_agrees(handle: ebbtide.Handle) -> Counter[Action]:
    """Assert that the lines of ``explain()`` add up to ``stats()``; return the bytes by action."""
    stats, sites = handle.stats(), handle._engine.last_pass.sites
    sums: Counter[Action] = Counter()
    for (_, action), (count, nbytes) in sites.items():
        assert nbytes >= 0 and (count > 0 or nbytes == 0)
        sums[action] += nbytes
    assert sums[Action.KEEP] == stats.kept_bytes
    assert sums[Action.OFFLOAD] == stats.offloaded_bytes
    assert sums[Action.RECOMPUTE] + sums[Action.CHECKPOINT] == stats.recomputed_bytes
    assert sum(sums.values()) == stats.unique_bytes
    shown = Counter(match.groups() for line in handle.explain().splitlines() if (match := LINE.fullmatch(line)))
    rows = ((format_size(n), a.value, str(c), str(site)) for (site, a), (c, n) in sites.items() if n)
    assert shown == Counter(rows) and shown
    return sums


@pytest.mark.parametrize(("name", "precision", "policy"), all_pairs(NAMES, PRECISIONS, POLICIES))
def test_the_lines_of_a_pass_add_up_to_its_stats(name: str, precision: str, policy: str) -> None:
    tiny = build(name, **PRECISIONS[precision])
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0) as handle:
        for _ in range(4):
            tiny.step()
            assert_agrees(handle)


@pytest.mark.parametrize("room_bytes", [None, 30_000])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_held_back_or_refused_is_listed_as_kept(precision: str, room_bytes: int | None) -> None:
    tiny = build("block", **PRECISIONS[precision])
    tier = HostTier(FakeDevice(1e6, 1e6), budget_bytes=room_bytes)
    with enable_over(tier, tiny.model, policy="offload", min_bytes=0, window="30KiB") as handle:
        for step in range(3):
            tiny.step()
            sums = assert_agrees(handle)
            assert sums[Action.OFFLOAD]
            assert sums[Action.KEEP] or (step == 0 and room_bytes is None)
    tier.close()


def test_a_site_with_several_actions_shows_each() -> None:
    tiny = build("block")
    kept: list[torch.Size] = []

    def first_only(tensor: torch.Tensor) -> bool:
        kept.append(tensor.shape)
        return len(kept) > 3

    with ebbtide.enable_activation_offloading(
        tiny.model, policy="offload", min_bytes=0, keep_filter=first_only
    ) as handle:
        tiny.step()
        assert_agrees(handle)
        actions: dict[str, set[str]] = {}
        for line in handle.explain().splitlines():
            if match := LINE.fullmatch(line):
                actions.setdefault(match[4], set()).add(match[2])
        assert {"keep", "offload"} in actions.values()


def test_small_storages_are_counted_in_one_line() -> None:
    tiny = build("block")
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload", min_bytes=0) as handle:
        tiny.step()
        before, storages = handle.stats(), sum(count for count, _ in handle._engine.last_pass.sites.values())
        assert (before.small_storages, before.small_bytes) == (0, 0)
        assert "small storages" not in handle.explain()
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload") as handle:
        for _ in range(2):
            tiny.step()
            stats = handle.stats()
            assert (stats.small_storages, stats.small_bytes) == (storages, before.unique_bytes)
            assert stats.unique_bytes == 0 and stats.coverage_percent == 100.0
            line = f"small storages (< 64.0 KiB) that stay: {storages}, {format_size(stats.small_bytes)}"
            assert handle.explain().splitlines().count(line) == 1


def _of_the_pass(handle: ebbtide.Handle) -> list[str]:
    """Return the lines on the pass; what the store has written grows by itself."""
    return [line for line in handle.explain().splitlines()[1:] if not line.startswith("store:")]


class Cached(nn.Module):
    """Runs its head over what it is given, with or without its layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, cached: bool) -> torch.Tensor:
        for layer in () if cached else self.layers:
            x = layer(x)
        return self.head(x)


def test_a_pass_that_runs_no_block_hides_no_figures() -> None:
    """It comes between another forward and the backward over both."""
    model = Cached()
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        for _ in range(10):
            hidden = model(torch.randn(2, 8, 16), cached=False)
            alone, explained = handle.stats(), _of_the_pass(handle)
            output = model(hidden, cached=True)
            both = handle.stats()
            assert both.packs and (both.packs, both.unique_bytes, both.kept_bytes, both.checkpointed_blocks) == (
                alone.packs, alone.unique_bytes, alone.kept_bytes, alone.checkpointed_blocks,
            )  # fmt: skip
            assert _of_the_pass(handle) == explained
            (hidden.sum() + output.sum()).backward()
        assert getattr(handle.plan, "judged", False), "its steps were not timed"
