"""Sharded models loaded from checkpoints: shards, and two steps of training, equal those of ordinary loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.loading import Setup, checkpoint_of, compare, spelled, write_checkpoint
from tests.helpers.spawn import CaseResult, run_cases
from tests.helpers.torches import NO_INTEGERS, shards_integers

FSDP = Setup(wrapper="fsdp")
USUAL = (
    (2, Setup()),
    (2, Setup(tied=True, optimizer=True)),
    (2, Setup(host=True, dtype="float32")),
    (2, Setup(wrapper="tp", tensor=2)),
    (2, Setup(seeing="first", dtype="float32", tied=True)),
    (2, Setup(seeing="states")),
    (2, Setup(seeing="state dict")),
    (2, Setup(seeing="itself", tied=True, optimizer=True)),
    (2, Setup(adapters="before")),
    (2, Setup(adapters="after")),
    (2, Setup(four="uint8", adapters="before")),
    (2, Setup(four="bfloat16", nested=True, adapters="after")),
    (2, Setup(four="bfloat16", nested=True, column=True, adapters="before")),
    (2, replace(FSDP, flat=True)),
    (2, replace(FSDP, sharding="NO_SHARD", tied=True)),
    (2, Setup(family="qwen3_moe", seeing="first")),
    (2, Setup(family="qwen3_moe", dtype="float32")),
    (2, Setup(family="qwen2_5_vl")),
    (2, Setup(family="wan", dtype="float32")),
    (4, Setup(replicas=2)),
    (4, Setup(replicas=2, four="uint8", adapters="before")),
    (4, Setup(tensor=2)),
    (4, replace(FSDP, replicas=2, sharding="HYBRID_SHARD")),
)
FURTHER = (
    (2, Setup(host=True)),
    (2, Setup(dtype="float32")),
    (2, Setup(wrapper="single")),
    (2, Setup(source="broadcast")),
    (2, Setup(seeing="first")),
    (2, Setup(seeing="model")),
    (2, Setup(seeing="themselves", family="qwen3_moe")),
    (2, Setup(adapters="before", seeing="first")),
    (2, Setup(four="uint8", nested=True)),
    (2, Setup(four="bfloat16", seeing="first", host=True, adapters="before")),
    (2, Setup(four="uint8", wrapper="single", adapters="before")),
    (2, Setup(four="uint8", column=True, seeing="first", adapters="after")),
    (2, FSDP),
    (2, replace(FSDP, flat=True, seeing="first")),
    (2, replace(FSDP, sharding="SHARD_GRAD_OP", optimizer=True)),
    (2, Setup(family="gpt2")),
    (2, Setup(family="gpt2", seeing="first", tied=True)),
    (2, Setup(family="qwen3_moe")),
    (2, Setup(family="mixtral")),
    (2, Setup(family="llava")),
    (2, Setup(family="deepseek_v3")),
    (4, Setup(tensor=2, seeing="first")),
    (4, Setup(replicas=2, family="qwen3_moe", source="broadcast")),
    (4, Setup(replicas=2, tensor=2)),
    (4, replace(FSDP, replicas=2, sharding="HYBRID_SHARD", flat=True)),
)
"""With the slow tests."""
CASES = {f"{world}: {spelled(s)}": (world, s) for world, s in USUAL + FURTHER}
SLOW = {f"{world}: {spelled(s)}" for world, s in FURTHER}
UNABLE = {n for n, (_, s) in CASES.items() if s.four == "uint8" and s.wrapper == "fsdp2" and not shards_integers()}
"""Where plain FSDP2 raises."""


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, CaseResult]]:
    """Results of the selected cases: one group of processes per world size, one checkpoint per family."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    folders: dict[Setup, Path] = {}
    found: dict[str, CaseResult] = {}
    for world in (2, 4):
        cases = {}
        for name in (n for n in wanted if CASES[n][0] == world and n not in UNABLE):
            setup = CASES[name][1]
            key = checkpoint_of(setup)
            if key not in folders:
                folders[key] = tmp_path_factory.mktemp("checkpoint")
                write_checkpoint(folders[key], key)
            cases[name] = (compare, (setup, str(folders[key])))
        found |= run_cases(cases, world, timeout_seconds=90.0) if cases else {}
    yield found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_shards_and_two_steps_are_those_of_loading_plainly(results: dict[str, CaseResult], name: str) -> None:
    if name in UNABLE:
        pytest.skip(NO_INTEGERS)
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
