"""Offloading under FSDP2, FSDP1 and DDP on two ranks: the gradients of every shard, and what the store holds.

The full product of strategies, schedules and policies is slow; each run of the tests takes one schedule
per strategy, and further combinations of wrappers and settings.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.schedules import SCHEDULES
from tests.dist.sharded import FURTHER, PRODUCT, STRATEGIES, USUAL, Setup, compare_setup, refused_by_torch, spelled
from tests.dist.trial import MOVING, POLICIES, check
from tests.helpers.spawn import CaseResult, run_cases

SETUPS = {spelled(s): s for s in (*PRODUCT, *USUAL, *FURTHER)}


def _diagonal() -> list[str]:
    """One schedule per strategy, the next one for the next strategy."""
    names, schedules = [], list(SCHEDULES)
    for number, strategy in enumerate(STRATEGIES):
        schedule = schedules[number % len(schedules)]
        setup = replace(strategy, schedule=schedule)
        names.append(spelled(strategy if refused_by_torch(setup) else setup))
    return names


OFTEN = list(dict.fromkeys([*_diagonal(), *map(spelled, USUAL)]))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected cases, in one group of processes."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    # Cases of every run get two moving policies, except the first two; in a run with slow ones all get all.
    few = OFTEN[2:] if len(wanted) <= len(OFTEN) else []
    some = [(MOVING[i % 3], MOVING[(i + 1) % 3]) for i in range(len(wanted))]
    policies = {name: two if name in few else POLICIES for name, two in zip(wanted, some, strict=True)}
    return run_cases({n: (compare_setup, (SETUPS[n], policies[n])) for n in wanted}, 2, timeout_seconds=180.0)


def _parameter(name: str) -> object:
    return pytest.param(name, id=name, marks=[] if name in OFTEN else [pytest.mark.slow])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [_parameter(name) for name in SETUPS])
def test_shards_are_bitwise_those_of_plain_training(results: dict[str, CaseResult], name: str) -> None:
    setup, values = SETUPS[name], results[name].values()
    check(
        values, blocks=4 if setup.schedule == "two models" else 2, unknowable=lambda weight: _unknowable(setup, weight)
    )
    for by_policy in values:
        assert all((f.units > 0) == (setup.wrapper in ("fsdp", "fsdp2")) for f in by_policy.values())
        # If nothing is to be recomputed, only autocast's copies of weights are.
        moved = ("inputs", "offload")
        assert all(f.recomputes > 0 for p, f in by_policy.items() if p not in ("keep", *moved))
        assert all(f.recomputes == 0 for p, f in by_policy.items() if p == "keep" or (p in moved and not setup.mixed))


def _unknowable(setup: Setup, weight: str) -> bool:
    # Autocast's copy of ``weight.data.t()`` has another shape and no graph; that of a frozen weight from outside the
    # block has no module: nothing ties them to a weight.
    return setup.mixed == "autocast" and (".up " in weight or (setup.lora and "shared." in weight))
