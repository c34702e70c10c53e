"""FSDP2 on the simulated device: one rank in this process, and two in processes of their own, with collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ebbtide
from ebbtide.profiling.minimal import ROUNDS
from tests.gpu.test_first_light import POLICIES, _batch, _model, _same, _step
from tests.helpers.spawn import run_cases
from tests.simdev import ranks


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("simdev", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("policy", ["offload", "minimal"])
def test_gradients_under_fsdp(mesh: DeviceMesh, policy: str) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step() -> list[torch.Tensor]:
        return [g.to_local() if isinstance(g, DTensor) else g for g in _step(model, x)]

    plain = step()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle:
        for _ in range(3):
            before = handle.stats().total_copy_in_bytes
            assert _same(plain, step())
        assert handle.stats().total_copy_in_bytes > before and handle.stats().live_tickets == 0


def test_two_ranks(tmp_path: Path) -> None:
    late = {"copy_delay_us": 500, "kernel_delay_us": 20, "jitter_us": 100}
    trials = {policy: (policy, mixed, 3, late) for policy, mixed in zip(POLICIES, cycle([False, True]), strict=False)}
    cases = {"begin": (ranks.begin, (str(tmp_path),))} | {name: (ranks.train, trial) for name, trial in trials.items()}
    found = run_cases(cases, 2, timeout_seconds=120.0)
    assert {name: found[name].values() for name in trials} == {name: [[], []] for name in trials}


def test_what_a_rank_tries_leaves_alone_what_all_ranks_decide(tmp_path: Path) -> None:
    """Minimal measures its first steps, in which ranks vote: once, for good."""
    cases = {"begin": (ranks.begin, (str(tmp_path),)), "train": (ranks.checkpointed, (2 + 2 * ROUNDS + 2,))}
    found = run_cases(cases, 2, timeout_seconds=120.0)["train"].values()
    assert found == [[3] + [4] * (2 * ROUNDS + 3)] * 2
