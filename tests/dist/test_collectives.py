"""Megatron's tensor and sequence parallelism and experts on several ranks: collectives that only the forward shows."""

from __future__ import annotations

import pytest

from tests.dist.collectives import LAYERS, Setup, compare_setup
from tests.dist.trial import check
from tests.helpers.spawn import CaseResult, run_cases

POLICIES = ("offload", "minimal", "recompute", "auto")
SETUPS = {
    "tensor parallel": (Setup(style="tensor"), POLICIES),
    "sequence parallel": (Setup(style="sequence"), POLICIES),
    "experts, uneven": (Setup(style="experts", lengths=(4, 96)), POLICIES),
    "tensor parallel, one rank wishes": (Setup(style="tensor", one_wishes=True), ("minimal",)),
    "experts, uneven, one rank wishes": (Setup(style="experts", lengths=(96, 4), one_wishes=True), ("minimal",)),
    "experts after a dense layer, one rank wishes": (
        Setup(style="experts", dense=1, one_wishes=True), ("minimal",)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected cases, in one group of processes."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    return run_cases({name: (compare_setup, SETUPS[name]) for name in wanted}, 2, timeout_seconds=15.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SETUPS)
def test_a_rank_computes_what_plain_training_does(results: dict[str, CaseResult], name: str) -> None:
    values = results[name].values()
    check(values, blocks=LAYERS)
    if SETUPS[name][0].one_wishes:  # the others follow
        counts = {found["minimal"].checkpointed for found in values}
        # The first block of a structure is not checkpointed in the first pass; a dense layer concerns rank 0 alone.
        assert counts == ({LAYERS, LAYERS - 1} if SETUPS[name][0].dense else {LAYERS})
