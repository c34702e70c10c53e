"""Run a function with and without the engine, and compare the results bitwise.

A *program* is a function of leaves that returns tensors. ``observe`` gives it fresh leaves, runs its forward as one
block, its backward from fixed gradients, and takes all outputs and all gradients. ``Setting`` chooses the mode: plain
autograd, the oracle, or an engine with a policy over a tier.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.base.actions import Action, Candidate
from ebbtide.base.events import Bus
from ebbtide.config import Auto, Inputs, Keep, Minimal, Offload, Options, Policy
from ebbtide.engine import Block, Engine
from ebbtide.planner import plan_for
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from ebbtide.wrap.hooks import offloading
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.oracle import Oracle, same_bits

Leaves = Mapping[str, Tensor]
Program = Callable[[Leaves], Sequence[Tensor]]

POLICIES: dict[str, Policy] = {
    "keep": Keep(),
    "offload": Offload(),
    "inputs": Inputs(),
    "minimal": Minimal(),
    "auto": Auto(),
}
TIERS = ("disk", "host")


class ByTable:
    """A plan for tests: one action for all storages, or a function of the candidate; and one for all blocks."""

    def __init__(self, choose: Action | Callable[[Candidate], Action], block: Action = Action.KEEP) -> None:
        self.name, self.recomputes = "table", True
        self._choose, self._block = choose, block
        self.asked: list[Candidate] = []

    def choose(self, candidate: Candidate) -> Action:
        self.asked.append(candidate)
        return self._choose if isinstance(self._choose, Action) else self._choose(candidate)

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return self._block

    def explain(self) -> str:
        return "a plan for tests"


REMAKE = ByTable(lambda c: Action.OFFLOAD if c.recompute_flops is None else Action.RECOMPUTE)
"""All that can be recomputed is; the rest is offloaded."""


@contextlib.contextmanager
def open_engine(
    policy: str | Policy | Any = "offload",
    tier: str = "host",
    *,
    rate: float = 1e6,
    window_bytes: int = 1 << 20,
    min_bytes: int = 0,
    verify: bool = False,
    device: FakeDevice | None = None,
    **given: Any,
) -> Iterator[Engine]:
    """Open an engine over a tier of its own.

    Args:
        policy: A policy, its name, or a plan.
        tier: ``"disk"``, or ``"host"`` on the fake device.
        rate: Bytes per virtual second that the fake device copies.
        window_bytes: Bytes in flight.
        min_bytes: Smaller storages stay on the device.
        verify: Compare checksums.
        device: Device of the host tier; ``None``: a fake one.
        given: Further arguments of ``Engine``.
    """
    plan = (
        plan_for(POLICIES[policy] if isinstance(policy, str) else policy) if not hasattr(policy, "choose") else policy
    )
    options = Options(min_bytes=min_bytes, window_bytes=window_bytes, verify=verify)
    with contextlib.ExitStack() as stack:
        if tier == "disk":
            place: Any = DiskTier(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            place = HostTier(device or FakeDevice(rate, rate))
        stack.callback(place.close)
        yield Engine(plan, place, options, Bus(), **given)


@contextlib.contextmanager
def block(engine: Engine, *inputs: Tensor, weights: Sequence[Tensor] = (), name: str = "", index: int = 0) -> Any:
    """One block's forward, as the wrapper runs it."""
    name = name or f"b{index or ''}"
    described = Block(name=name, kind="Block", index=index, count=1, weights=lambda: weights)
    with offloading(engine, described, list(inputs)) as run:
        yield run


@contextlib.contextmanager
def forward_pass(engine: Engine, *inputs: Tensor, **given: Any) -> Any:
    """One forward of one block: a complete graph."""
    engine.begin_pass()
    try:
        with block(engine, *inputs, **given) as run:
            yield run
    finally:
        engine.end_pass()


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The results of a program, or its failure.

    Attributes:
        outputs: Its return values.
        grads: Gradients by leaf.
        error: Class of the exception, and its phase (``"forward"``, ``"backward"``).
        message: Message of the exception.
    """

    outputs: list[Tensor]
    grads: dict[str, Tensor | None]
    error: tuple[type[BaseException], str] | None = None
    message: str = ""


Backward = Callable[[Sequence[Tensor], Sequence[Tensor], Leaves], "Mapping[str, Tensor | None]"]
"""Goes through the graphs of outputs, from the gradients fed in, and returns gradients by name."""


def all_at_once(wanted: Sequence[Tensor], fed: Sequence[Tensor], leaves: Leaves) -> dict[str, Tensor | None]:
    """One backward over all outputs; the gradients of all leaves."""
    if wanted:
        torch.autograd.backward(wanted, fed)
    return {k: v.grad for k, v in leaves.items() if v.requires_grad}


def observe(
    program: Callable[..., Sequence[Tensor]],
    leaves: Leaves,
    engine: Engine | str = "plain",
    *,
    backward: Backward = all_at_once,
    thread: bool = False,
    seed: int = 7,
    blocks: bool = False,
) -> Observed:
    """Run a program's forward and backward from fresh leaves.

    Args:
        program: The function; may draw random numbers.
        leaves: Its leaves; an ``nn.Parameter`` stays one, others that require gradients are the block's inputs.
        engine: ``"plain"``, ``"oracle"`` or an engine.
        backward: Uses of the outputs' graphs. A note ``backward ...`` on its error names the phase.
        thread: Run backward in a thread of its own, as an accelerator does.
        seed: Seed of the forward and of the gradients fed in.
        blocks: The program opens its blocks itself, with a function that it takes besides the leaves.
    """
    fresh = {k: _fresh(v) for k, v in leaves.items()}
    weights = [v for v in fresh.values() if isinstance(v, nn.Parameter)]
    inputs = [v for v in fresh.values() if not isinstance(v, nn.Parameter)]
    torch.manual_seed(seed)
    try:
        if blocks:
            outputs = list(_in_blocks(program, fresh, engine, weights))
        else:
            with _around(engine, inputs, weights):
                outputs = list(program(fresh))
    except RuntimeError as error:
        return Observed(outputs=[], grads={}, error=(type(error), "forward"), message=str(error))
    kept = [o.detach().clone() for o in outputs]
    wanted = [o for o in outputs if o.requires_grad]
    fed = [torch.randn(o.shape, generator=torch.Generator().manual_seed(seed)).to(o.dtype) for o in wanted]
    del outputs

    def run() -> Mapping[str, Tensor | None]:
        return backward(wanted, fed, fresh)

    try:
        return Observed(outputs=kept, grads=dict(in_thread(run) if thread else run()))
    except RuntimeError as error:
        drain()
        place = next((n for n in getattr(error, "__notes__", []) if n.startswith("backward ")), "backward")
        return Observed(outputs=kept, grads={}, error=(type(error), place), message=str(error))


def compare(one: Observed, other: Observed) -> list[str]:
    """Name everything that differs bitwise; errors must be raised in the same phase. An empty list means equal."""
    if one.error is not None or other.error is not None:
        places = [e and e[1] for e in (one.error, other.error)]
        return [] if places[0] == places[1] else [f"raised: {one.error} against {other.error}"]
    found = [
        f"output {i}" for i, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True)) if not same_bits(a, b)
    ]
    for name in one.grads:
        a, b = one.grads[name], other.grads[name]
        if (a is None) != (b is None) or (a is not None and b is not None and not same_bits(a, b)):
            found.append(f"gradient of {name}")
    return found


def check_everywhere(program: Program, leaves: Leaves, *, tiers: Sequence[str] = TIERS, steps: int = 2) -> None:
    """Assert that a program is bitwise plain autograd under the oracle and under every policy over every tier.

    Backward runs in the caller's thread and in one of its own; after each step nothing is alive and nothing is stored.
    """
    expected = observe(program, leaves)
    assert compare(expected, observe(program, leaves, "oracle")) == []
    for tier in tiers:
        for policy in POLICIES:
            with open_engine(policy, tier) as engine:
                for step in range(steps):
                    got = observe(program, leaves, engine, thread=bool(step % 2))
                    assert compare(expected, got) == [], (tier, policy, step)
                    assert_nothing_left(engine)


def assert_nothing_left(engine: Engine) -> None:
    """Assert invariant 6: no ticket, no entry, no byte in the store, without a wait and without the collector."""
    assert not engine.live_tickets and not engine.live_entries
    assert engine.tier.used_bytes == 0


def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a thread of its own; return its result or raise its error."""
    result: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failed.append(error)
            drain()  # the queue is the thread's own

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        error = failed.pop()
        try:
            raise error
        finally:
            del error  # the traceback holds this frame, the frame would hold the error
    return result[0]


def drain() -> None:
    """Let autograd drop the remaining nodes of a backward that raised: its queue holds them until the next one."""
    torch.zeros((), requires_grad=True).clone().backward()


def hooks_are_closed() -> bool:
    """Whether no saved-tensor hooks are open in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def leaf(*shape: int, dtype: torch.dtype = torch.float32, parameter: bool = False) -> Tensor:
    """Random values that require gradients."""
    values = torch.randn(shape, dtype=torch.float64).to(dtype)
    return nn.Parameter(values) if parameter else values.requires_grad_()


def _fresh(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def _in_blocks(
    program: Callable[..., Sequence[Tensor]], leaves: Leaves, engine: Engine | str, weights: list[Tensor]
) -> Sequence[Tensor]:
    if not isinstance(engine, Engine):
        return program(leaves, lambda *inputs: _around(engine, [], []))
    count = itertools.count()
    engine.begin_pass()
    try:
        return program(leaves, lambda *inputs: block(engine, *inputs, weights=weights, index=next(count)))
    finally:
        engine.end_pass()


def _around(
    engine: Engine | str, inputs: list[Tensor], weights: list[Tensor]
) -> contextlib.AbstractContextManager[Any]:
    if engine == "plain":
        return contextlib.nullcontext()
    if engine == "oracle":
        return Oracle()
    assert isinstance(engine, Engine)
    return forward_pass(engine, *inputs, weights=weights)
