"""Steps that are not one forward and one backward, on two ranks; and what is left when a rank fails in one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from tests.dist.trial import MOVING, Enable, Findings, Job, Record, check, compare, note_step, randomise
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
    """Blocks, run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(LAYERS))) -> Tensor:
        x = self.first(x)
        for i in order:
            x = self.layers[i](x)
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


# Schedules: each runs the forwards and backwards of one step and notes what they gave.

Schedule = Callable[[nn.Module, Callable[[str], None]], None]


def several_forwards(model: nn.Module, note: Callable[[str], None]) -> None:
    losses = [model(batch(i)).square().mean() for i in range(3)]
    torch.stack(losses).sum().backward()
    note("together")


def forwards_then_backwards(model: nn.Module, note: Callable[[str], None]) -> None:
    losses = [model(batch(i)).square().mean() for i in range(3)]
    for i in (1, 2, 0):
        losses[i].backward()
        note(str(i))


def accumulated(model: nn.Module, note: Callable[[str], None]) -> None:
    for i in range(3):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(i == 2)
            model.set_reshard_after_backward(i == 2)
        model(batch(i)).square().mean().backward()
        note(str(i))


def looked_at_between(model: nn.Module, note: Callable[[str], None]) -> None:
    model(batch(0)).square().mean().backward()
    with torch.no_grad():
        model(batch(1))
    model.eval()
    with torch.inference_mode() if isinstance(model, DistributedDataParallel) else torch.no_grad():
        for _ in range(2):
            model(batch(2))
    model.train()
    note("looked at")
    model(batch(3)).square().mean().backward()
    note("again")


def dropped(model: nn.Module, note: Callable[[str], None]) -> None:
    """A graph that is never walked, one that lives through the step, and one that is."""
    model(batch(0))
    kept = model(batch(1))
    model(batch(2)).square().mean().backward()
    note("one of three")
    del kept
    model(batch(3)).square().mean().backward()
    note("after")


def skipped_and_repeated(model: nn.Module, note: Callable[[str], None]) -> None:
    model(batch(0), (0, 2, 0, 1)).square().mean().backward()
    note("repeated")
    model(batch(1), (1,)).square().mean().backward()
    note("skipped")


SCHEDULES: dict[str, tuple[Schedule, tuple[str, ...]]] = {
    "several forwards": (several_forwards, ("fsdp2", "ddp")),
    "forwards, then backwards": (forwards_then_backwards, ("fsdp2",)),
    "accumulated": (accumulated, ("fsdp2", "fsdp", "ddp")),
    "looked at between": (looked_at_between, ("fsdp2", "fsdp", "ddp")),
    "dropped graphs": (dropped, ("fsdp2", "fsdp", "ddp")),
    "skipped and repeated blocks": (skipped_and_repeated, ("fsdp2",)),
}


def follow(schedule: str, wrapper: str) -> dict[str, Findings]:
    def make(enable: Enable) -> Job:
        model = Model()
        whole = randomise(model)
        wrapped = wrap(model, wrapper)
        enable(wrapped, strategy=wrapper)

        def step(number: int, record: Record) -> None:
            SCHEDULES[schedule][0](wrapped, lambda name: note_step(record, f"{number} {name}", wrapped))

        return Job(model=wrapped, step=step, whole=whole)

    return compare(make, MOVING)


def two_models(wrapper: str) -> dict[str, Findings]:
    """A student learns from a teacher that learns too: two handles, graphs of both in one backward."""

    def make(enable: Enable) -> Job:
        pair = [Model(), Model()]
        whole = {f"{i} {k}": w for i, m in enumerate(pair) for k, w in randomise(m).items()}
        both = nn.ModuleList(wrap(m, wrapper) for m in pair)
        for one in both:
            enable(one)

        def step(number: int, record: Record) -> None:
            one, two = both[0](batch(number)), both[1](batch(number))
            ((one - two).square().mean() + two.square().mean()).backward()
            note_step(record, str(number), both)

        return Job(model=both, step=step, whole=whole)

    return compare(make, MOVING)


# A rank that fails

LIMIT_SECONDS = 3.0


def fails(where: str, wrapper: str) -> tuple[str, str]:
    """Rank 1 fails in a step; return what this rank was told and what became of the next steps."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    model = wrap(Model(), wrapper, DeviceMesh.from_group(group, "cpu"))
    handle = ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window=1)
    model(batch(0)).square().mean().backward()
    told = ""
    try:
        _failing_step(model, where)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        torch.zeros((), requires_grad=True).clone().backward()  # autograd lets go of what was left to do
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
    """The group is lost; with another one the next model trains."""
    dist.barrier()
    model = wrap(Model(), wrapper)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        model(batch(2)).square().mean().backward()
        assert handle.stats().offloaded_bytes > 0
        assert_nothing_left(handle._engine)
    return "trains on"


CASES: dict[str, Case] = {
    **{f"{name}, {w}": (follow, (name, w)) for name, (_, wrappers) in SCHEDULES.items() for w in wrappers},
    **{f"two models, {w}": (two_models, (w,)) for w in ("fsdp2", "ddp")},
}
FAILURES: dict[str, Case] = {
    f"{where}, {w}": (fails, (where, w)) for where in ("forward", "backward") for w in ("fsdp2", "fsdp", "ddp")
}
OFTEN = {"several forwards, fsdp2", "forwards, then backwards, fsdp2", "dropped graphs, fsdp", "two models, ddp"}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Every case that was asked for, in one group of processes."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    return run_cases({p["name"]: (CASES | FAILURES)[p["name"]] for p in params}, 2, timeout_seconds=60.0)


def _parameters(names: dict[str, Case], often: set[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in names]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _parameters(CASES, OFTEN))
def test_a_schedule_gives_what_it_gives_without_offloading(results: dict[str, CaseResult], name: str) -> None:
    check(results[name].values(), blocks=2 * LAYERS if name.startswith("two models") else LAYERS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _parameters(FAILURES, {"forward, fsdp2", "backward, ddp"}))
def test_a_rank_that_fails_leaves_nothing_behind_on_any_rank(results: dict[str, CaseResult], name: str) -> None:
    (waited, then), (failed, afterwards) = results[name].values()
    assert failed == "ValueError: rank 1 cannot"
    # With a collective to wait for, the other rank is told by its group's own time limit.
    assert "imeout" in waited or "imed out" in waited or "Connection closed" in waited
    assert (then, afterwards) == ("trains on", "trains on")
