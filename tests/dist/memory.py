"""Bytes that a rank holds between forward and backward, counted twice: by the handle, and by our weak references.

[Note: a second count]
In the plain run, our hooks around every block record each storage that autograd saves, without weights: the bytes that
ordinary training holds. In the other runs our count sits between autograd and the handle's hooks, passes everything on
and keeps weak references only: the storages alive when backward begins are those really held. Bytes that enter the
store are counted at its entry. The handle's own numbers, and those of its plan, must agree exactly.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import ebbtide
from ebbtide.store.host import HostTier
from ebbtide.wrap import find_blocks
from tests.dist.sharded import Setup, make_job
from tests.dist.trial import Record
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.handles import enable_over

POLICIES = ("keep", "inputs", "offload", "minimal")
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Count:
    """Bytes when the backward of a step begins, each storage once.

    Attributes:
        saved: Bytes that autograd saved in blocks, without weights.
        inputs: Those of them that came into their block from outside.
        widened: Those that are float32 made of a narrower input: they are stored in the narrow type.
        alive: Those that are still alive.
        offloaded: Bytes that entered the store.
        weights: Those of them in a weight's memory.
        stored: Bytes that the store reports.
        stats: The handle's figures by name; empty in the plain run.
    """

    saved: int
    inputs: int
    widened: int
    alive: int
    offloaded: int
    weights: int
    stored: int
    stats: dict[str, int]


class Census:
    """Counts the bytes saved in the blocks of a model. See [Note: a second count]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[int, _Storage] = {}
        self._given: list[weakref.ref[Tensor]] = []
        for module, _ in find_blocks(model):
            module.register_forward_pre_hook(self._enter, with_kwargs=True)

    def clear(self) -> None:
        self._known.clear()

    def see(self, tensor: Tensor) -> None:
        """Record a saved tensor."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or self.is_weight(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is not None and known.reference() is storage:
            return
        if known is not None:  # the other one is dead; its bytes count nevertheless
            self._known[-len(self._known)] = known
        given = [x for reference in self._given if (x := reference()) is not None]
        self._known[id(storage)] = _Storage(
            reference=weakref.ref(storage),
            size=storage.nbytes(),
            given=any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in given),
            widened=any(_is_widened(tensor, x) for x in given),
        )

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the current memory of a weight or buffer of the model."""
        weights = (*self._model.parameters(), *self._model.buffers())
        plain = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        where = tensor.untyped_storage().data_ptr()
        return any(w.untyped_storage().nbytes() and w.untyped_storage().data_ptr() == where for w in plain)

    def saved(self) -> int:
        return sum(s.size for s in self._known.values())

    def inputs(self) -> int:
        return sum(s.size for s in self._known.values() if s.given)

    def widened(self) -> int:
        return sum(s.size for s in self._known.values() if s.widened)

    def alive(self) -> int:
        return sum(s.size for s in self._known.values() if s.reference() is not None)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = [weakref.ref(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


@dataclass(frozen=True, kw_only=True)
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    size: int
    given: bool
    widened: bool


def _is_widened(tensor: Tensor, given: Tensor) -> bool:
    narrower = given.is_floating_point() and given.element_size() < tensor.element_size()
    return narrower and given.shape == tensor.shape and torch.equal(given.to(tensor.dtype), tensor)


class _Pack:
    """A counting pack hook; it has the owner of the hook behind it."""

    def __init__(self, census: Census, pack: Any) -> None:
        self.__self__ = pack.__self__
        self._census, self._pack = census, pack

    def __call__(self, tensor: Tensor) -> Any:
        self._census.see(tensor)
        return self._pack(tensor)


def measure(setup: Setup, policy: str | None) -> Count:
    """Train two steps, with or without a policy; return the count at the beginning of the second backward."""
    torch.manual_seed(7)
    counts: list[Count] = []
    with contextlib.ExitStack() as stack:
        tier = HostTier(FakeDevice(1e12, 1e12))
        stack.callback(tier.close)
        offloaded: list[tuple[int, bool]] = []
        handles: list[ebbtide.Handle] = []

        def enable(model: nn.Module, **options: Any) -> None:
            if policy is not None:
                handle = enable_over(tier, model, policy=policy, min_bytes=0, window=1, **options)
                handles.append(stack.enter_context(handle))

        job = make_job(setup, enable)
        census = Census(job.model)
        if policy is None:
            _note_blocks(job.model, census)

        def copy_out_all(
            sources: list[Tensor], original: Callable[..., Any] = tier.copy_out_all, **options: Any
        ) -> Any:
            offloaded.extend((source.untyped_storage().nbytes(), census.is_weight(source)) for source in sources)
            return original(sources, **options)

        def hooks(pack: Any, unpack: Any) -> saved_tensors_hooks:
            return saved_tensors_hooks(_Pack(census, pack), unpack)

        def count(gradient: Tensor) -> None:
            stats = handles[0].stats().as_dict() if handles else {}
            counts.append(
                Count(
                    saved=census.saved(),
                    inputs=census.inputs(),
                    widened=census.widened(),
                    alive=census.alive(),
                    offloaded=sum(size for size, _ in offloaded),
                    weights=sum(size for size, weight in offloaded if weight),
                    stored=tier.used_bytes,
                    stats={k.removesuffix("_bytes"): v for k, v in stats.items() if isinstance(v, int)},
                )
            )

        stack.enter_context(mock.patch.object(tier, "copy_out_all", copy_out_all))
        stack.enter_context(mock.patch("ebbtide.wrap.hooks.saved_tensors_hooks", hooks))
        _when_backward_begins(job.model, count)
        record: Record = {}
        for step in range(STEPS):
            census.clear()
            offloaded.clear()
            job.step(step, record)
            job.model.zero_grad()
    return counts[-1]


def measure_all(setup: Setup) -> dict[str, Count]:
    """Return the counts of ordinary training (``"plain"``) and of each policy."""
    return {policy or "plain": measure(setup, policy) for policy in (None, *POLICIES)}


def _note_blocks(model: nn.Module, census: Census) -> None:
    """Count the bytes that autograd saves in blocks of a model without ebbtide."""

    def pack(tensor: Tensor) -> Tensor:
        census.see(tensor)
        return tensor.detach()  # the tensor itself would hold an operator that saves its own output

    for module, _ in find_blocks(model):

        def forward(*args: Any, behind: Any = module.forward, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, lambda packed: packed):
                return behind(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]


def _when_backward_begins(model: nn.Module, count: Callable[[Tensor], None]) -> None:
    """Call ``count`` when the gradient of the model's output is computed: before any block's backward."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        first = next(x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad)
        first.register_hook(count)

    model.register_forward_hook(after)
