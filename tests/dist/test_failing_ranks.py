"""The state of every rank after one of them fails in a step."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from tests.helpers.engines import assert_nothing_left, hooks_are_closed
from tests.helpers.models import WIDTH, Attention, Mlp
from tests.helpers.spawn import Case, CaseResult, run_cases

LAYERS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Model(nn.Module):
    """A first projection and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def wrap(model: Model, wrapper: str, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (2,))
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if wrapper == "fsdp":
        policy = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(
            model, mesh.get_group(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    for layer in model.layers:
        fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(2, 8, WIDTH, generator=generator)


LIMIT_SECONDS = 8.0
"""Of the group in which a rank fails: longer than the ranks of a busy machine are apart in the step before."""


def fails(where: str, wrapper: str) -> tuple[str, str]:
    """Rank 1 fails in a step; return this rank's error and the results of the next steps."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    model = wrap(Model(), wrapper, DeviceMesh.from_group(group, "cpu"))
    handle = ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window=1)
    model(batch(0)).square().mean().backward()
    told = ""
    try:
        _failing_step(model, where)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        torch.zeros((), requires_grad=True).clone().backward()  # autograd drops its remaining nodes
    gc.collect()
    assert hooks_are_closed()
    model.zero_grad()
    engine = handle._engine
    handle.close()
    del model, handle
    gc.collect()
    assert_nothing_left(engine)
    return told, _trains_on(wrapper)


def _failing_step(model: nn.Module, where: str) -> None:
    middle: Any = next(m for k, m in model.named_modules() if "layers.1" in k and k.endswith("mlp.down"))
    removed: list[Any] = []
    if dist.get_rank() == 1:
        if where == "forward":
            removed.append(middle.register_forward_pre_hook(_raise))
        else:
            removed.append(middle.register_full_backward_pre_hook(_raise))
    try:
        model(batch(1)).square().mean().backward()
    finally:
        for hook in removed:
            hook.remove()


def _raise(*_: object) -> None:
    raise ValueError("rank 1 cannot")


def _trains_on(wrapper: str) -> str:
    """The group is lost; in a new group the next model trains."""
    dist.barrier()
    model = wrap(Model(), wrapper)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        model(batch(2)).square().mean().backward()
        assert handle.stats().offloaded_bytes > 0
        assert_nothing_left(handle._engine)
    return "trains on"


FAILURES: dict[str, Case] = {
    f"{where}, {w}": (fails, (where, w)) for where in ("forward", "backward") for w in ("fsdp2", "fsdp", "ddp")
}
OFTEN = {"forward, fsdp2", "backward, ddp"}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected cases, in one group of processes."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    return run_cases({p["name"]: FAILURES[p["name"]] for p in params}, 2, timeout_seconds=60.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in FAILURES])
def test_a_rank_that_fails_leaves_nothing_behind_on_any_rank(results: dict[str, CaseResult], name: str) -> None:
    (waited, then), (failed, afterwards) = results[name].values()
    assert failed == "ValueError: rank 1 cannot"
    # If a collective is pending, the time limit of the group ends the other rank.
    assert "imeout" in waited or "imed out" in waited or "Connection closed" in waited
    assert (then, afterwards) == ("trains on", "trains on")
