"""Models on meta, and their weights read straight into place: ``--memory_efficient_init``.

[Note: stand-ins]
Adapters are added to a model before it is sharded, and PEFT puts an adapter on the device of its weight: on meta it
would have no values. So while PEFT works, each weight on meta is replaced by one element of host memory expanded to the
weight's shape. Adapters are then the same as on the loaded model, with the same random numbers. Reading a weight's
values, as the initialisation of some adapters does, raises: they do not exist yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide import load_sharded
from ebbtide.base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer

    from ebbtide.integrations.pretrained import Found

_COPIES = ("clone", "_to_copy")
_OF_SHAPES = ("empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones")


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Generator[None]:
    """Replace weights on meta by host memory while the context is open; see [Note: stand-ins].

    Args:
        model: May be on meta, or not.

    Raises:
        ConfigError: Something inside the context reads the weights.
    """
    if not any(weight.is_meta for weight in model.parameters()):
        yield
        return
    guard = _StandIns()
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                module._parameters[name] = guard.of(weight)
    try:
        with guard:
            yield
    finally:
        # Modules added meanwhile also hold stand-ins: copies of weights that are trained with the adapters.
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None and guard.knows(weight):
                    module._parameters[name] = guard.back(weight)


class _StandIns(TorchDispatchMode):
    """The replacements of weights, with a check of their use."""

    def __init__(self) -> None:
        super().__init__()
        self._by_weight: dict[int, nn.Parameter] = {}
        self._weights: dict[int, nn.Parameter] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the replacement of a weight; tied weights share one."""
        if id(weight) not in self._by_weight:
            made = nn.Parameter(self._element(weight.shape, weight.dtype), requires_grad=weight.requires_grad)
            made.__dict__.update(weight.__dict__)
            self._by_weight[id(weight)], self._weights[id(made)] = made, weight
        return self._by_weight[id(weight)]

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a stand-in, or a view of one."""
        return not tensor.is_meta and tensor.untyped_storage()._cdata in self._storages

    def back(self, made: nn.Parameter) -> nn.Parameter:
        """Return a stand-in's weight on meta."""
        if id(made) not in self._weights:  # a copy that was made meanwhile
            weight = nn.Parameter(torch.empty(made.shape, dtype=made.dtype, device="meta"))
            weight.__dict__.update(made.__dict__)
            self._weights[id(made)] = weight
            self._by_weight[id(weight)] = made  # kept: its identity is the key
        weight = self._weights[id(made)]
        if weight.dtype != made.dtype:
            weight.data = weight.data.to(made.dtype)
        return weight.requires_grad_(made.requires_grad)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; a copy of a stand-in is a stand-in, and reading one raises."""
        kwargs = kwargs or {}
        read = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and self.knows(a)]
        if not read:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in _COPIES:
            return self._element(read[0].shape, kwargs.get("dtype") or read[0].dtype)
        views = all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and name not in _OF_SHAPES:
            raise ConfigError(
                f"these adapters are initialized from the model's weights ({name})",
                expected="adapters with their own initial values, such as lora's, with memory_efficient_init",
                hint="leave --memory_efficient_init out",
            )
        return func(*args, **kwargs)

    def _element(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        element = torch.zeros((), dtype=dtype)
        self._storages[element.untyped_storage()._cdata] = element
        return element.expand(shape)


def fill(model: nn.Module, weights: Found) -> nn.Module:
    """Read the whole model's weights onto this process's device.

    Args:
        model: On meta, with or without adapters.
        weights: Where its weights are.

    Raises:
        DataError: They cannot be read, or do not fit.
    """
    return load_sharded(model, weights, unexpected="ignore", allow_pickle=True)


def fill_sharded(trainer: Trainer, weights: Found) -> None:
    """Shard a trainer's model on meta as accelerate does, and read this rank's part of the weights.

    Args:
        trainer: With FSDP's settings, and a model on meta.
        weights: Where its weights are.

    Raises:
        DataError: They cannot be read, or do not fit.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from peft import PeftModel
    from transformers.integrations.fsdp import update_fsdp_plugin_peft

    from ebbtide.integrations.accelerate import on_meta

    accelerator: Any = trainer.accelerator

    def shard(model: nn.Module) -> nn.Module:
        with on_meta(accelerator):
            if accelerator.is_fsdp2:
                return fsdp2_prepare_model(accelerator, model)
            if isinstance(model, PeftModel):
                update_fsdp_plugin_peft(model, accelerator)
            return accelerator.prepare_model(model)

    filled = load_sharded(trainer.model, weights, shard=shard, unexpected="ignore", allow_pickle=True)
    trainer.model = trainer.model_wrapped = filled  # pyright: ignore[reportAttributeAccessIssue]
