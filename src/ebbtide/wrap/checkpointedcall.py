"""The second forward of a checkpointed block: what it saves, backward reads.

[Note: one layer of hooks]
``torch.utils.checkpoint`` has Python hooks of its own. Hooks around those would run twice for every saved tensor, and
would compare it when it is read, long after it was computed and left the caches. So a checkpointed block has one layer
of hooks: its first forward drops what it saves and records the order, its second forward runs when backward reads the
first of these tensors, and ends with an exception at the last one. As in torch, each backward runs it once
(``GraphExecGroup`` makes one of several), and a tensor is released when it has been read. Who reads on another stream
than that of the operator that saved it waits for that one.

[Note: checked checkpoints]
The first forward records each tensor's version and a fingerprint. The version is compared when the tensor is read: an
in-place change that ordinary autograd rejects is rejected. Its bytes are compared when the second forward saves it: a
second forward with other values is an error before any gradient is computed from it. So a weight that was written
through ``.data`` since is one; a weight that nothing saved is computed from may change, as in ordinary autograd.

Kernels that add up in another order each time (``index_put_`` with several threads) are no error: where the values
differ by rounding, a third forward shows it, and the kind is not checkpointed any more. No block that communicates is
run a third time: the other ranks would not be there.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.base.errors import RestoreError
from ebbtide.engine.fingerprint import Compared, Fingerprint, Sample, all_equal, host_sample, nearly_equal
from ebbtide.engine.inputs import CAST, AccumulateGrad
from ebbtide.engine.run import BlockRun
from ebbtide.engine.storages import plain_tensors
from ebbtide.engine.tickets import UNCHECKED, LightTicket, modified_error
from ebbtide.store.device import StreamHandle
from ebbtide.wrap.called import Called, is_refused, unflatten
from ebbtide.wrap.checkpointable import Unfinished, Varies

_PARTLY_WRITTEN = ("RreluWithNoiseBackward", "CtcLossBackward")
"""How nodes' names begin that have a saved tensor that need not be written when it is saved; it takes no gradient. A
number follows: an operator in place, or with tensors for numbers, has another node."""

_NO_PARAMETER = torch.Tensor, type(None)
"""Types of what a saved tensor is a view of, if that is certainly no parameter."""

TRIES = 3
"""Forwards that may show that kernels add up in another order: of a few orders, two runs may take the same one."""

_SEEDS = 2
"""Most numbers that attention saves of its random state: without dropout nothing writes them."""

_ATTENTION = ("ScaledDotProduct", "EfficientAttention", "FlashAttention", "CudnnAttention")
"""How the names of its nodes begin; other nodes of attention are custom functions."""

_lock = RLock()
"""One second forward at a time: it changes what all threads share, and a thread for each device reads."""

_group: Callable[[], object] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


class _Input(NamedTuple):
    """A tensor argument of the block."""

    ticket: Any
    requires_grad: bool
    is_leaf: bool


class _Dropped:
    """A saved tensor of the first forward: its version and fingerprint, and what the second forward saved there."""

    __slots__ = (
        "__weakref__", "again", "again_version", "dtype", "fingerprint", "probe", "requires_grad", "same", "size",
        "stream", "version",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, probe: torch.Tensor | None, fingerprint: Fingerprint | Sample | None
    ) -> None:
        self.probe, self.fingerprint = probe, fingerprint
        self.version = 0 if probe is None else probe._version
        self.dtype, self.size = tensor.dtype, () if tensor.is_nested else tensor.shape
        self.requires_grad = tensor.requires_grad
        self.again: torch.Tensor | None = None
        self.again_version = 0
        self.stream: StreamHandle | None = None  # on which that was saved; who reads it may be on another
        self.same: torch.Tensor | bool = True

    def nearly_same(self, tensor: torch.Tensor) -> bool:
        """Whether what the second forward saved differs from the first one's by rounding at most."""
        if tensor.dtype is not self.dtype or tensor.shape != self.size:
            return False
        return self.fingerprint is None or self.fingerprint.nearly_same(tensor)


class _LastSaved(Exception):
    """Ends a second forward that has saved everything. An ``Exception``: module hooks with ``always_call`` run then."""


class CheckpointedCall:
    """A checkpointed call of a block. See [Note: one layer of hooks].

    The first forward gets the caller's objects; lists and dictionaries of the second are copies.

    Args:
        run: The run, whose hooks save, and perhaps offload, the tensors of the arguments.
        context: Runs the second forward in the context of the first.
        varies: Called when a second forward differs, if it may be.
    """

    def __init__(self, run: BlockRun, called: Called, context: Callable[..., None], varies: Varies) -> None:
        once = {id(x): x for x in called.tensors if not is_refused(x)}  # given twice, it is one object: ``q is k``
        with torch.no_grad():
            inputs = {key: _Input(run.pack(x), x.requires_grad, x.is_leaf) for key, x in once.items()}
        self._leaves = [inputs.get(id(x), x) for x in called.leaves]
        self.run, self._forward, self._spec, self._context = run, called.forward, called.spec, context
        self._varies, self._rounds = varies, None
        self._unfinished: Unfinished | None = None
        self._simulated = FakeTensor in map(type, called.tensors)  # else ``scan`` or the like traces its function
        self._dropped: list[weakref.ref[_Dropped] | None] = []  # None: a weight, which stays
        self._position = 0
        self._lock = RLock()  # autograd reads in a thread for each device
        # torch.utils.checkpoint.set_checkpoint_early_stop(False): blocks whose tail must run again.
        self._early_stop = getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None) is not False
        self._sampled, self._compared = run.compared is Compared.SAMPLE, run.compared is not Compared.NOT
        self._casts = any(map(torch.is_autocast_enabled, {"cpu", run.device_type}))
        self._empty: torch.Tensor | None = None  # of the device of the latest dropped tensor
        self._place = "(block)", run.block.name

    @property
    def restored(self) -> None:
        """What the second forward saved; set to None when a backward ends: see ``Engine.let_go_after``."""

    @restored.setter
    def restored(self, nothing: None) -> None:
        for reference in self._dropped:
            dropped = None if reference is None else reference()
            if dropped is not None:
                dropped.again = nothing

    # First forward

    def pack(self, tensor: torch.Tensor) -> _Dropped | LightTicket | FakeTensor:
        """Drop a saved tensor of the first forward: the pack hook."""
        if type(tensor) is FakeTensor and not self._simulated:
            return tensor
        run, kind = self.run, type(tensor)
        parameter = kind is torch.nn.Parameter
        sample = host_sample(tensor) if self._sampled and not parameter else None
        plain = sample is not None or (kind is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested)
        if plain and type(tensor._base) in _NO_PARAMETER:
            keys, storage = run.weights.keys, tensor.untyped_storage()
            weight = run.weights.hold(storage) if keys is None else storage._cdata in keys
        else:
            weight = parameter or run.weights.include(tensor)
        if weight:
            self._dropped.append(None)
            return LightTicket(tensor, weight=True, checked=run.engine.weights.checked, place=self._place)
        if self._casts:
            self._note_cast(tensor)
        probe = None
        if plain and not tensor.is_inference() and not tensor.is_quantized:
            empty = self._empty
            if empty is None or empty.device != tensor.device:
                empty = self._empty = run.engine.empty(tensor)
            probe = tensor.detach()
            probe.data = empty  # [Note: version probe]
        fingerprint = sample
        if sample is None and self._compared and _has_only_values(tensor):
            fingerprint = run.engine.trust.fingerprint(tensor, run.compared)
        dropped = _Dropped(tensor, probe, fingerprint)
        self._dropped.append(weakref.ref(dropped))
        return dropped

    def _note_cast(self, tensor: torch.Tensor) -> None:
        """Remember a cast that autocast keeps while its region is open: that of a leaf."""
        base = tensor if tensor._base is None else tensor._base
        node, pass_ = base.grad_fn, self.run.pass_
        if node is not None and type(node).name(node) == CAST and (pass_.cast is None or pass_.cast() is None):
            source = node.next_functions[0][0]
            if type(source) is AccumulateGrad:
                pass_.cast = weakref.ref(base)

    # Backward

    def unpack(self, dropped: _Dropped | LightTicket | FakeTensor) -> torch.Tensor:
        """Return a saved tensor: the unpack hook.

        Raises:
            ModifiedInPlaceError: It was changed in place since it was saved.
            RestoreError: The second forward computed another tensor, or did not save it.
        """
        if isinstance(dropped, LightTicket):  # as ``read``, in fewer calls
            unchanged = dropped.version == UNCHECKED or dropped.tensor._version == dropped.version
            return dropped.tensor if unchanged else dropped.read()
        if not isinstance(dropped, _Dropped):
            return dropped
        probe = dropped.probe
        if probe is not None and probe._version != dropped.version:
            raise self._modified(dropped, probe._version, dropped.version)
        task = torch._C._current_graph_task_id()
        node = torch._C._current_autograd_node()
        with self._lock:
            late = self._early_stop and task != -1 and not dropped.requires_grad
            if late and type(node).name(node) == "RreluWithNoiseBackward0":
                self._early_stop, dropped.again = False, None  # its noise is written after it is saved
            if dropped.again is None:
                self._run_second_forward(task)
            tensor, stream = dropped.again, dropped.stream
            if tensor is None:
                raise self._saved_less()
            if task == -1:
                self.restored = None
            elif not isinstance(node, FunctionCtx):  # a custom function may read it again in the same backward
                dropped.again = None
        tier = self.run.engine.tier
        if stream is not None and stream != tier.stream_of(tensor.device):
            for part in filter(tier.owns, plain_tensors([tensor])):
                tier.follow(part, stream)
        version = 0 if tensor.is_inference() else tensor._version
        if version != dropped.again_version:
            raise self._modified(dropped, version, dropped.again_version)
        if dropped.same is not True and _was_written(node, dropped):
            if dropped.same is False and self._only_rounds(dropped, tensor):
                return tensor
            how = f"computed another {list(dropped.size)} tensor than the first"
            failed = functools.partial(_differs, self.run.block.name, how, self._varies)
            self.run.engine.trust.require(dropped.same, failed)
        return tensor

    def _modified(self, dropped: _Dropped, found: int, expected: int) -> Exception:
        return modified_error(dropped.dtype, dropped.size, found, expected, f"block {self.run.block.name!r}")

    def _saved_less(self) -> RestoreError:
        how = f"saved {self._position} of {len(self._dropped)} tensors"
        return _differs(self.run.block.name, how, self._varies)

    def _run_second_forward(self, task: int) -> None:
        if task != -1 and _group() is None:
            self.run.engine.let_go_after(task, weakref.ref(self))
        self._rounds = None
        self._run_with(self._save_second)
        if self._position < len(self._dropped):
            raise self._saved_less()

    def _run_with(self, save: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run the forward, whose saved tensors ``save`` receives until it raises."""
        # Outside of inference mode, as where ``Engine.unpack`` restores: what is made in it has no version.
        with _lock, torch.inference_mode(False), torch.no_grad(), _outside_vmap():
            self._position = 0
            found = [(x, self.run.engine.unpack(x.ticket)) for x in self._leaves if isinstance(x, _Input)]
            torch._C._set_grad_enabled(True)
            inputs = {id(x): _argument(x, tensor) for x, tensor in found}
            args, kwargs = unflatten(iter([inputs.get(id(x), x) for x in self._leaves]), self._spec)
            cast = self.run.pass_.cast

            def forward(unfinished: Unfinished | None) -> None:
                self._unfinished = unfinished
                with saved_tensors_hooks(save, lambda tensor: tensor):
                    try:
                        self._forward(*args, **kwargs)
                    except Exception:  # perhaps not ours: TorchScript, or a block, raises another in its place
                        if not self._early_stop or self._position < len(self._dropped):
                            raise

            self._context(cast is not None and cast() is None, self._early_stop, forward)

    def _only_rounds(self, dropped: _Dropped, tensor: torch.Tensor) -> bool:
        """Whether a tensor differs from the first forward's because its kernels add up in another order each time.

        Then a third forward differs from the second, and all by rounding. As in plain training, none is the right one.
        """
        if not dropped.nearly_same(tensor) or self._varies is None:
            return False
        if self._rounds is None:
            found = [reference and reference() for reference in self._dropped]
            kept = {n: tensor if d is dropped else d.again for n, d in enumerate(found) if d and d.same is False}
            kept = {n: value for n, value in kept.items() if value is not None}
            self._rounds = any(self._third_differs(kept) for _ in range(TRIES))
            if self._rounds:
                self._varies("compute sums in another order each time they run")
        return self._rounds

    def _third_differs(self, kept: dict[int, torch.Tensor]) -> bool:
        """Run the forward once more; return whether it differs from what the second kept, and by rounding only."""
        equal, near = True, True

        def compare(third: torch.Tensor) -> None:
            nonlocal equal, near
            second = kept.get(self._position)
            if second is not None and not all_equal(second, third):
                equal, near = False, near and nearly_equal(second, third)

        self._run_with(functools.partial(self._save_second, compare=compare))
        return near and not equal

    def _save_second(self, tensor: torch.Tensor, compare: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Hold and compare a tensor that the second forward saves: its pack hook; that of a third only compares."""
        if type(tensor) is FakeTensor and not self._simulated:
            return tensor
        position, known = self._position, len(self._dropped)
        if position >= known and self._early_stop:  # the block caught the exception
            raise _LastSaved
        value = tensor.detach() if tensor.requires_grad else tensor
        reference = self._dropped[position] if position < known else None
        dropped = None if reference is None else reference()
        if compare is not None:
            compare(value)
        elif dropped is not None:
            if dropped.fingerprint is not None:
                dropped.same = dropped.fingerprint.same(value)
            tier = self.run.engine.tier
            dropped.stream = tier.stream_of(value.device) if tier.owns(value) else None
            dropped.again, dropped.again_version = value, 0 if value.is_inference() else value._version
        if position + 1 == known and self._early_stop and self._unfinished is not None:
            self._early_stop, self._unfinished = not self._unfinished(False), None
        self._position = position + 1
        if position + 1 == known and self._early_stop:
            raise _LastSaved
        return value


def is_checkpoint_hook(pack: Any) -> bool:
    """Whether a pack hook is that of a checkpointed block's first forward."""
    return isinstance(getattr(pack, "__self__", None), CheckpointedCall)


@contextmanager
def _outside_vmap() -> Generator[None]:
    """Leave the ``vmap`` of a batched backward, which allows no random numbers: the first forward ran outside it."""
    depth = torch._C._vmapmode_increment_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(depth - 1):
            torch._C._vmapmode_increment_nesting()


def _argument(leaf: _Input, tensor: torch.Tensor) -> torch.Tensor:
    """Return an argument as the block received it, detached from its graph."""
    if not leaf.requires_grad:
        return tensor  # as autograd saves it, with its class and attributes
    tensor = tensor.detach().requires_grad_()
    plain = tensor.layout is torch.strided and not tensor.is_nested
    if not plain or leaf.is_leaf:
        return tensor
    return tensor.view_as(tensor) if tensor.numel() else torch.ops.aten.alias(tensor)  # a DTensor refuses that view


def _has_only_values(tensor: torch.Tensor) -> bool:
    """Whether all bytes of a saved tensor are values.

    Kernels save memory that was never written and that their backward does not read: workspaces of recurrent layers, as
    bytes; and on devices the padded sums of attention, which take no gradient.
    """
    if tensor.dtype is torch.uint8:
        return False
    return tensor.requires_grad or tensor.device.type == "cpu" or not tensor.is_floating_point()


def _was_written(node: Any, dropped: _Dropped) -> bool:
    """Whether a saved tensor had its values when the node that unpacks it saved it."""
    # The noise of rrelu is saved before it is written, if it is written at all; with another noise other saved tensors
    # differ, too. The table of CTC is written up to each row's length.
    name, dtype = "" if node is None else type(node).name(node), dropped.dtype
    if math.prod(dropped.size) <= _SEEDS and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        return not (node is None or isinstance(node, FunctionCtx) or name.startswith(_ATTENTION))
    return not name.startswith(_PARTLY_WRITTEN) or dropped.requires_grad


def _differs(block: str, how: str, varies: Varies) -> RestoreError:
    if varies is not None:
        varies("computed other values in a second forward")
    return RestoreError(
        f"block {block!r} was checkpointed, and its second forward {how}",
        expected="a forward that computes the same values twice",
        hint=_HINT,
    )


_HINT = (
    "does it draw from a random generator, or change an object, that ebbtide cannot reach, or was a weight written "
    "through .data before the backward, or does a sum's order vary? use policy 'offload', which checkpoints nothing"
)
