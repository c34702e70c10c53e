"""Checkpointed blocks: their forward is repeated in backward, in the context of the first.

[Note: a second forward] Gradients are right only if it computes the same values as the first. So what it depends on is
restored: autocast, the default device, modes that replace functions, the states of torch's, Python's and numpy's random
generators, everything that the block's modules can reach (see [Note: state]: the parameters and adapters of that time,
counters, memories), ``requires_grad``, context variables that are plain values (others may hold the graph, which would
hold them), the numerics and the chosen attention kernels. Weights, buffers and other tensors of the modules are checked
for changes: see [Note: watched weights].

Afterwards all is as it was before, also what the end of the block would have set back: a second forward is cut off
after its last saved tensor. What it changes outside of its modules is not restored: see [Note: cut off].
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.engine.guard import changed_error
from ebbtide.engine.numerics import NumericsChange, current_numerics
from ebbtide.engine.run import BlockRun
from ebbtide.wrap.called import Called, is_refused
from ebbtide.wrap.checkpointable import Checkpointable, Unfinished, Varies
from ebbtide.wrap.checkpointedcall import CheckpointedCall
from ebbtide.wrap.generators import Restorable, generators, restore, states
from ebbtide.wrap.roles import VALUES
from ebbtide.wrap.state import State


def _read_inductor() -> bool | None:
    return getattr(sys.modules.get("torch._inductor.config"), "deterministic", None)


def _write_inductor(deterministic: bool | None) -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if deterministic is not None:
        config.deterministic = deterministic


_SETTINGS = [
    *(
        Restorable(
            getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"), operator.eq
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
    Restorable(torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, operator.eq),
    Restorable(
        torch._C._get_math_sdp_allow_fp16_bf16_reduction,
        torch._C._set_math_sdp_allow_fp16_bf16_reduction,
        operator.eq,
    ),
    Restorable(_read_inductor, _write_inductor, operator.eq),
]
"""Which kernels attention may use, in what order and type; what ``torch.use_deterministic_algorithms`` sets besides."""

REQUIRES_GRAD, _DEVICE, _TYPE = map(operator.attrgetter, ("requires_grad", "device", "type"))
_HOST = ("cpu", "meta")

_default_device: Callable[[], DeviceContext | None] = functools.partial(
    getattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", None
)
"""Return what ``torch.set_default_device`` has set in this thread."""


class ForwardContext:
    """The context of a checkpointed block's forward, which its second forward gets again.

    Args:
        module: The block.
        run: Its run, by which its inputs are saved, and perhaps offloaded.
        inputs: Its input tensors.
        state: Contents of its modules now, if known.
        checkpointable: Learns of a second forward that differs, or is cut off.
    """

    def __init__(
        self,
        module: nn.Module,
        run: BlockRun,
        inputs: Sequence[torch.Tensor],
        state: State | None,
        checkpointable: Checkpointable,
    ) -> None:
        self._run, self._varies = run, checkpointable.varies(run.block, module)
        self._ending = functools.partial(checkpointable.ending, run.block, module, state)
        self._state = state or State(module.modules())
        engine, moved = run.engine, run.engine.weights.move
        self._leaves = [t for t in self._state.tensors if type(t) is nn.Parameter or (not is_refused(t) and t.is_leaf)]
        self._flags = list(map(REQUIRES_GRAD, self._leaves))
        self._own = [] if moved else self._state.versioned()
        self._watched = engine.guard.watch_all(self._own, run.compared)
        self._moved = moved
        # Also of its weights: a block may move its inputs, or be called with none.
        devices = [x for x in {*map(_DEVICE, inputs), *map(_DEVICE, self._state.tensors)} if x.type not in _HOST]
        self._kinds = list(filter(torch._C._is_autocast_available, {"cpu", run.device_type, *map(_TYPE, devices)}))
        self._restorables, self._casts = [*_SETTINGS, *generators(devices)], _casts(self._kinds)
        self._values = states(self._restorables)
        self._numerics, self._modes, self._variables = current_numerics(), _function_modes(), _variables()

    def call(self, called: Called, saved_bytes: int) -> Any:
        """Run the block under a checkpoint.

        Args:
            called: Its call.
            saved_bytes: Bytes that such a block saves without a checkpoint.
        """
        second = CheckpointedCall(self._run, called, self._back, self._varies)
        try:
            with saved_tensors_hooks(second.pack, second.unpack):
                return called.run()
        finally:
            self._run.add_checkpointed(saved_bytes)

    def _back(self, region_over: bool, cut_off: bool, forward: Callable[[Unfinished | None], object]) -> None:
        """Restore the context for the second forward, and the current one afterwards.

        Args:
            region_over: The region of autocast around the first forward is closed.
            cut_off: The second forward ends with its last saved tensor.
            forward: Runs the second forward.

        Raises:
            ModifiedInPlaceError: A tensor of the modules has changed since.
        """
        instead = self._check_tensors()
        now, flags = self._state.now(), list(map(REQUIRES_GRAD, self._leaves))
        casts, default = _casts(self._kinds), _default_device()
        values, numerics = states(self._restorables), NumericsChange()
        try:
            if instead or now is not self._state:  # else it is known to be as it was
                self._state.restore(instead, tensors=not self._moved)
            self._set_flags(self._flags, flags)
            restore(self._restorables, self._values, values)
            numerics.apply(self._numerics)
            with ExitStack() as modes:
                if known := self._run.engine.guard.renewed:  # backward compares versions of those that the block saves
                    modes.enter_context(_unsafe_preserve_version_counter(tuple(t for t in self._own if t in known)))
                if self._casts != casts:
                    for device_type, enabled, dtype in zip(self._kinds, *self._casts[:2], strict=True):
                        modes.enter_context(torch.autocast(device_type, dtype, enabled, self._casts[2]))
                open_now = _function_modes() if self._modes else ()
                for mode in self._modes:
                    if isinstance(mode, DeviceContext):
                        modes.enter_context(DeviceContext(mode.device))  # one that is entered twice stays
                    elif mode not in open_now:
                        _push_mode(mode)
                        modes.callback(_pop_mode)
                if region_over and any(casts[0]):
                    # Another region, around the backward, would keep casts for the forward after the weights' update.
                    torch.set_autocast_cache_enabled(False)
                unfinished = self._ending() if cut_off else None
                _with_variables(self._variables, forward, unfinished)
                if unfinished is not None:
                    unfinished(True)
        finally:
            torch.set_autocast_cache_enabled(casts[2])
            if _casts(self._kinds) != casts:
                _set_casts(self._kinds, casts)
            now.restore(tensors=not self._moved)
            self._set_flags(flags, list(map(REQUIRES_GRAD, self._leaves)))
            restore(self._restorables, values, states(self._restorables))
            numerics.restore()
            if _default_device() is not default:
                torch.set_default_device(default and default.device)

    def _check_tensors(self) -> dict[int, torch.Tensor]:
        """Return id → replacement of tensors whose memory changed since: an optimizer's copy, the old ``p.data``."""
        instead: dict[int, torch.Tensor] = {}
        for tensor, watched in zip(self._own, self._watched, strict=True):
            if watched.as_it_was(tensor):
                continue
            if (same := watched.same) is not True:
                failed = functools.partial(_changed, tensor.shape, self._run.block.name, self._varies)
                self._run.engine.trust.require(same, failed)
            if watched.replaces(tensor):
                requires = tensor.requires_grad
                copy = watched.tensor
                instead[id(tensor)] = nn.Parameter(copy, requires) if isinstance(tensor, nn.Parameter) else copy
        return instead

    def _set_flags(self, flags: list[bool], now: list[bool]) -> None:
        if flags == now:
            return
        for tensor, requires_grad in zip(self._leaves, flags, strict=True):
            if tensor.requires_grad is not requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)


def _changed(shape: torch.Size, block: str, varies: Varies) -> ModifiedInPlaceError:
    if varies is not None:
        varies("had a weight, buffer or attribute changed since their forward began")
    return changed_error("weight, buffer or attribute", shape, f"runs block {block!r} again")


_Casts = tuple[list[bool], list[torch.dtype], bool]
"""Of each type of device whether autocast is on, and its type; whether it keeps what it casts."""


def _casts(kinds: Sequence[str]) -> _Casts:
    enabled, dtypes = list(map(torch.is_autocast_enabled, kinds)), list(map(torch.get_autocast_dtype, kinds))
    return enabled, dtypes, torch.is_autocast_cache_enabled()


def _set_casts(kinds: Sequence[str], casts: _Casts) -> None:
    for kind, enabled, dtype in zip(kinds, *casts[:2], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


_OTHER = object()
"""Stands for a value that is not held."""


def _variables() -> list[tuple[ContextVar[Any], Any]]:
    """Return the context variables that are set, and their plain values."""
    return [(variable, x if type(x) in VALUES else _OTHER) for variable, x in copy_context().items()]


def _with_variables(variables: list[tuple[ContextVar[Any], Any]], work: Callable[..., object], *args: Any) -> None:
    """Call ``work`` with these context variables; those with other values than plain ones are as they are now."""
    context, now = Context(), copy_context()
    for variable, value in variables:
        if value is not _OTHER or variable in now:
            context.run(variable.set, now[variable] if value is _OTHER else value)
    context.run(work, *args)


def _function_modes() -> Sequence[TorchFunctionMode]:
    """Return the modes that replace functions or set the default device, outermost first."""
    return _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
