"""Offloading with tensor, sequence and pipeline parallelism, and on two-dimensional meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import parallel, sharded, stages
from tests.dist.schedules import SCHEDULES
from tests.dist.trial import MOVING, POLICIES, Findings, check
from tests.helpers.spawn import CaseResult, run_cases

Compare = Callable[[Any, tuple[str, ...]], dict[str, Findings]]


def _schedules() -> dict[str, tuple[Compare, Any]]:
    """Every style with every schedule."""
    return {
        f"{style} parallel, {schedule}": (parallel.compare_setup, parallel.Setup(style=style, schedule=schedule))
        for style in ("tensor", "dtensor", "sequence", "stream")
        for schedule in SCHEDULES
    }


TWO: dict[str, tuple[Compare, Any]] = {
    **_schedules(),
    "loss parallel": (parallel.compare_setup, parallel.Setup(style="loss")),
    "sequence parallel, checkpointed": (
        parallel.compare_setup,
        parallel.Setup(style="sequence", checkpointed=True),
    ),
    "stream parallel, checkpointed": (parallel.compare_setup, parallel.Setup(style="stream", checkpointed=True)),
    **{s: (stages.compare_setup, stages.Setup(schedule=s)) for s in stages.PLACES},
}
FOUR: dict[str, tuple[Compare, Any]] = {
    "sequence parallel and FSDP2": (parallel.compare_setup, parallel.Setup(style="sequence", shard=True)),
    "stream parallel and FSDP2": (parallel.compare_setup, parallel.Setup(style="stream", shard=True)),
    "tensor parallel and FSDP2, DTensors, bfloat16": (
        parallel.compare_setup,
        parallel.Setup(style="dtensor", shard=True, mixed=True),
    ),
    "tensor parallel and FSDP2, checkpointed": (
        parallel.compare_setup,
        parallel.Setup(style="tensor", shard=True, checkpointed=True),
    ),
    "1F1B and FSDP2": (stages.compare_setup, stages.Setup(schedule="1F1B", shard=True)),
    "ZBVZeroBubble and FSDP2": (stages.compare_setup, stages.Setup(schedule="ZBVZeroBubble", shard=True)),
    **{sharded.spelled(s): (sharded.compare_setup, s) for s in sharded.ON_FOUR},
}
CASES = TWO | FOUR
OFTEN = {
    "tensor parallel, raised",
    "dtensor parallel, several forwards",
    "sequence parallel, looked at",
    "stream parallel, one",
    "1F1B",
    "ZBVZeroBubble",
    "sequence parallel and FSDP2",
    sharded.spelled(sharded.ON_FOUR[0]),
}


def _blocks(name: str) -> int:
    # A rank of the interleaved schedules and of the V holds two stages of two blocks.
    return 4 if any(word in name for word in ("Interleaved", "ZeroBubble", "two models")) else 2


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected cases: one group of processes for two ranks, one for four."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    found: dict[str, CaseResult] = {}
    for known, size in ((TWO, 2), (FOUR, 4)):
        # Cases of every run get the policies that move; in a run with slow ones all cases get all policies.
        policies = MOVING if len(wanted) <= len(OFTEN) else POLICIES
        cases = {name: (known[name][0], (known[name][1], policies)) for name in wanted if name in known}
        found |= run_cases(cases, size, timeout_seconds=90.0) if cases else {}
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in CASES])
def test_what_a_rank_computes_is_bitwise_that_of_plain_training(results: dict[str, CaseResult], name: str) -> None:
    values = results[name].values()
    check(values, blocks=_blocks(name))
    checkpointed = getattr(CASES[name][1], "checkpointed", False)
    for by_policy in values:
        for policy, found in by_policy.items():
            # A tensor dropped by an outer checkpoint is none of ours; Auto's plan depends on measured times.
            expected = found.checkpointed == (2 if checkpointed else 0)
            assert expected or (policy in ("minimal", "auto") and not checkpointed), (name, policy, found)
            if policy == "minimal" and not checkpointed:
                assert found.recomputes + found.checkpointed > 0
            if policy == "minimal" and name in ("stream parallel, one", "stream parallel and FSDP2"):
                assert found.checkpointed == _blocks(name), "inputs that are DTensors are inputs"
