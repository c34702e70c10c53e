"""The zoo on a real card: families in several precisions under every policy, with the card's own kernels.

Steps run with deterministic kernels if there are any; a family whose ordinary training does not repeat itself there is
skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ebbtide
from tests.helpers.accelerator import on_device
from tests.helpers.models import FAMILIES, PRECISIONS, build
from tests.helpers.oracle import differences
from tests.helpers.pairs import all_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs_cuda,
    pytest.mark.filterwarnings("ignore"),
]

POLICIES = ("offload", "minimal", "auto")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Choose kernels that repeat their bits where torch has some."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "precision", "policy"), all_pairs(tuple(FAMILIES), PRECISIONS, POLICIES))
def test_a_family_under_a_policy(name: str, precision: str, policy: str) -> None:
    try:
        tiny = on_device(build(name, **PRECISIONS[precision]))
        expected = tiny.step()
    except NotImplementedError as error:  # no such kernel for this dtype
        pytest.skip(f"plain training: {str(error).splitlines()[0]}")
    if differences(expected, tiny.step()):
        pytest.skip("plain training does not repeat its bits")
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for step in range(3):
            assert differences(expected, tiny.step()) == [], step
            assert handle.stats().live_tickets == 0, step
    assert differences(expected, tiny.step()) == [], "after close"
