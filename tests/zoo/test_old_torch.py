"""Families under every policy in a torch that does not expose saved tensors, as before torch 2.10."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import ebbtide
from ebbtide.engine import slots
from tests.helpers.models import PRECISIONS, build
from tests.helpers.oracle import differences
from tests.zoo.cases import POLICIES, plain

SAVED_TENSOR = torch._C._autograd.SavedTensor  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove ``SavedTensor.data`` if this torch has it: code that reads it fails."""
    with monkeypatch.context() as patch:
        patch.delattr(SAVED_TENSOR, "data", raising=False)
        patch.setattr(slots, "_readable", False)
        yield


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "bert", "lstm_stack"])
def test_a_family_under_a_policy(name: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ebbtide")
    expected = plain(name, "fp32")
    tiny = build(name, **PRECISIONS["fp32"])
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for step in range(3):
            assert differences(expected, tiny.step()) == [], step
            assert handle.stats().live_tickets == 0, step
        stats = handle.stats()
        if policy != "keep":
            assert stats.offloaded_bytes > 0 and stats.total_copy_in_bytes > 0
        assert stats.coverage_percent is None
    assert "failed and is left out" not in caplog.text
    assert ("SavedTensor.data" in caplog.text) is (policy in ("auto", "minimal"))
