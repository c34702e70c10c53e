"""One case of a benchmark: one mode on one model at one length, in a process of its own.

Before anything is timed, the gate: on the same weights and inputs, all gradients of a step under the mode must be
bitwise those of a plain step. Then its own length: steps that warm up, steps that are timed, and one more in which the
bytes moved out and back are counted from outside: on a device by a dispatch mode that sees every copy between devices,
on a CPU by the kernel's own account of the process. The loss is the mean square of the last hidden state: the head,
which all modes treat alike, is left out. There is no optimizer. Memory is the peak above what weights, gradients and
inputs take, in a step that begins with a trimmed heap and is not timed.

    python -m benchmarks.case '{"mode": "plain", "model": "tiny", "tokens": 128}'
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers import Prepared, absent, mode_named
from benchmarks.shapes import SHAPES, Shape
from ebbtide.store.allocator import trim_heap
from ebbtide.store.share import fields_of

WARMUP_STEPS = 4
"""Within these, ``Auto`` has measured steps of this length, and made its plan."""

MOST_WARMUP_STEPS = 32
"""Within these, it has judged that plan, and those that it made instead: what is timed is what it leaves."""

_PIECE = 1 << 23
MARK = "CASE "
"""Begins the line that holds the result: packages print lines of their own."""

READY = "READY"
"""The line of a case in lockstep that waits for the other modes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parameters of a case.

    Attributes:
        mode: Name of the mode: see ``benchmarks.peers``.
        model: Name of the shape: see ``benchmarks.shapes``.
        tokens: Length of each sequence.
        batch: Sequences.
        tuning: ``"full"``, or ``"lora"``: adapters of rank 8 on every linear layer, the rest frozen.
        steps: Timed steps.
        gate_tokens: Length at which gradients are compared, if it is shorter.
        lockstep: Before each timed step, and after the last, write ``READY`` and wait for a line on standard input.
    """

    mode: str
    model: str
    tokens: int
    batch: int = 1
    tuning: str = "full"
    steps: int = 5
    gate_tokens: int = 512
    lockstep: bool = False


@dataclass(kw_only=True)
class Row:
    """The result of a case.

    Attributes:
        case: The case.
        status: ``"ok"``, or why there is no number: ``"out of memory"``, ``"differs"``, ``"not installed: ..."``, ...
        seconds: Every timed step.
        faults: Page faults of the process in each of them (``ru_minflt``).
        system_seconds: Kernel time of the process in each.
        warmup_steps: Number of steps before them.
        peak_bytes: Peak memory of a step, above weights, gradients and inputs.
        base_bytes: Memory of weights, gradients and inputs.
        allocated_bytes: On a CPU, the most bytes of tensors that a step allocated and had not freed: without the freed
            memory that an allocator keeps.
        out_bytes: Bytes that left the device (on a CPU: that were written) in a step, counted from outside.
        in_bytes: Bytes that came back.
        gate: How gradients were compared.
        notes: What the mode reports.
    """

    case: Case
    status: str = "ok"
    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    system_seconds: list[float] = field(default_factory=list)
    warmup_steps: int = 0
    peak_bytes: int = 0
    base_bytes: int = 0
    allocated_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    gate: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


class CopyCount(TorchDispatchMode):
    """Counts bytes that cross between the accelerator and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.out_bytes = self.in_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy") and isinstance(args[0], torch.Tensor):
            source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], result)
            if isinstance(source, torch.Tensor) and source.device.type != target.device.type:
                nbytes = target.numel() * target.element_size()
                if target.device.type == "cpu":
                    self.out_bytes += nbytes
                else:
                    self.in_bytes += nbytes
        return result


@contextlib.contextmanager
def counted(row: Row, device: torch.device) -> Iterator[None]:
    """Count the bytes of one step from outside."""
    if device.type != "cpu":
        with CopyCount() as count:
            yield
        row.out_bytes, row.in_bytes = count.out_bytes, count.in_bytes
        return
    before = _process_io()
    yield
    after = _process_io()
    row.out_bytes, row.in_bytes = after[0] - before[0], after[1] - before[1]


def _process_io() -> tuple[int, int]:
    fields = fields_of(Path("/proc/self/io"))
    return fields["write_bytes:"], fields["read_bytes:"]


def memory_now(device: torch.device) -> int:
    """Return the bytes in use: of the device, or resident."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak(device: torch.device) -> None:
    """Reset the peak."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Return the most bytes in use since ``forget_peak``."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    return fields_of(Path("/proc/self/status"), unit=1024)["VmHWM:"]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def step(prepared: Prepared, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run a forward and a backward; return the loss."""
    with prepared.step():
        with prepared.forward():
            output = prepared.model(**inputs)
            loss = output[0].float().square().mean()
        loss.backward()
    return loss.detach()


def digests(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return two sums over every gradient's bits, one of them weighted by position, by the parameter's name.

    They are computed on the gradient's device, piece by piece: a second copy of all gradients may not fit.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = getattr(parameter.grad, "to_local", lambda p=parameter: p.grad)()
            sums = torch.zeros(2, dtype=torch.int64, device=grad.device)
            for piece in grad.detach().contiguous().flatten().view(torch.int16).split(_PIECE):
                bits = piece.to(torch.int64)
                weights = torch.arange(bits.numel(), device=bits.device) % 65_521 + 1
                sums = sums * 31 + torch.stack([bits.sum(), (bits * weights).sum()])
            found[name] = int(sums[0]), int(sums[1])
    return found


def run(case: Case, *, progress: Callable[[str], None] = lambda text: None) -> Row:
    """Run a case; any error becomes its row's status.

    Args:
        case: The case.
        progress: Called with a text at each stage.
    """
    row = Row(case=case)
    mode = mode_named(case.mode)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    reason = absent(mode, accelerated=device.type != "cpu")
    if reason is not None:
        row.status = reason
        return row
    try:
        _measure(row, device, progress)
    except (torch.OutOfMemoryError, MemoryError) as error:
        row.status, row.notes["error"] = "out of memory", str(error)[:200]
    except Exception as error:
        row.status = f"failed: {type(error).__name__}: {error}".replace("\n", "; ")[:300]
    return row


def _measure(row: Row, device: torch.device, progress: Callable[[str], None]) -> None:
    case, shape = row.case, SHAPES[row.case.model]
    torch.manual_seed(0)
    model = shape.build(device, case.tuning).train()
    short = shape.inputs(min(case.tokens, case.gate_tokens), case.batch, device)
    plain = Prepared(model=model)
    progress("gate")
    how = "gradients, bitwise equal"
    with contextlib.ExitStack() as gate:
        expected = _repeated(plain, short)
        if expected is None:  # attention that sums with atomics, as on CUDA
            gate.enter_context(_deterministic())
            expected, how = _repeated(plain, short), f"{how}, with deterministic algorithms"
        if expected is None:
            row.status = "not compared: plain training does not repeat its own bits here"
            return
        mode = mode_named(case.mode)
        prepare = contextlib.contextmanager(mode.prepare)
        with contextlib.ExitStack() as opened:
            prepared = opened.enter_context(prepare(model))
            wrong = max((_differing(expected, _gradients(prepared, short)) for _ in range(3)), key=len)
            gate.close()
            row.gate = f"{len(expected)} {how}, at {min(case.tokens, case.gate_tokens)} tokens"
            if wrong:
                row.status = f"differs: {len(wrong)} of {len(expected)} gradients, such as {wrong[0]}"
                return
            if not mode.once:  # a plan would count the digests between the steps of the gate as time of each step
                opened.close()
                prepared = opened.enter_context(prepare(model))
            progress("steps")
            _time(row, prepared, shape, device)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch use deterministic kernels where it has them; cuBLAS also needs ``CUBLAS_WORKSPACE_CONFIG``."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _repeated(plain: Prepared, inputs: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]] | None:
    """Return what ordinary training computes; None if it does not repeat itself."""
    one, other = (_gradients(plain, inputs) for _ in range(2))
    return one if one == other else None


def _gradients(prepared: Prepared, inputs: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    prepared.model.zero_grad(set_to_none=True)
    step(prepared, inputs)
    return digests(prepared.model)


def _differing(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    return [name for name in expected if found.get(name) != expected[name]]


def _time(row: Row, prepared: Prepared, shape: Shape, device: torch.device) -> None:
    case = row.case
    inputs = shape.inputs(case.tokens, case.batch, device)
    while row.warmup_steps < WARMUP_STEPS or (row.warmup_steps < MOST_WARMUP_STEPS and not prepared.settled()):
        if not math.isfinite(float(step(prepared, inputs))):  # gradients stay: they are part of the base
            raise ValueError("the loss is not finite")
        row.warmup_steps += 1
    predicted = prepared.notes().get("predicted")
    for _ in range(case.steps):
        _wait_for_others(case)
        synchronize(device)
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        step(prepared, inputs)
        synchronize(device)
        row.seconds.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_SELF)
        row.faults.append(after.ru_minflt - before.ru_minflt)
        row.system_seconds.append(after.ru_stime - before.ru_stime)
    _wait_for_others(case)
    trim_heap()  # on a CPU memory that the heap keeps of earlier steps would hide that of this one; not timed
    row.base_bytes = memory_now(device)
    forget_peak(device)
    step(prepared, inputs)
    synchronize(device)
    row.peak_bytes = max(0, peak(device) - row.base_bytes)
    row.notes |= prepared.notes()
    if predicted != row.notes.get("predicted"):  # a plan that was made in the steps that it is compared with
        row.notes |= {"predicted": predicted, "predicted_later": row.notes["predicted"]}
    if device.type == "cpu":
        row.allocated_bytes = most_allocated(lambda: step(prepared, inputs))
    before = _simulated_seconds(device)
    with counted(row, device):
        step(prepared, inputs)
        synchronize(device)
    passed, busy = (b - a for a, b in zip(before, _simulated_seconds(device), strict=True))
    if passed:
        row.notes |= {"simulated_step_seconds": passed, "simulated_wait_seconds": max(0.0, passed - busy)}


def _wait_for_others(case: Case) -> None:
    if case.lockstep:
        print(READY, flush=True)
        sys.stdin.readline()


def most_allocated(act: Callable[[], object]) -> int:
    """Return the most bytes of CPU tensors that an action allocated and had not freed, as torch's profiler sees them.

    Args:
        act: The action that runs under the profiler.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        act()
    results: Any = profile.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _simulated_seconds(device: torch.device) -> tuple[float, float]:
    """Return the simulated time of a device that has one, and the kernels' part of it; else zeros."""
    clock: Any = getattr(torch.get_device_module(device), "simulated_seconds", lambda: (0.0, 0.0))
    return clock()


def main() -> None:
    """Run the case that the argument holds as JSON; the last line printed is its row."""
    case = Case(**json.loads(sys.argv[1]))
    row = run(case, progress=lambda text: print(f"{case.mode}: {text}", file=sys.stderr, flush=True))
    print(MARK + json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
