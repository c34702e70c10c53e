"""A training that can be repeated with offloading, and the differences that a rank sees.

[Note: what a trial shows]
``compare`` trains the same job twice in one rank, from the same seed, without and with offloading, and returns the
differences: losses, local gradients after every backward, weights after every optimizer step. It also watches the
store: all offloaded bytes are searched for every weight, sharded or full, in every dtype it is used in. All
weights are random, those of norms too, so that no activation equals one by chance.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import ebbtide
from ebbtide.base.actions import Action, Plan
from tests.helpers.engines import assert_nothing_left
from tests.helpers.oracle import same_bits

POLICIES = ("keep", "inputs", "offload", "minimal", "recompute", "auto")
"""``"recompute"`` is minimal with no block re-run whole: as many recipes as there can be."""
MOVING = ("offload", "minimal", "auto")

RELEASE_SECONDS = 1.0
"""Limit until gloo's thread has released the input of a collective, and its graph, which it holds a while longer."""

Record = dict[str, Tensor | None]
Enable = Callable[..., Any]
"""``enable(model, **options)``: turn offloading on here, in a run that has it, and return the handle."""


@dataclass(kw_only=True)
class Job:
    """The training of one rank.

    Attributes:
        model: Holds every trained parameter.
        step: Run the forwards and backwards of one optimizer step and record their results.
        whole: Weights before sharding, if sharding hides them.
    """

    model: nn.Module
    step: Callable[[int, Record], None]
    whole: dict[str, Tensor] = field(default_factory=dict)


Make = Callable[[Enable], Job]


@dataclass(kw_only=True)
class Findings:
    """The results of one rank: see [Note: what a trial shows].

    Attributes:
        differences: Names of values that are not bitwise equal.
        noted: Number of compared values.
        weights_offloaded: Weights whose bytes entered the store.
        offloaded: Copies that entered it, of ``offloaded_bytes``, none larger than ``largest_bytes``.
        said: Answers that a step recorded under names that end in "said": all must be true.
        units: FSDP units.
    """

    differences: list[str] = field(default_factory=list)
    noted: int = 0
    weights_offloaded: list[str] = field(default_factory=list)
    offloaded: int = 0
    offloaded_bytes: int = 0
    largest_bytes: int = 0
    said: list[bool] = field(default_factory=list)
    recomputes: int = 0
    checkpointed: int = 0
    live_tickets: int = 0
    store_bytes: int = 0
    demoted: tuple[str, ...] = ()
    units: int = 0
    block_names: list[str] = field(default_factory=list)


def compare(make: Make, policies: tuple[str, ...] = POLICIES, *, steps: int = 2) -> dict[str, Findings]:
    """Train without ebbtide, then with each policy; return the findings of each."""
    plain, _ = _train(make, None, steps)
    found: dict[str, Findings] = {}
    for policy in policies:
        record, findings = _train(make, policy, steps)
        findings.differences = [
            k
            for k in plain.keys() | record.keys()
            if k not in plain or k not in record or not _same(plain[k], record[k])
        ]
        findings.noted = sum(v is not None for v in plain.values())
        found[policy] = findings
    return found


def check(
    values: list[dict[str, Findings]], *, blocks: int, unknowable: Callable[[str], bool] = lambda weight: False
) -> None:
    """Assert that no rank found a difference, an offloaded weight or leftovers, and that the search was not empty.

    Args:
        values: Return value of each rank's ``compare``.
        blocks: Number of blocks of a rank.
        unknowable: Weights whose copies cannot be told from activations.
    """
    for rank, by_policy in enumerate(values):
        for policy, found in by_policy.items():
            where = f"rank {rank}, {policy}"
            assert found.differences == [], (where, found.differences)
            assert [w for w in found.weights_offloaded if not unknowable(w)] == [], (where, found.weights_offloaded)
            assert (found.live_tickets, found.store_bytes, found.demoted) == (0, 0, ()), where
            # Loss, gradient and weight of two steps, where all weights are one.
            assert len(found.block_names) == blocks and found.noted >= 6, where
            assert (found.offloaded > 0) == (policy != "keep"), where


def note_step(record: Record, name: str, model: nn.Module, loss: Tensor | None = None) -> None:
    """Record a loss and the current gradients."""
    if loss is not None:
        record[f"{name} loss"] = _local(loss).detach().clone()
    record |= {f"{name} grad {k}": _copy(p.grad) for k, p in model.named_parameters()}


def randomise(model: nn.Module) -> dict[str, Tensor]:
    """Give every parameter random values; return a copy of all full weights."""
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {k: t.detach().clone() for k, t in named.items()}


def _train(make: Make, policy: str | None, steps: int) -> tuple[Record, Findings]:
    torch.manual_seed(7)
    findings = Findings()
    with contextlib.ExitStack() as stack:
        watched: list[tuple[ebbtide.Handle, list[Tensor]]] = []

        def enable(model: nn.Module, **options: Any) -> ebbtide.Handle | None:
            if policy is None:
                return None
            handle = stack.enter_context(_enable(model, policy, options))
            watched.append((handle, _watch(handle)))
            return handle

        job = make(enable)
        record: Record = {}
        optimizer = torch.optim.SGD([p for p in job.model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        for step in range(steps):
            job.step(step, record)
            for _, offloaded in watched:
                findings.weights_offloaded += _weights_among(offloaded, job.whole, job.model)
                findings.offloaded += len(offloaded)
                sizes = [p.untyped_storage().nbytes() for p in offloaded]
                findings.offloaded_bytes += sum(sizes)
                findings.largest_bytes = max(findings.largest_bytes, *sizes, 0)
                offloaded.clear()
            optimizer.step()
            optimizer.zero_grad()
            record |= {f"{step} weight {k}": _local(p).detach().clone() for k, p in job.model.named_parameters()}
        for handle, _ in watched:
            _add(findings, handle)
    findings.said = [bool(value) for name, value in record.items() if name.endswith("said") and value is not None]
    findings.units = sum(isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in job.model.modules())
    return record, findings


def _add(findings: Findings, handle: ebbtide.Handle) -> None:
    until = time.monotonic() + RELEASE_SECONDS
    while handle._engine.live_tickets and time.monotonic() < until:
        time.sleep(0.01)
    assert_nothing_left(handle._engine)
    stats = handle.stats()
    findings.recomputes += stats.total_recomputes
    findings.checkpointed += stats.checkpointed_blocks
    findings.live_tickets += stats.live_tickets
    findings.store_bytes += stats.store_bytes
    findings.demoted += stats.demoted_sites
    findings.block_names += handle._attachment.block_names


def _enable(model: nn.Module, policy: str, options: dict[str, Any]) -> ebbtide.Handle:
    chosen: dict[str, Any] = {"policy": "minimal" if policy == "recompute" else policy}
    if policy == "enable_ckpt":
        chosen = {"enable_ckpt": True}
    handle = ebbtide.enable_activation_offloading(model, min_bytes=0, window="1MiB", **chosen, **options)
    if policy == "recompute":
        follow(handle, _Recompute(handle.plan))
    return handle


def follow(handle: ebbtide.Handle, plan: Any) -> None:
    """Let a handle carry out another plan, which decides for blocks that need other ranks, too."""
    checkpointable = handle._attachment._checkpointable
    handle._engine.plan = checkpointable._plan = plan
    checkpointable._voted = None


class _Recompute:
    """A plan that checkpoints no block."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def block_action(self, kind: str, index: int, **sizes: int) -> Action:
        return Action.KEEP


# Watching


def _watch(handle: ebbtide.Handle) -> list[Tensor]:
    """Let the store remember every offloaded byte."""
    tier, offloaded = handle._engine.tier, []
    copy_out_all = tier.copy_out_all

    def watched(sources: Sequence[Tensor], **options: Any) -> Any:
        offloaded.extend(source.clone() for source in sources)
        return copy_out_all(sources, **options)

    tier.copy_out_all = watched  # type: ignore[method-assign]
    return offloaded


def _weights_among(offloaded: list[Tensor], whole: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Name the weights whose values in this step's forward occur among the offloaded bytes."""
    now = dict(whole)
    for k, p in model.named_parameters():
        now[k] = p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        now[k + " (local)"] = _local(p).detach()
    blobs = [b.numpy().tobytes() for b in offloaded]
    found: list[str] = []
    for k, w in now.items():
        for dtype in {w.dtype, torch.bfloat16} if w.is_floating_point() else {w.dtype}:
            needle = w.to(dtype).contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if len(needle) >= 32 and any(needle in b for b in blobs):
                found.append(f"{k} as {dtype}")
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else _local(grad).detach().clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one, other)
