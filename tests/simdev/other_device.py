"""Use a device other than the current one, and then the current one, in a process with two; run by ``test_device``."""

from __future__ import annotations

import tempfile
from typing import Any, cast

import torch
from torch import nn

import ebbtide
from ebbtide.script.request import Request
from ebbtide.script.steps import ScriptSteps
from ebbtide.store import meter
from ebbtide.store.device_memory import index_of
from ebbtide.track import summarise
from tests.simdev.device import configure

MIB = 1 << 20


def main() -> None:
    """Train some steps under ``Auto``, and check on which device memory was read and pinned."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    where = torch.device(kind.type, 1)
    _let_others_fill_the_current_device()
    pinned_on = _note_where_memory_is_pinned()
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
    model, x = nn.Sequential(*layers).to(where), torch.randn(256, 64, device=where)
    policy = ebbtide.Auto(memory_budget="500MiB")
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
        for _ in range(6):
            model(x).square().mean().backward()
        tier, plan = handle._engine.tier, cast("Any", handle.plan)
        assert (meter.allocatable_bytes(tier) or 0) > 500 * MIB < (meter.room_bytes(tier) or 0)
        assert meter.reserved_bytes(tier) == torch.accelerator.memory_reserved(1) > 0
        assert plan._loop.budget_bytes == 500 * MIB and "no plan fits" not in handle.explain()
    _track(model, x)
    assert pinned_on == {1} and torch.accelerator.memory_reserved(0) == 0
    assert torch.accelerator.current_device_index() == 0
    _end_a_step_of_a_script(model, x)
    _enter_contexts_on_both(kind.type)
    print("trained")


def _end_a_step_of_a_script(model: nn.Module, x: torch.Tensor) -> None:
    awaited, real = set[int](), torch.accelerator.synchronize

    def noting(device: Any = None, /) -> None:
        awaited.add(index_of(device))
        real(device)

    steps = ScriptSteps(Request(mode="plain", folder="", record=False))
    steps.follow(model, [(model, None)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(x).square().mean().backward()
    optimizer.step()
    torch.accelerator.synchronize = noting
    steps.step_ends(optimizer)
    torch.accelerator.synchronize = real
    assert awaited == {0, 1}, awaited


def _enter_contexts_on_both(kind: str) -> None:
    for index, later in ((1, 1), (0, 0), (1, 1), (0, 1), (1, 0), (0, 0), (1, 1)):
        torch.accelerator.set_device_index(index)
        x = torch.randn(1 << 20, device=kind, requires_grad=True)
        with ebbtide.offload_saved_tensors() as offloaded:
            loss = x.exp().sum()
            torch.accelerator.set_device_index(later)
        torch.accelerator.set_device_index(index)
        loss.backward()
        engine = offloaded._latest
        assert engine is not None and engine.tier.counters.out_bytes > 0
        assert meter.home_of(engine.tier) == torch.device(kind, index)


def _track(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        with ebbtide.track_memory(folder, model=model):
            for _ in range(4):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        inside = summarise(folder)["inside"]
    saved = 4 * 3 * x.nbytes  # inputs of both layers and of the activation
    assert inside["floor_bytes"] > 0 and inside["activation_bytes"] > saved / 2, inside


def _let_others_fill_the_current_device() -> None:
    configure(capacity=1024 * MIB)
    real: Any = torch.accelerator.get_memory_info

    def info(device: Any = None, /) -> tuple[int, int]:
        index = device.index if isinstance(device, torch.device) else device
        index = torch.accelerator.current_device_index() if index is None else index
        free, total = real(index)
        return (min(free, 8 * MIB), total) if index == 0 else (free, total)

    torch.accelerator.get_memory_info = info


def _note_where_memory_is_pinned() -> set[int]:
    runtime: Any = torch.get_device_module().cudart()
    seen: set[int] = set()

    def noting(call: Any) -> Any:
        def noted(*arguments: int) -> int:
            seen.add(torch.accelerator.current_device_index())
            return call(*arguments)

        return staticmethod(noted)

    for name in ("cudaHostRegister", "cudaHostUnregister"):
        setattr(runtime, name, noting(getattr(runtime, name)))
    return seen


if __name__ == "__main__":
    main()
