"""The most important facts about a card that was never tried before, in about a minute: one answer per line.

Capabilities, whether copies overlap compute, what calls cost the host, and whether gradients are bitwise those of
ordinary training when compute is late and when two streams read what one saved.

    python -m benchmarks.first_contact
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.store import capture_query
from ebbtide.store.accelerator import AcceleratorDevice

MIB = 1 << 20
CALLS = 1000


class Block(nn.Module):
    """A residual block that computes a part on a side stream, behind work that makes compute late."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(width, width, device=device), torch.Stream(device=device)

    def forward(self, x: Tensor) -> Tensor:
        sleep: Any = getattr(torch.get_device_module(x.device), "_sleep", lambda cycles: None)
        sleep(5_000_000)
        h = self.linear(x)
        h.record_stream(self.side)
        current = torch.accelerator.current_stream(x.device)
        self.side.wait_stream(current)
        with self.side:
            beside = h.sin()
        other = h.cos()
        current.wait_stream(self.side)
        beside.record_stream(current)
        return x + other * beside


def train(device: torch.device, scope: Callable[[nn.Module], AbstractContextManager[object]]) -> list[Tensor]:
    """Return losses and gradients of some steps."""
    torch.manual_seed(0)
    model, found = nn.Sequential(*(Block(256, device) for _ in range(4))), list[Tensor]()
    x = torch.linspace(-1, 1, 4096 * 256).view(4096, 256).to(device)
    with scope(model):
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            torch.full((32 * MIB,), float("nan"), device=device)  # freed memory is reused
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
    torch.accelerator.synchronize()
    return found


def microseconds(call: Callable[[], object]) -> float:
    """Return the host's time for one call."""
    call()
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - begun) / CALLS


def answers(copied_bytes: int = 256 * MIB) -> Iterator[tuple[str, str, bool]]:
    """Yield the question, the answer, and whether it is as expected."""
    device = AcceleratorDevice()
    where = torch.device(device.device_type, torch.accelerator.current_device_index())
    can = device.capabilities
    yield "torch", f"{torch.__version__}, {where}", True
    yield "capabilities", str(can), can.asynchronous_copies and can.pinned_host
    captured = capture_query()()
    yield "a graph is being captured", str(captured), not captured

    for name, pin in {
        "ours": lambda: device.allocate_host(copied_bytes, pinned=can.pinned_host),
        "torch's": lambda: torch.empty(copied_bytes, dtype=torch.uint8, device="cpu", pin_memory=can.pinned_host),
    }.items():
        begun = time.perf_counter()
        pin()
        yield f"{copied_bytes / MIB:.0f} MiB are pinned, {name}", f"{time.perf_counter() - begun:.3f} s", True

    source, target = torch.ones(copied_bytes, dtype=torch.uint8, device=where), device.allocate_host(
        copied_bytes, pinned=can.pinned_host
    )  # fmt: skip
    out = device.side_stream(where, "out")
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    device.copy_all([(target, source[: target.numel()])], out)
    done = device.record(out)
    asked, at_once = time.perf_counter() - begun, device.query(done)
    device.synchronize(done)
    took = time.perf_counter() - begun
    yield "a copy to pinned memory returns before it is done", f"{asked * 1e3:.2f} of {took * 1e3:.2f} ms", not at_once

    small, place = source[:16384], target[:16384]
    stream = device.compute_stream(where)
    calls: dict[str, Callable[[], object]] = {
        "current stream": lambda: device.compute_stream(where),
        "record": lambda: device.record(stream),
        "record, timed": lambda: device.record(stream, timed=True),
        "query": lambda: device.query(done),
        "wait": lambda: device.wait(stream, done),
        "copy of 16 KiB": lambda: device.copy_all([(place, small)], out),
        "detach": small.detach,
        "free memory": lambda: device.free_memory(where),
    }
    for name, call in calls.items():
        yield f"one call: {name}", f"{microseconds(call):.2f} us", True

    plain = train(where, lambda model: nullcontext())
    same = all(torch.equal(a, b) for a, b in zip(plain, train(where, lambda model: nullcontext()), strict=True))
    yield "plain training repeats its bits", str(same), same
    for policy in ("offload", "minimal", "auto"):

        def offloaded(model: nn.Module, policy: str = policy) -> ebbtide.Handle:
            return ebbtide.enable_activation_offloading(
                model, policy=policy, min_bytes=0, window="1B", blocks=[str(n) for n in range(4)]
            )

        found = train(where, offloaded)
        equal = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        yield f"late compute, two streams: {policy} is bitwise plain training", str(equal), equal


def main() -> None:
    """Print the answers; exit with 1 if one is not as expected."""
    wrong = 0
    for asked, answer, right in answers():
        wrong += not right
        print(f"{'ok ' if right else 'NO '} {asked}: {answer}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} answers are not as they should be")


if __name__ == "__main__":
    main()
