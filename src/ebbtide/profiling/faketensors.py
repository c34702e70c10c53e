"""A simulated machine: tensors have shapes and no bytes, and each operator advances a clock.

[Note: a simulated step]
torch's ``FakeTensorMode`` runs the model's own code, forward and backward, under the engine's hooks, so saved tensors
and their recipes are those of a real step. A dispatch mode simulates the machine: every operator advances a clock by
its time (FLOP at the machine's rate or bytes at the memory's rate, whichever is longer), and every live storage is
counted. The engine reads both in place of the meter of a measured step (``ebbtide.engine.timing``); the rest is the
same. The step follows the heuristic, as a measured one does; copies take no time.

Values computed from neither weights nor activations (positions, lengths, whether a mask hides anything) are small and
really computed, so the model can branch on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ebbtide.planner.machines import Machine
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import StreamHandle
from ebbtide.store.meter import Clock
from ebbtide.store.protocol import Slot, Streamless

TENSOR_TYPES = (torch.Tensor, FakeTensor)
"""Types of the tensors that have a storage of their own in a simulated step."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by operators whose result, or its shape, depends on the values of fake tensors."""

HALF = (torch.bfloat16, torch.float16)
"""Types whose products take the rate of half precision."""

_FREE = {"set_", "detach", "detach_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
REAL_BYTES = 16 * 1024**2
"""Results of operators on real tensors are real up to this size."""

_GROUPED = {"_grouped_mm": 2.0, "grouped_mm_fallback": 2.0, "grouped_mm_fallback_backward": 4.0}
"""FLOP of each term of the products of experts, for which torch has no formula."""

_ATTENTION = {
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable",
    )
}  # fmt: skip
"""Operators of fused attention, whose first arguments are query, key and value; those of backward follow a gradient."""


def without_bytes() -> FakeTensorMode:
    """Return the mode under which tensors have shapes and no bytes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # its cache would keep storages alive, and they would count
    return mode


class FakeMachine(Clock, TorchDispatchMode):
    """Advances a clock and counts live storages, for every operator that is called. See [Note: a simulated step].

    It is the meter of its step (``ebbtide.store.meter.Meter``).

    Args:
        machine: What operators cost.
        base_bytes: Constant memory: weights, optimizer state.
    """

    def __init__(self, machine: Machine, base_bytes: int) -> None:
        super().__init__()
        self._machine, self._clock = machine, 0.0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = self._peak = base_bytes

    # The meter of a step

    def timestamp(self, device: torch.device | None) -> float:
        """Return the clock."""
        return self._clock

    def take_peak_bytes(self, device: torch.device | None = None) -> int:
        """Return the most bytes alive at once since the last call."""
        peak, self._peak = self._peak, self.live_bytes
        return peak

    def system_seconds(self) -> None:
        """Return None: nothing runs."""
        return None

    @contextmanager
    def unseen(self) -> Generator[None]:
        """While open, operators take no time and storages do not count."""
        clock, peak = self._clock, self._peak
        yield
        self._clock, self._peak = clock, max(peak, self.live_bytes)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        result = self._call(func, args, kwargs, read)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._clock += self._price(func, args, kwargs, result, read, made)
        for tensor in made:
            self._count(tensor)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor]) -> Any:
        """Call an operator on fake tensors, or really if its inputs are real and its outputs small."""
        name = func._schema.name.partition("::")[2]
        if name.startswith("index"):
            args = (args[0], _places(args[1]), *args[2:])
        if any(isinstance(x, FakeTensor) for x in read) or (not read and name.startswith("empty")):
            return func(*args, **kwargs)
        if name == "set_":  # of a real storage
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            sizes = func(*args, **kwargs)
        except NEEDS_VALUES:
            pass  # the values are there
        else:
            if sum(x.numel() * x.itemsize for x in tree_leaves(sizes) if isinstance(x, torch.Tensor)) > REAL_BYTES:
                return sizes
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _price(
        self, func: Any, args: Any, kwargs: Any, result: Any, read: list[torch.Tensor], made: list[torch.Tensor]
    ) -> float:
        name = func._schema.name.partition("::")[2]
        before = {id(x.untyped_storage()) for x in read}
        views = not func._schema.is_mutable and all(id(x.untyped_storage()) in before for x in made)
        if name in _FREE or views:
            return 0.0
        machine = self._machine
        nbytes = sum(x.numel() * x.itemsize for x in (*read, *made))
        flops, attends = _flops(func, name, args, kwargs, result)
        half = bool(read) and read[0].dtype in HALF
        rate = machine.flop_per_second if half else machine.flop32_per_second
        if attends and half:
            rate = machine.attention_flop_per_second
        return max(flops / rate, nbytes / machine.memory_bytes_per_second, machine.launch_seconds)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes, live = id(storage), storage.nbytes(), self._live
        known = live.get(key)
        if not nbytes or (known is not None and known() is storage):
            return

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self.live_bytes -= nbytes
            if live.get(key) is reference:
                del live[key]

        live[key] = weakref.ref(storage, forget)
        self.live_bytes += nbytes
        self._peak = max(self._peak, self.live_bytes)

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Stop counting these: they belong to the base."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[id(storage)] = weakref.ref(storage)


class _FakeTensorSlot:
    """An offloaded storage without bytes. See ``ebbtide.store.protocol.Slot``."""

    def __init__(self, source: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._real = None if isinstance(source, FakeTensor) else source.clone()
        self._kind = source.new_empty(0)

    def cancel(self) -> bool:
        return False

    def discard(self) -> None:
        pass

    def take(self) -> torch.Tensor:
        return self._kind.new_empty(self.nbytes) if self._real is None else self._real.clone()

    def free(self) -> None:
        self._real = None


class FakeTensorTier(Streamless):
    """A tier whose copies take no time. See ``ebbtide.store.protocol.Tier``."""

    name, used_bytes, free_bytes = "simulated", 0, None

    def __init__(self) -> None:
        self.stalls, self.counters = Stalls(), TierCounters()

    def gauges(self) -> dict[str, int]:
        return {}

    def owns(self, tensor: torch.Tensor) -> bool:
        return True

    def copy_out_all(self, sources: Sequence[torch.Tensor], *, compute: StreamHandle | None = None) -> list[Slot]:
        return [_FakeTensorSlot(source) for source in sources]

    def are_copied_out(self, slots: Sequence[Slot]) -> bool:
        return True

    def wait_copied_out(self, slots: Sequence[Slot]) -> None:
        pass

    def prefetch(self, slots: Sequence[Slot]) -> int:
        return 0

    def trim(self) -> None:
        pass

    def close_unused(self, in_use: Callable[[], object]) -> None:
        pass

    def close(self) -> None:
        pass


def _places(indices: Any) -> Any:
    """Return indices with real masks replaced by the positions they select, whose number depends on values."""
    if not isinstance(indices, (list, tuple)):
        return indices
    found: list[torch.Tensor | None] = []
    for index in indices:
        mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        if mask and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, backward: bool) -> float:
    """Return the FLOP of fused attention between all pairs, also where several heads of ``query`` share a key.

    Forward multiplies by keys and by values; backward makes the scores again, their gradient, and three more.
    """
    batch, heads, queries, width = query
    widths = 3 * width + 2 * value[-1] if backward else width + value[-1]
    return 2.0 * batch * heads * queries * key[-2] * widths


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[float, bool]:
    """Return the FLOP of an operator, and whether it is fused attention; causal attention needs half of the pairs."""
    if name.removesuffix("_backward") in _ATTENTION:  # torch's count fails before 2.13 where heads share a key
        backward = name.endswith("_backward")
        flops = _attention_flops(*(each.shape for each in args[backward : backward + 3]), backward=backward)
    elif name in _GROUPED:  # each row of the first, or each column of the second, belongs to one group
        flops = _GROUPED[name] * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    else:
        counts = flop_registry.get(func.overloadpacket)
        if counts is None:
            return 0.0, False
        flops = float(counts(*args, **kwargs, out_val=result))
    if "attention" not in name:
        return flops, False
    names = [argument.name for argument in func._schema.arguments]
    causal = dict(zip(names, args, strict=False)).get("is_causal") or kwargs.get("is_causal", False)
    return (flops / 2 if causal else flops), True
