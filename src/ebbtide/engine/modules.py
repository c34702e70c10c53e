"""Facts about the running module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn


class Running(NamedTuple):
    """A module of a block that is running.

    Attributes:
        name: Its path in the block.
        module: The module.
        casts_to: The dtype that autocast casts its weights to; None without autocast. Unknown inside an operator.
        since: Number of the first autograd node that this thread makes while the module runs.
        bias: Its bias as it began to run.
    """

    name: str
    module: nn.Module
    casts_to: torch.dtype | None
    since: int
    bias: torch.Tensor | None

    @staticmethod
    def here(name: str, module: nn.Module, device_type: str) -> Running:
        """Return a module that begins to run now."""
        on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        since = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        dtype = torch.get_autocast_dtype(device_type) if on else None
        return Running(name, module, dtype, since, module._parameters.get("bias"))


_LEADS = {
    "super", "forward", "to", "float", "type_as", "type", "dtype", "contiguous", "permute", "transpose", "reshape",
    "view", "shape", "size", "flatten", "unflatten", "data_format", "torch", "float32",
}  # fmt: skip
"""Names that the forward of a subclass may use and still only lead to torch's own."""

_READ = {"diffusers.models.normalization.FP32LayerNorm"}
"""Classes with a forward of their own that was read: it hands on the attributes as torch's does."""


class Record(NamedTuple):
    """The attributes of a layer when it ran: they may change before its output is saved.

    Attributes:
        kind: Its class.
        eps: Of a norm.
        bias: Its bias.
    """

    kind: type[nn.Module]
    eps: float | None
    bias: torch.Tensor | None


def record_of(running: Running) -> Record | None:
    """Return the record of a layer that has just run; None if its attributes may not be those of its computation."""
    module, bias = running.module, running.bias
    if not computes_as_configured(module):
        return None
    if getattr(module, "bias", None) is not bias:  # computed (a parametrisation), or another one than when it began
        return None
    return Record(type(module), getattr(module, "eps", None), bias)


def computes_as_configured(module: nn.Module | None) -> bool:
    """Whether a layer computes what its attributes say: its forward is torch's own, or only leads to that.

    A subclass may pass constants or weights that differ from its attributes; a tensor recomputed from these could be
    right in one step and wrong in another.
    """
    return module is not None and "forward" not in vars(module) and _class_computes_as_configured(type(module))


@functools.lru_cache(maxsize=1024)
def _class_computes_as_configured(kind: type[nn.Module]) -> bool:
    if f"{kind.__module__}.{kind.__qualname__}" in _READ:
        return True
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.modules."):
            return base is not nn.Module
        forward = vars(base).get("forward")
        if "_conv_forward" in vars(base):  # what torch's convolutions call with their weight and bias
            return False
        if forward is None:
            continue
        code = getattr(forward, "__code__", None)
        if not isinstance(code, CodeType) or "super" not in code.co_names or not set(code.co_names) <= _LEADS:
            return False
    return False


class InPlace(NamedTuple):
    """What a layer computed in place.

    Attributes:
        kind: The layer's class.
        fn: The same, in another tensor; None: its autograd node has to tell.
    """

    kind: type[nn.Module]
    fn: Callable[[torch.Tensor], torch.Tensor] | None


def in_place(module: nn.Module) -> InPlace | None:
    """Return what a layer computes in place; None for any other layer, and for one that may compute something else."""
    if getattr(module, "inplace", False) is not True or not computes_as_configured(module):
        return None
    kind, fn = type(module), None
    if kind.__module__ == "torch.nn.modules.activation" and kind is not nn.RReLU:  # which draws random numbers
        settings = SimpleNamespace(**{k: v for k, v in vars(module).items() if not k.startswith("_")})
        settings.inplace = False
        fn = functools.partial(kind.forward, settings)  # type: ignore[arg-type]
    return InPlace(kind, fn)
