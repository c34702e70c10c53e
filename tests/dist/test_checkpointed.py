"""Offloading of sharded models with checkpointing: the checkpoints stay, and the tensors they keep are offloaded."""

from __future__ import annotations

import pytest

from tests.dist.checkpointed import FURTHER, POLICIES, USUAL, Setup, compare_setup
from tests.dist.sharded import spelled
from tests.dist.trial import MOVING, check
from tests.helpers.spawn import CaseResult, run_cases

SETUPS: dict[str, Setup] = {spelled(s): s for s in (*USUAL, *FURTHER)}
OFTEN = {spelled(s) for s in USUAL}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected cases, in one group of processes."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    policies = MOVING if len(wanted) <= len(OFTEN) else ("keep", "inputs", *MOVING)
    cases = {name: (compare_setup, (SETUPS[name], POLICIES.get(SETUPS[name].how, policies))) for name in wanted}
    return run_cases(cases, 2, timeout_seconds=90.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in SETUPS])
def test_checkpoints_stay_and_what_they_keep_is_offloaded(results: dict[str, CaseResult], name: str) -> None:
    values = results[name].values()
    check(values, blocks=3)
    for by_policy in values:
        # Two steps of three blocks: hidden states, and the tensors that blocks share; never those inside a block.
        assert all(found.offloaded <= 2 * (3 + 3) for found in by_policy.values()) or _keeps_more(SETUPS[name])


def _keeps_more(setup: Setup) -> bool:
    """Whether units smaller than a layer are checkpointed, as by accelerate before 1.15 under FSDP2."""
    import accelerate

    in_parts = tuple(map(int, accelerate.__version__.split(".")[:2])) < (1, 15)
    by_accelerate = setup.how in ("accelerate", "ms-swift") and setup.wrapper == "fsdp2"
    return "selective" in setup.how or (by_accelerate and in_parts)
