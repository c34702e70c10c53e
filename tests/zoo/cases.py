"""One case of the zoo: a family in one precision under one policy must be bitwise equal to ordinary training.

Each case takes three steps with ``verify=True``: the first compares recipes, the second knows the blocks, the third
trusts both, and if the policy measures, the last block of each kind runs in it without hooks. The outcome of ordinary
training is computed twice for each family and precision, to see that ordinary training repeats itself: no
claim is made about a model that does not.

Every run covers every pair of a family, a precision and a policy; the rest of their product is slow.
"""

from __future__ import annotations

import functools

import pytest
import torch

import ebbtide
from ebbtide.engine import Stats
from tests.helpers.models import PRECISIONS, build
from tests.helpers.oracle import Outcome, differences
from tests.helpers.pairs import all_pairs

POLICIES = ("keep", "offload", "inputs", "minimal", "auto")

PARTS_STAY = frozenset({"gru_stack"})
"""Families that save parts of a storage whose siblings change in place (``unsafe_chunk`` of the gates): those stay."""


def cases(names: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return the decorator that runs a test for every family, precision and policy."""
    return pytest.mark.parametrize(("name", "precision", "policy"), all_pairs(names, PRECISIONS, POLICIES))


@functools.cache
def plain(name: str, precision: str) -> Outcome:
    """Return what a plain step computes."""
    tiny = build(name, **PRECISIONS[precision])
    outcome = tiny.step()
    assert torch.isfinite(outcome.outputs["loss"])
    assert any(g is not None and g.any() for g in outcome.param_grads.values())
    assert differences(outcome, tiny.step()) == [], "plain training does not repeat itself"
    return outcome


def check_case(name: str, precision: str, policy: str) -> None:
    """Take three steps under a policy, and one after the handle is closed; assert that all equal ordinary training."""
    expected = plain(name, precision)
    tiny = build(name, **PRECISIONS[precision])
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for step in range(3):
            assert differences(expected, tiny.step()) == [], step
            assert handle.stats().live_tickets == 0, step
            if step == 1:
                check_bytes(name, policy, handle.stats())
    assert differences(expected, tiny.step()) == [], "after close"


def check_bytes(name: str, policy: str, stats: Stats) -> None:
    """Assert that the policy was effective: bytes were moved, or recomputed, as it promises."""
    assert stats.unique_bytes > 0 and stats.packs > 0
    assert stats.kept_bytes + stats.offloaded_bytes + stats.recomputed_bytes == stats.unique_bytes
    assert stats.saved_bytes > 0
    assert policy == "minimal" or not stats.checkpointed_blocks
    if policy == "keep":
        assert stats.offloaded_bytes == stats.total_copy_out_bytes == 0 and stats.kept_bytes == stats.unique_bytes
        return
    assert stats.offloaded_bytes > 0 and stats.total_copy_in_bytes > 0
    stays = policy == "inputs" or (name in PARTS_STAY and not stats.checkpointed_blocks)
    assert (stats.kept_bytes > 0) is stays
    if policy in ("auto", "minimal"):
        assert stats.recomputed_bytes > 0
        assert stats.total_recomputes > 0 or stats.checkpointed_blocks > 0
