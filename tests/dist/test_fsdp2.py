"""Offloading under FSDP2, FSDP1 and DDP on two ranks: the gradients of every shard, and what the store holds."""

from __future__ import annotations

import pytest

from tests.dist.sharded import POLICIES, Findings, Setup, compare, spelled, variants
from tests.helpers.spawn import CaseResult, run_cases

SETUPS = {spelled(s): s for s in variants()}


@pytest.fixture(scope="module")
def results() -> dict[str, CaseResult]:
    return run_cases({name: (compare, (setup,)) for name, setup in SETUPS.items()}, 2, timeout_seconds=60.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SETUPS)
def test_shards_are_bitwise_those_of_plain_training(results: dict[str, CaseResult], name: str, policy: str) -> None:
    setup = SETUPS[name]
    for found in _findings(results, name, policy):
        assert found.differences == []
        assert [w for w in found.weights_parked if not _unknowable(setup, w)] == []
        assert (found.live_tickets, found.store_bytes) == (0, 0)
        assert found.demoted == ()
        _did_its_work(setup, policy, found)


def _unknowable(setup: Setup, weight: str) -> bool:
    # Autocast's copy of ``weight.data.t()`` has another shape and no graph: nothing ties it to a weight.
    return setup.mixed == "autocast" and ".up " in weight


def _did_its_work(setup: Setup, policy: str, found: Findings) -> None:
    # A case in which nothing happens shows nothing.
    assert len(found.block_names) == 2
    assert found.units > 0 or setup.wrapper == "ddp"
    if policy == "keep":
        assert (found.parked, found.recomputes, found.checkpointed) == (0, 0, 0)
    else:
        assert found.parked > 0
    if policy in ("minimal", "remake", "auto"):
        assert found.recomputes > 0


def _findings(results: dict[str, CaseResult], name: str, policy: str) -> list[Findings]:
    return [values[policy] for values in results[name].values()]
