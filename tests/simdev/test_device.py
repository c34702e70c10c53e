"""The simulated device itself: torch's requirements of an accelerator, and that it exposes the intended mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from tests.helpers.models import build
from tests.helpers.twice import hard
from tests.simdev.device import configured, counters, held, simulated_seconds, violations

DEVICE = "simdev"
MIB = 1 << 20

OPERATORS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x @ y,
    lambda x, y: torch.softmax(x, -1) @ y.t().t(),
    lambda x, y: x[:, 1:3].t().contiguous() * 2,
    lambda x, y: torch.cat([x, x * 3]).sum(0),
    lambda x, y: x[x > 0],
    lambda x, y: x.nonzero(),
    lambda x, y: torch.topk(x, 2)[0],
    lambda x, y: torch.where(x > 0, x, 0.5),
    lambda x, y: x.to(torch.bfloat16).float(),
    lambda x, y: torch.arange(0, 9, device=x.device),
    lambda x, y: torch.full((3,), 2.5, device=x.device),
    lambda x, y: x.masked_fill(x > 0, 1.0),
    lambda x, y: torch.stack(torch.unbind(x), 1),
    lambda x, y: x.unfold(1, 3, 2),
    lambda x, y: x.view(torch.int32).view(torch.float32),
    lambda x, y: nn.functional.layer_norm(x, (7,)),
    lambda x, y: torch.tril(torch.ones(4, 4, device=x.device)),
    lambda x, y: x.argsort(-1)[..., None],
    lambda x, y: torch.einsum("ij,jk->ik", x, y),
    lambda x, y: x.clone().index_add_(0, torch.tensor([0, 1], device=x.device), x[:2]),
]


def nbytes(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.uint8, device=DEVICE)


def test_torch_takes_it_for_an_accelerator() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None and found.type == DEVICE and torch.accelerator.device_count() == 1
    x = torch.ones(3, device=DEVICE)
    assert x.device == torch.device("simdev:0") and (x + 1).tolist() == [2, 2, 2] and float((x * 2).sum()) == 6.0


def test_operators_give_the_bits_of_the_cpu() -> None:
    for _ in range(3):  # the first call of a shape waits, later ones do not
        a, b = torch.randn(5, 7), torch.randn(7, 4)
        c, d = a.to(DEVICE), b.to(DEVICE)
        for operator in OPERATORS:
            assert torch.equal(operator(a, b), operator(c, d).cpu())


def test_tensors_of_two_devices_are_refused() -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]


def test_storages() -> None:
    x = torch.arange(10.0, device=DEVICE)
    part = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 2, (3,), (1,))
    assert part.tolist() == [2, 3, 4]
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(x.untyped_storage())
    assert whole.numel() == 40 and whole.data_ptr() == x.data_ptr()
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(40)
    assert x.untyped_storage().nbytes() == 40


def test_freed_memory_is_used_again_at_once_by_its_stream_alone() -> None:
    x = nbytes(3 * MIB)
    address = x.data_ptr()
    del x
    with torch.Stream(device=DEVICE):
        other = nbytes(3 * MIB)
    x = nbytes(3 * MIB)
    assert x.data_ptr() == address != other.data_ptr()


def test_freed_memory_is_poisoned() -> None:
    x = torch.zeros(2 * MIB, dtype=torch.uint8, device=DEVICE)
    del x
    assert (nbytes(2 * MIB) == 0xA5).all()


def test_statistics_and_capacity() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = nbytes(30 * MIB)
    assert torch.accelerator.memory_allocated() - before == 30 * MIB
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 30 * MIB
    with (
        configured(capacity=torch.accelerator.memory_reserved() + 8 * MIB),
        pytest.raises(torch.OutOfMemoryError, match="simdev out of memory"),
    ):
        nbytes(64 * MIB)
    nbytes(64 * MIB)


def test_kernels_and_copies_run_late() -> None:
    current, event = torch.accelerator.current_stream(), torch.Event(device=DEVICE)
    x, host = torch.ones(1000, device=DEVICE), torch.zeros(1000, pin_memory=True)
    x.add_(1)
    torch.accelerator.synchronize()
    with held(current):
        x.add_(1)
        host.copy_(x, non_blocking=True)
        event.record(current)
        assert not event.query() and not current.query() and host[0] == 0
    event.synchronize()
    assert event.query() and host.tolist() == x.tolist() == [3.0] * 1000


def test_what_is_pinned() -> None:
    assert torch.empty(10, pin_memory=True).is_pinned() and torch.randn(10).pin_memory().is_pinned()
    assert not torch.randn(10).is_pinned() and torch.ones(5, device=DEVICE).to("cpu", non_blocking=True).is_pinned()


def test_copies_to_pageable_memory_wait() -> None:
    x, before = torch.ones(1000, device=DEVICE), counters()
    torch.zeros(1000).copy_(x, non_blocking=True)
    torch.zeros(1000, pin_memory=True).copy_(x, non_blocking=True)
    after = counters()
    grown = {k: after[k] - before.get(k, 0) for k in ("copies_pageable", "copies_async")}
    assert grown == {"copies_pageable": 1, "copies_async": 1}


def test_events_keep_time_unless_switched_off() -> None:
    stream = torch.Stream(device=DEVICE)
    begin, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    begin.record(stream)
    with stream:
        torch.get_device_module()._sleep(5_000_000)  # 5 ms
    end.record(stream)
    end.synchronize()
    assert begin.elapsed_time(end) >= 5
    with configured(timed_events=0), pytest.raises(RuntimeError, match="elapsedTime"):
        begin.elapsed_time(end)


def test_a_stream_waits_for_another() -> None:
    side, current = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with side:
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == current
    with held(side):
        current.wait_stream(side)
        assert not current.query()
    current.synchronize()
    assert current.query()


def copy_out(protect: str) -> bool:
    """Copy out on a side stream, free the source, reuse its memory; return whether the copy is right."""
    side, current = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    source = torch.full((5 * MIB,), 7, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    torch.full((5 * MIB,), 255, dtype=torch.uint8, device=DEVICE)  # the first call of a shape waits
    side.wait_stream(current)
    with held(side):
        with side:
            host.copy_(source, non_blocking=True)
        if protect == "record_stream":
            source.record_stream(side)
        if protect == "event":
            current.wait_event(side.record_event())
        del source
        other = torch.full((5 * MIB,), 255, dtype=torch.uint8, device=DEVICE)
        if protect != "event":
            current.synchronize()
    torch.accelerator.synchronize()
    del other
    return bool((host == 7).all())


def test_a_source_freed_too_early_gives_other_bytes_and_is_reported() -> None:
    assert not copy_out("nothing")
    found = violations()
    assert found and found[0].startswith("race: ")


@pytest.mark.parametrize("protect", ["record_stream", "event"])
def test_a_protected_source_gives_its_bytes(protect: str) -> None:
    assert copy_out(protect)


def test_a_read_of_unfinished_work_is_reported() -> None:
    x, side = torch.ones(MIB, device=DEVICE), torch.Stream(device=DEVICE)
    for _ in range(2):  # the first call of a shape waits
        x.add_(1)
    with side:
        x.sum()
    torch.accelerator.synchronize()
    assert any("not ordered after" in line for line in violations())


def test_memory_unregistered_under_a_copy_is_reported() -> None:
    runtime: Any = torch.get_device_module().cudart()
    host, x = torch.zeros(MIB, dtype=torch.uint8), torch.ones(MIB, dtype=torch.uint8, device=DEVICE)
    assert runtime.cudaHostRegister(host.data_ptr(), MIB, 1) == 0 and host.is_pinned()
    assert runtime.cudaHostRegister(host.data_ptr(), MIB, 1) != 0
    torch.accelerator.synchronize()
    with held(torch.accelerator.current_stream()):
        host.copy_(x, non_blocking=True)
        assert runtime.cudaHostUnregister(host.data_ptr()) == 0
    torch.accelerator.synchronize()
    assert violations() == ["pinned memory unregistered while a copy uses it"] and not host.is_pinned()


def test_backward_runs_in_the_device_thread_on_the_stream_of_forward() -> None:
    seen: list[tuple[int, torch.Stream]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((threading.get_ident(), torch.accelerator.current_stream()))
            return grad

    side, x = torch.Stream(device=DEVICE), torch.ones(3, device=DEVICE, requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = Look.apply(x)
    torch.accelerator.current_stream().wait_stream(side)
    y.sum().backward()
    assert seen[0][0] != threading.get_ident() and seen[0][1] == side
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1]


def test_random_numbers_come_again() -> None:
    module = torch.get_device_module()
    torch.manual_seed(3)
    first, state = torch.rand(5, device=DEVICE), module.get_rng_state()
    masks = []
    for _ in range(2):
        module.set_rng_state(state)
        masks.append(nn.functional.dropout(torch.ones(100, device=DEVICE), 0.5))
    assert torch.equal(*masks) and 0 < (masks[0] == 0).sum() < 100
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device=DEVICE))
    own = [torch.Generator(device=DEVICE).manual_seed(1) for _ in range(2)]
    assert torch.equal(*(torch.randn(4, device=DEVICE, generator=g) for g in own))


def test_a_kernel_that_fails_late_raises_at_the_next_synchronization() -> None:
    table = torch.ones(4, 2, device=DEVICE)
    nn.functional.embedding(torch.tensor([1], device=DEVICE), table)
    nn.functional.embedding(torch.tensor([9], device=DEVICE), table)
    with pytest.raises(RuntimeError, match="failed after"):
        torch.accelerator.synchronize()


def test_autocast() -> None:
    linear = nn.Linear(4, 4).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = linear(torch.ones(2, 4, device=DEVICE))
        assert y.dtype == torch.bfloat16 and torch.softmax(y, -1).dtype == torch.float32


def test_convolution() -> None:
    on_cpu, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 8, 8)
    on_device = nn.Conv2d(3, 4, 3, padding=1)
    on_device.load_state_dict(on_cpu.state_dict())
    on_device.to(DEVICE)
    results = [on_cpu(x), on_device(x.to(DEVICE))]
    for result in results:
        result.sum().backward()
    assert torch.equal(results[0], results[1].cpu())
    for p, q in zip(on_cpu.parameters(), on_device.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_trains_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    def train(device: str) -> list[Tensor]:
        tiny = build(name, dtype=dtype, seed=0)
        tiny.model.config._attn_implementation = "eager"  # the CPU has a fused kernel of its own
        tiny.model.to(device)
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in tiny.inputs.items()}
        tiny.inputs.update(inputs)
        optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2, foreach=False)
        for _ in range(3):
            tiny.step()
            optimizer.step()
        return [p.detach().cpu() for p in tiny.model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(train("cpu"), train(DEVICE), strict=True))


def test_simulated_time_is_that_of_kernels_copies_and_waits_whatever_the_machine_does() -> None:
    side, host = torch.Stream(device=DEVICE), torch.zeros(1000, dtype=torch.uint8, pin_memory=True)
    x, y = nbytes(1000), nbytes(1000)
    x.add_(1)  # the first call of a kernel waits
    with configured(kernel_delay_us=100, copy_delay_us=0, copy_bytes_per_s=10**6, jitter_us=50):
        before = simulated_seconds()
        x.add_(1)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(x, non_blocking=True)  # a millisecond
        y.add_(1)
        torch.accelerator.current_stream().wait_stream(side)  # 0.1 + 1.0 ms, of which 0.9 ms are waiting
        x.add_(1)
        after = simulated_seconds()
    passed, busy = (round(1e6 * (b - a)) for a, b in zip(before, after, strict=True))
    assert (passed, busy) == (1200, 300)


class Moves(nn.Module):
    """A block whose input is on the host, and whose dropout is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.up(x.to(DEVICE)), 0.5)
        return (x + self.down(hard(x))).cpu()


def test_a_checkpointed_block_that_moves_its_input_draws_the_same_twice() -> None:
    def trained(policy: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(*(Moves() for _ in range(3))).to(DEVICE), []
        around = ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) if policy else nullcontext()
        with around as handle:
            for _ in range(4):
                model(torch.ones(8, 16, requires_grad=True)).square().mean().backward()
                found += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
            assert handle is None or handle.stats().checkpointed_blocks == 3
        return found

    assert all(map(torch.equal, trained(None), trained("minimal")))


def with_two_devices(module: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.simdev.run", module],
        env={**os.environ, "SIMDEV_DEVICES": "2"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stdout.endswith("trained\n"), ran.stderr[-3000:]


def test_a_model_over_two_devices_of_one_process_trains_under_every_policy() -> None:
    with_two_devices("tests.simdev.two_devices")


def test_memory_is_that_of_the_models_device_and_not_of_the_current_one() -> None:
    with_two_devices("tests.simdev.other_device")
