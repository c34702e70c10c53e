"""Sharded models out of checkpoints: the shards, and two steps of training, are those of loading plainly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.loading import Setup, compare, spelled, write_checkpoint
from tests.helpers.spawn import CaseResult, run_cases

FSDP = Setup(wrapper="fsdp")
ON_TWO = (
    Setup(),
    Setup(tied=True, optimizer=True),
    Setup(dtype="float32"),
    Setup(host=True),
    Setup(wrapper="single"),
    Setup(wrapper="tp", tensor=2),
    Setup(source="broadcast"),
    Setup(seeing="first"),
    Setup(seeing="first", dtype="float32", tied=True),
    Setup(seeing="state dict"),
    Setup(seeing="model"),
    Setup(adapters=True),
    Setup(adapters=True, seeing="first"),
    FSDP,
    replace(FSDP, flat=True),
    replace(FSDP, flat=True, seeing="first"),
    replace(FSDP, sharding="NO_SHARD", tied=True),
    replace(FSDP, sharding="SHARD_GRAD_OP", optimizer=True),
    Setup(family="gpt2"),
    Setup(family="qwen3_moe"),
    Setup(family="qwen3_moe", seeing="first"),
    Setup(family="qwen3_moe", dtype="float32"),
    Setup(family="qwen2_5_vl"),
    Setup(family="wan"),
)
ON_FOUR = (
    Setup(replicas=2),
    Setup(tensor=2),
    Setup(tensor=2, seeing="first"),
    Setup(replicas=2, family="qwen3_moe", source="broadcast"),
    replace(FSDP, replicas=2, sharding="HYBRID_SHARD"),
    replace(FSDP, replicas=2, sharding="HYBRID_SHARD", flat=True),
)
CASES = {f"{world}: {spelled(s)}": (world, s) for world, setups in ((2, ON_TWO), (4, ON_FOUR)) for s in setups}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, CaseResult]]:
    """Every case that was asked for; one group of processes a world size, one checkpoint a family."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    folders: dict[tuple[str, bool], Path] = {}
    found: dict[str, CaseResult] = {}
    for world in (2, 4):
        cases = {}
        for name in (n for n in wanted if CASES[n][0] == world):
            setup = CASES[name][1]
            key = (setup.family, setup.tied)
            if key not in folders:
                folders[key] = tmp_path_factory.mktemp("checkpoint")
                write_checkpoint(folders[key], setup.family, tied=setup.tied)
            cases[name] = (compare, (setup, str(folders[key])))
        found |= run_cases(cases, world, timeout_seconds=90.0) if cases else {}
    yield found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_shards_and_two_steps_are_those_of_loading_plainly(results: dict[str, CaseResult], name: str) -> None:
    world, setup = CASES[name]
    values = results[name].values()
    assert len(values) == world
    for found in values:
        assert found["loaded"] == []
        assert found["trained"] == []
        assert found["names"] > 0
        assert found.get("tied", setup.tied) == setup.tied
    done = [found["progress"] for found in values if found["held"]]
    assert all(read == total > 0 for read, total in done)
