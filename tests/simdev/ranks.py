"""The code of each of two ranks, on a simulated device of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ebbtide
from tests.gpu.test_first_light import _batch, _model, _step
from tests.simdev import collectives, device
from tests.simdev.build import build


def begin(folder: str) -> None:
    """Load the device and replace the ranks' group with one that takes its tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device.load(build())
    device.configure(poison=1, races=1)
    collectives.register(device.DEVICE)
    dist.init_process_group(
        collectives.NAME,
        init_method=f"file://{Path(folder, 'rendezvous')}",
        rank=rank,
        world_size=size,
    )


def train(policy: str, mixed: bool, steps: int, delays: dict[str, int]) -> list[str]:
    """Train in shards, without and with a policy; return the differences, and every unordered access."""
    mesh = init_device_mesh(device.DEVICE, (dist.get_world_size(),))
    model = _model(width=64, depth=3)
    x = _batch(width=64, tokens=64) + dist.get_rank()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)

    def step() -> list[torch.Tensor]:
        return [g.to_local() if isinstance(g, DTensor) else g for g in _step(model, x)]

    plain, found = step(), list[str]()
    if not any(g.any() for g in plain[1:]):
        found.append("plain training has no gradients")
    with (
        ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle,
        device.configured(**delays),
    ):
        for number in range(steps):
            before, moved = handle.stats().total_copy_in_bytes, device.counters().get("bytes_in", 0)
            found += [
                f"step {number}: tensor {n}"
                for n, (a, b) in enumerate(zip(plain, step(), strict=True))
                if not torch.equal(a, b)
            ]
            told = handle.stats().total_copy_in_bytes - before
            torch.accelerator.synchronize()
            counted = device.counters().get("bytes_in", 0) - moved
            if told != counted:
                found.append(f"step {number}: {told} bytes came in by stats(), {counted} by the device")
        if policy != "keep" and told == 0:
            found.append("the last step moved nothing")
        if handle.stats().live_tickets:
            found.append("tickets are alive")
    torch.accelerator.synchronize()
    return found + device.violations()


class Uncovered(torch.nn.Module):
    """A residual block with units of its own, and much in between that no recipe gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(6):
            y = torch.cumsum(torch.special.erfcx(torch.sigmoid(y)), -1) / 64
        return x + self.last(y)


def checkpointed(steps: int) -> list[int]:
    """Train blocks whose second forward needs all ranks under ``Minimal``; return how many each step checkpoints."""
    mesh = init_device_mesh(device.DEVICE, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Uncovered() for _ in range(4))).to(device.DEVICE)
    x = _batch(width=64, tokens=64).requires_grad_()
    for block in model:
        for unit in block.children():
            fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found: list[int] = []
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window="1B") as handle:
        for _ in range(steps):
            model(x).square().mean().backward()
            found.append(handle.stats().checkpointed_blocks)
    return found
