"""Numerics: torch's global settings that influence the results of kernels.

[Note: numerics]
Torch has two interfaces for the precision of float32 kernels. The getters of the older one
(``torch.get_float32_matmul_precision``, ``torch.backends.cudnn.allow_tf32``) raise once a program has used the current
one (``torch.backends.*.fp32_precision``, torch 2.9), and kernels read the current one. So only the current one is read
and written here; a write of the older one shows in it. It is a tree: generic, backend, operation. An operation that is
set to ``"none"`` inherits from its backend, which inherits from generic, and the getters return the inherited value.
To restore a tree exactly, ``_own_precisions`` finds which nodes inherit. A node that nobody has written may have
a value of its own that yields to the nodes above it (cuDNN's ``"tf32"``) and that no write brings back, so only nodes
that must change are written. Torch 2.8 has the older interface only, whose settings are then read and written.
The older interface also remembers what it last wrote, and its getters compare that with the tree. So where a program
may have used it, as in ``NumericsChange.restore``, both are written.
Checked with torch 2.8 to 2.13.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ebbtide.engine.modes import modes_open, outside_modes

Numerics = tuple[Any, ...]
"""Values of all settings, in the order of ``_settings``."""

_BACKENDS = ("cuda", "mkldnn")
_OPERATIONS = ("matmul", "conv", "rnn")
_TREE = (
    (("generic", "all"), *((b, o) for b in _BACKENDS for o in ("all", *_OPERATIONS)))
    if hasattr(torch._C, "_get_fp32_precision_getter")  # since torch 2.9
    else ()
)
"""Parents before their children: a tree is written in this order."""

_OLDER = () if _TREE else ("float32_matmul_precision", "cudnn_allow_tf32")
"""Settings of the older interface, where there is no other; named like ``_FLAGS``."""

_FLAGS = (
    "mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "cudnn_enabled", "cudnn_benchmark",
    "cudnn_deterministic", "cudnn_depthwise_kernel", "miopen_immediate", "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "blas_preferred_backend", "sm_carveout_experimental",
)  # fmt: skip
"""Names after ``torch._C._get_`` and ``torch._C._set_``; one that this version of torch lacks is left out."""


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]


def current_numerics() -> Numerics:
    """Return the numerics that are in force."""
    return _one_of_equals(tuple(map(operator.call, _readers())))


def exactly(device_type: str, numerics: Numerics | None, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run operators as they ran in forward: no graph, no autocast (its casts are steps of the recipe), its numerics.

    They run outside of dispatch modes: see [Note: modes]. All is set by hand: what torch's context managers switched,
    an interrupt could leave switched.
    """
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    change = NumericsChange()
    try:
        torch._C._set_grad_enabled(False)
        if autocast:
            torch.set_autocast_enabled(device_type, False)
        if numerics is not None:
            change.apply(numerics)
        return outside_modes(work) if modes_open() else work()
    finally:
        try:
            torch._C._set_grad_enabled(grad)
        finally:
            if autocast:
                torch.set_autocast_enabled(device_type, True)
            try:
                change.undo()
            finally:
                change.undo()  # an interrupt may have struck while it ran


class NumericsChange:
    """Applies other numerics, and restores the previous ones exactly. See [Note: numerics]."""

    def __init__(self) -> None:
        self._before: Numerics = ()
        self._found: Numerics = ()
        self._written: list[int] = []  # parents first

    def apply(self, numerics: Numerics) -> None:
        """Apply ``numerics``. Costs one read of the settings if they are already in force."""
        self._before = now = current_numerics()
        if now == numerics:
            return
        size = len(_TREE)
        self._found = now if now[:size] == numerics[:size] else _own_precisions(now) + now[size:]
        for i, (setting, value) in enumerate(zip(_settings(), numerics, strict=True)):
            if setting.read() != value:  # what follows a node above it has changed with that
                self._written.append(i)
                setting.write(value)

    def undo(self) -> None:
        """Restore the settings before ``apply``. May be called repeatedly."""
        for i in self._written:
            _settings()[i].write(self._found[i])
        self._written = []

    def restore(self) -> None:
        """Undo it, and what other code has changed since ``apply``, by either interface, and not set back."""
        self.undo()
        now = current_numerics()
        if self._before and self._before != now:
            _write_older(self._before, now)
            NumericsChange().apply(self._before)


def _write_older(numerics: Numerics, now: Numerics) -> None:
    """Let the older interface show the same as ``numerics``, where it may have changed the tree."""
    values = dict(zip(_TREE, numerics, strict=False))
    changed = {node for node, one, other in zip(_TREE, numerics, now, strict=False) if one != other}
    if changed & {("cuda", "matmul"), ("mkldnn", "matmul")}:
        medium, high = values["mkldnn", "matmul"] == "bf16", values["cuda", "matmul"] == "tf32"
        torch._C._set_float32_matmul_precision("medium" if medium else "high" if high else "highest")
    if changed & (cudnn := {("cuda", "conv"), ("cuda", "rnn")}):
        torch._C._set_cudnn_allow_tf32(all(values[node] == "tf32" for node in cudnn))


def _own_precisions(found: Numerics) -> Numerics:
    """Return what each node of the tree is set to itself: ``"none"`` where it inherits ``found``.

    A node inherits if it follows when the node above it is set to two values, one after the other, and reads as that
    does now. A node that is set to ``"none"`` and inherits ``"none"`` reads the same either way.
    """
    generic, *rest = (setting for setting in _settings()[: len(_TREE)])
    follows = _followers(generic, found[0], rest)
    values = found[1 : len(_TREE)]
    own = [found[0], *("none" if f and v == found[0] else v for f, v in zip(follows, values, strict=True))]
    width = 1 + len(_OPERATIONS)
    for at in range(1, len(_TREE), width):
        if own[at] != "none":
            operations = _settings()[at + 1 : at + width]
            for i, follow in enumerate(_followers(_settings()[at], own[at], operations), at + 1):
                own[i] = "none" if follow else own[i]
    return tuple(own)


def _followers(parent: _Setting, value: Any, nodes: Sequence[_Setting]) -> list[bool]:
    """Return which nodes change with ``parent``, which is ``value`` before and after."""
    try:
        parent.write("ieee")
        one = [node.read() for node in nodes]
        parent.write("tf32")
        return [node.read() != first for node, first in zip(nodes, one, strict=True)]
    finally:
        parent.write(value)


_one_of_equals: Callable[[Numerics], Numerics] = functools.lru_cache(64)(tuple)
"""Returns the same object for equal values: each entry that may be recomputed holds one from forward to backward."""


@functools.cache
def _readers() -> tuple[Callable[[], Any], ...]:
    return tuple(setting.read for setting in _settings())


@functools.cache
def _settings() -> tuple[_Setting, ...]:
    """Return the tree of precisions, and what else there is in this version of torch."""
    own: Any = torch._C
    tree = [
        _Setting(
            functools.partial(own._get_fp32_precision_getter, *node),
            functools.partial(own._set_fp32_precision_setter, *node),
        )
        for node in _TREE
    ]
    flags = [
        _Setting(getattr(own, f"_get_{name}"), functools.partial(_set, getattr(own, f"_set_{name}")))
        for name in (*_OLDER, *_FLAGS)
        if hasattr(own, f"_get_{name}") and hasattr(own, f"_set_{name}")
    ]
    return (
        *tree,
        *flags,
        _Setting(own._get_deterministic_algorithms, _set_deterministic),
        _Setting(own._get_deterministic_algorithms_warn_only, _set_warn_only),
        _Setting(torch.get_num_threads, torch.set_num_threads),
        # Torch has no getter of this one: a denormal number is true unless the processor takes it for zero.
        _Setting(functools.partial(operator.truth, 5e-324), lambda kept: torch.set_flush_denormal(not kept)),
        _Setting(torch.get_default_dtype, torch._C._set_default_dtype),
    )


def _set(setter: Callable[..., object], value: Any) -> None:
    """Call a setter; one whose getter returns a tuple takes its values one by one."""
    setter(*value) if isinstance(value, tuple) else setter(value)


def _set_deterministic(value: bool) -> None:
    # torch.use_deterministic_algorithms also changes Inductor's configuration, which no kernel of a recipe reads.
    torch._C._set_deterministic_algorithms(value, warn_only=torch._C._get_deterministic_algorithms_warn_only())


def _set_warn_only(value: bool) -> None:
    torch._C._set_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=value)
