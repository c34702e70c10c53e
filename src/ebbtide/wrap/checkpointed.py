"""Checkpointed blocks: their forward is repeated in backward, in the context of the first.

[Note: a second run] Gradients are right only if the second forward computes the same values. torch's checkpoint
restores autocast and the default random generators. The rest is restored here: Python's and numpy's random state,
everything that the block's modules can reach (see [Note: state]: the parameters and adapters of that time, counters,
memories), ``requires_grad``, the numerics and the chosen attention kernels. Weights, buffers and other tensors of the
modules are checked for changes: see [Note: watched weights].

[Note: checked checkpoints]
Tensors that torch's checkpoint saves in the first forward pass through our hooks, which record their version and a
fingerprint. In backward both are compared with those of the second forward: an in-place change that ordinary autograd
rejects is rejected, and a second forward with other values is an error before any gradient is computed from it.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ebbtide.base.errors import RestoreError
from ebbtide.engine.fingerprint import Compared, Fingerprint, has_sample, host_sample
from ebbtide.engine.guard import Watched, changed_error
from ebbtide.engine.numerics import NumericsChange, current_numerics
from ebbtide.engine.run import BlockRun
from ebbtide.engine.tickets import LightTicket, modified_error, version_probe
from ebbtide.wrap.state import State

_SDPA = ("flash", "mem_efficient", "math", "cudnn")

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

_SEEDS = 2
"""Most numbers that attention saves of its random state."""


class ForwardContext:
    """The context of a block's forward.

    Args:
        module: The block.
        run: Its run.
        state: Contents of its modules now, if known.
    """

    def __init__(self, module: nn.Module, run: BlockRun, state: State | None = None) -> None:
        self._run = run
        self._state = state or State(module.modules())
        engine, moved = run.engine, run.engine.weights.move
        self._flags = [(t, t.requires_grad) for t in self._state.tensors if t.is_leaf]
        self._watched: list[tuple[torch.Tensor, Watched]] = []
        for tensor in [] if moved else self._state.tensors:
            if not torch.nn.parameter.is_lazy(tensor) and not tensor.is_inference():
                watched = engine.guard.watch(tensor, tensor._version, compared=run.compared)
                self._watched.append((tensor, watched))
        self._moved = moved
        self._random = _random_states()
        self._numerics, self._kernels = current_numerics(), _attention_kernels()

    @contextmanager
    def back(self) -> Generator[None]:
        """Restore it for the second forward, and the current context afterwards.

        Raises:
            ModifiedInPlaceError: A tensor of the modules has changed since.
        """
        instead = self._check_tensors()
        now, flags = self._state.now(), [(t, t.requires_grad) for t, _ in self._flags]
        randoms, kernels, numerics = _random_states(), _attention_kernels(), NumericsChange()
        try:
            if instead or now is not self._state:  # else it is known to be as it was
                self._state.put_back(instead, tensors=not self._moved)
            _set_flags(self._flags)
            _set_random(self._random)
            _set_attention_kernels(self._kernels)
            numerics.apply(self._numerics)
            yield
        finally:
            now.put_back(tensors=not self._moved)
            _set_flags(flags)
            _set_random(randoms)
            _set_attention_kernels(kernels)
            numerics.undo()

    def _check_tensors(self) -> dict[int, torch.Tensor]:
        """Return id → replacement of tensors whose memory changed since: an optimizer's copy, the old ``p.data``."""
        instead: dict[int, torch.Tensor] = {}
        again = f"runs block {self._run.block.name!r} again"
        for tensor, watched in self._watched:
            failed = functools.partial(changed_error, "weight, buffer or attribute", tensor.shape, again)
            self._run.engine.trust.require(watched.same, failed)
            if watched.replaces(tensor):
                requires = tensor.requires_grad
                copy = watched.tensor
                instead[id(tensor)] = nn.Parameter(copy, requires) if isinstance(tensor, nn.Parameter) else copy
        return instead


def run_checkpointed(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: ForwardContext,
    run: BlockRun,
    saved_bytes: int,
) -> Any:
    """Run a block under a checkpoint. Its inputs are saved, and offloaded by the open hooks.

    Tensors are passed as positional arguments: the checkpoint itself would hold those passed by name or in a list. The
    first forward gets the caller's objects; lists and dictionaries of the second are copies.

    Args:
        forward: The block's forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        context: The context of this forward.
        run: The block's run.
        saved_bytes: Bytes that such a block saves without a checkpoint.
    """
    leaves, spec = tree_flatten((args, kwargs))
    first_call = [(args, kwargs)]

    def flat(*arguments: Any) -> Any:
        if first_call:
            first_args, first_kwargs = first_call.pop()
            hooks = _Checked(run)
            with saved_tensors_hooks(hooks.pack, hooks.unpack):
                return forward(*first_args, **first_kwargs)
        again_args, again_kwargs = tree_unflatten(list(arguments), spec)
        with context.back():
            try:
                return forward(*again_args, **again_kwargs)
            except RuntimeError as error:
                # Torch ends a second run with an exception once it has all tensors. TorchScript replaces an exception
                # that passes through it by another. Torch itself raises if tensors are missing.
                if "TorchScript interpreter" not in str(error):
                    raise
                return None

    # Our hooks compare versions and bytes, more than torch's check of shapes.
    try:
        return checkpoint(flat, *leaves, use_reentrant=False, determinism_check="none")
    finally:
        run.add_checkpointed(saved_bytes)


class _Packed:
    """A saved tensor as torch's checkpoint packed it, with its version and fingerprint."""

    __slots__ = ("__weakref__", "dtype", "fingerprint", "held", "probe", "restored", "size", "stride", "version")

    def __init__(
        self, held: Any, tensor: torch.Tensor, probe: torch.Tensor | None, fingerprint: Fingerprint | bytes | None
    ) -> None:
        self.held, self.probe, self.fingerprint = held, probe, fingerprint
        self.version = 0 if probe is None else probe._version
        self.dtype, self.size = tensor.dtype, () if tensor.is_nested else tensor.shape
        self.stride = tensor.stride() if type(fingerprint) is bytes else ()
        self.restored: torch.Tensor | None = None  # for a function that reads it again in the same backward


class _Checked:
    """Hooks around those of torch's checkpoint. See [Note: checked checkpoints].

    Args:
        run: The block's run.
    """

    def __init__(self, run: BlockRun) -> None:
        self._run = run
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
        self._pack, self._unpack = top
        self._sampled = run.compared is Compared.SAMPLE
        self._empty = torch.empty(0, device="cpu")  # whatever the default device

    def pack(self, tensor: torch.Tensor) -> _Packed | LightTicket:
        run, held = self._run, self._pack(tensor)
        if run.weights.include(tensor):
            place = "(block)", run.block.name
            return LightTicket(tensor, weight=True, checked=run.engine.weights.checked, place=place)
        if self._sampled and tensor.dtype in _FLOATS and not tensor.is_inference():  # of the host, all are values
            sample = host_sample(tensor)
            if sample is not None:
                probe = tensor.detach()
                probe.data = self._empty  # [Note: version probe]
                return _Packed(held, tensor, probe, sample)
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_inference()
        probe = version_probe(tensor, run.engine.empty(tensor)) if plain and not tensor.is_nested else None
        fingerprint = run.engine.trust.fingerprint(tensor, run.compared) if _has_only_values(tensor) else None
        return _Packed(held, tensor, probe, fingerprint)

    def unpack(self, packed: _Packed | LightTicket) -> torch.Tensor:
        if isinstance(packed, LightTicket):
            return packed.read()
        block, fingerprint = self._run.block.name, packed.fingerprint
        if packed.probe is not None and packed.probe._version != packed.version:
            raise modified_error(packed.dtype, packed.size, packed.probe._version, packed.version, f"block {block!r}")
        if packed.restored is not None:
            return packed.restored
        tensor = self._unpack(packed.held)
        self._keep(packed, tensor)
        if fingerprint is None:
            return tensor
        sampled = isinstance(fingerprint, bytes)
        layout = packed.size, packed.stride, packed.dtype
        same = has_sample(tensor, fingerprint, *layout) if sampled else fingerprint.same(tensor)
        if same is not True and (same is not False or _was_written(torch._C._current_autograd_node(), tensor)):
            self._run.engine.trust.require(same, functools.partial(_differs, block, packed.size))
        return tensor

    def _keep(self, packed: _Packed, tensor: torch.Tensor) -> None:
        """Keep a tensor that a custom function reads until its backward ends: torch gives each one out once only."""
        node, task = torch._C._current_autograd_node(), torch._C._current_graph_task_id()
        if task != -1 and isinstance(node, FunctionCtx):
            packed.restored = tensor
            self._run.engine.let_go_after(task, weakref.ref(packed))


def runs_again(pack: Any) -> bool:
    """Whether a pack hook is that of a checkpointed block's first forward."""
    return isinstance(getattr(pack, "__self__", None), _Checked)


def _has_only_values(tensor: torch.Tensor) -> bool:
    """Whether all bytes of a saved tensor are values.

    Kernels save memory that was never written and that their backward does not read: workspaces of recurrent layers, as
    bytes; on devices the padded sums of attention, which take no gradient; and without dropout the seed and the offset
    of attention's random numbers, at most two integers.
    """
    integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if tensor.dtype is torch.uint8 or (integers and tensor.numel() <= _SEEDS):
        return False
    return tensor.requires_grad or tensor.device.type == "cpu" or not tensor.is_floating_point()


def _was_written(node: Any, tensor: torch.Tensor) -> bool:
    """Whether a saved tensor had its values when the node that unpacks it saved it."""
    # It is saved before it is written, if it is written at all; with another noise other saved tensors differ, too.
    noise = node is not None and node.name() == "RreluWithNoiseBackward0" and not tensor.requires_grad
    return not noise


def _differs(block: str, size: tuple[int, ...]) -> RestoreError:
    return RestoreError(
        f"block {block!r} was checkpointed, and its second forward computed another {list(size)} tensor than the first",
        expected="a forward that computes the same values twice",
        hint="does it draw from a random generator, or change an object, that ebbtide cannot reach? pass "
        "policy='offload', which checkpoints nothing",
    )


def _set_flags(flags: list[tuple[torch.Tensor, bool]]) -> None:
    for tensor, requires_grad in flags:
        if tensor.requires_grad is not requires_grad and tensor.is_leaf:
            tensor.requires_grad_(requires_grad)


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def _attention_kernels() -> tuple[tuple[bool, ...], list[int]]:
    """Return which kernels attention may use, and in which order it tries them."""
    cuda: Any = torch.backends.cuda
    return tuple(getattr(cuda, f"{kernel}_sdp_enabled")() for kernel in _SDPA), torch._C._get_sdp_priority_order()


def _set_attention_kernels(kernels: tuple[tuple[bool, ...], list[int]]) -> None:
    cuda: Any = torch.backends.cuda
    allowed, order = kernels
    if torch._C._get_sdp_priority_order() != order:
        torch._C._set_sdp_priority_order(order)
    for kernel, on in zip(_SDPA, allowed, strict=True):
        if getattr(cuda, f"{kernel}_sdp_enabled")() != on:
            getattr(cuda, f"enable_{kernel}_sdp")(on)
