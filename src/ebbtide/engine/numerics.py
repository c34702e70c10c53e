"""Numerics: the global settings of torch that decide, beside its operands, what a kernel computes.

[Note: numerics]
Torch has two interfaces for the precision of float32 kernels. The getters of the older one
(``torch.get_float32_matmul_precision``, ``torch.backends.cudnn.allow_tf32``) raise once a program has used the current
one (``torch.backends.*.fp32_precision``, torch 2.9), and kernels read the current one. So only the current one is read
and written here; a write of the older one shows in it. It is a tree: generic, backend, operation. An operation that is
set to ``"none"`` inherits from its backend, which inherits from generic, and the getters return the inherited value.
To put a tree back exactly, ``_own_precisions`` finds out which nodes inherit. Checked with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Numerics = tuple[Any, ...]
"""Values of all settings, in the order of ``_settings``."""

_BACKENDS = ("cuda", "mkldnn")
_OPERATIONS = ("matmul", "conv", "rnn")
_TREE = (("generic", "all"), *((b, o) for b in _BACKENDS for o in ("all", *_OPERATIONS)))
"""Parents before their children: a tree is written in this order."""

_FLAGS = (
    "mkldnn_enabled", "mkldnn_deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic",
    "cudnn_depthwise_kernel", "miopen_immediate", "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation", "blas_preferred_backend",
    "sm_carveout_experimental",
)  # fmt: skip
"""Names after ``torch._C._get_`` and ``torch._C._set_``; one that this version of torch lacks is left out."""


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]


def current_numerics() -> Numerics:
    """Return the numerics that are in force."""
    return tuple([read() for read in _readers()])


def exactly(device_type: str, numerics: Numerics | None, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run operators as they ran in forward: no graph, no autocast (its casts are steps of the recipe), its numerics.

    All is set by hand: what torch's context managers switched, an interrupt could leave switched.
    """
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    change = NumericsChange()
    try:
        torch._C._set_grad_enabled(False)
        if autocast:
            torch.set_autocast_enabled(device_type, False)
        if numerics is not None:
            change.apply(numerics)
        return work()
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
    """Puts other numerics in force and, afterwards, those that it found, exactly. See [Note: numerics]."""

    def __init__(self) -> None:
        self._found: Numerics | None = None

    def apply(self, numerics: Numerics) -> None:
        """Put ``numerics`` in force. Costs one read of the numerics where they are in force already."""
        now = current_numerics()
        if now != numerics:
            size = len(_TREE)
            self._found = now if now[:size] == numerics[:size] else _own_precisions(now) + now[size:]
            _write(self._found, numerics)

    def undo(self) -> None:
        """Put back what ``apply`` found. Harmless when repeated."""
        if self._found is not None:
            _write(current_numerics(), self._found)
            self._found = None


def _write(before: Numerics, after: Numerics) -> None:
    size = len(_TREE)
    whole = before[:size] != after[:size]  # a parent changes what its children inherit
    for i, (setting, old, new) in enumerate(zip(_settings(), before, after, strict=True)):
        if old != new or (whole and i < size):
            setting.write(new)


def _own_precisions(found: Numerics) -> Numerics:
    """Return what each node of the tree is set to itself: ``"none"`` where it inherits ``found``.

    A node inherits if it follows when the node above it is set to two values, one after the other. A node that is set
    to ``"none"`` and inherits ``"none"`` reads the same either way.
    """
    generic, *rest = (setting for setting in _settings()[: len(_TREE)])
    follows = _followers(generic, found[0], rest)
    own = [found[0], *("none" if f else value for f, value in zip(follows, found[1 : len(_TREE)], strict=True))]
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
        for name in _FLAGS
        if hasattr(own, f"_get_{name}") and hasattr(own, f"_set_{name}")
    ]
    return (
        *tree,
        *flags,
        _Setting(_deterministic, _set_deterministic),
        _Setting(torch.get_num_threads, torch.set_num_threads),
        _Setting(torch.get_default_dtype, torch._C._set_default_dtype),
    )


def _set(setter: Callable[..., object], value: Any) -> None:
    """Call a setter; one whose getter returns a tuple takes its values one by one."""
    setter(*value) if isinstance(value, tuple) else setter(value)


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    # torch.use_deterministic_algorithms also changes Inductor's configuration, which no kernel of a recipe reads.
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])
