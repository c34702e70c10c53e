"""Offloading under FSDP2, FSDP1 and DDP on two ranks: the gradients of every shard, and what the store holds."""

from __future__ import annotations

import pytest

from tests.dist.sharded import FURTHER, USUAL, Setup, compare_setup, spelled
from tests.dist.trial import MOVING, POLICIES, check
from tests.helpers.spawn import CaseResult, run_cases

SETUPS = {spelled(s): s for s in (*USUAL, *FURTHER)}
OFTEN = [spelled(s) for s in USUAL]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Every case that was asked for, in one group of processes."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    policies = {name: MOVING if name in OFTEN[2:] else POLICIES for name in wanted}
    cases = {name: (compare_setup, (SETUPS[name], policies[name])) for name in wanted}
    return run_cases(cases, 2, timeout_seconds=90.0)


def _parameter(name: str) -> object:
    setup = SETUPS[name]
    marks = [] if name in OFTEN else [pytest.mark.slow]
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [_parameter(name) for name in SETUPS])
def test_shards_are_bitwise_those_of_plain_training(results: dict[str, CaseResult], name: str) -> None:
    setup, values = SETUPS[name], results[name].values()
    check(values, blocks=2, unknowable=lambda weight: _unknowable(setup, weight))
    for by_policy in values:
        assert all((f.units > 0) == (setup.wrapper in ("fsdp", "fsdp2")) for f in by_policy.values())
        # Under offload only autocast's copies of weights are made again.
        assert all(f.recomputes > 0 for p, f in by_policy.items() if p not in ("keep", "offload"))
        assert all(
            f.recomputes == 0 for p, f in by_policy.items() if p == "keep" or (p == "offload" and not setup.mixed)
        )


def _unknowable(setup: Setup, weight: str) -> bool:
    # Autocast's copy of ``weight.data.t()`` has another shape and no graph, that of a frozen weight from outside the
    # block has no module: nothing ties them to a weight.
    return setup.mixed == "autocast" and (".up " in weight or (setup.lora and "shared." in weight))
