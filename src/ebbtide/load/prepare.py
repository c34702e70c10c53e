"""Checks of a model before weights are loaded into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide.base.errors import ConfigError
from ebbtide.load.attributes import on_meta, rename
from ebbtide.load.fourbit import is_four_bit
from ebbtide.load.targets import owners_of


def is_loaded(model: object) -> bool:
    """Whether a model has all its parameters, whole and in their own dtype: their values can be its weights."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return bool(parameters) and all(
        type(p) is nn.Parameter and not (p.is_meta or hasattr(p, "_fsdp_flattened") or hasattr(p, "ds_id"))
        for p in parameters
    )


def empty(model: nn.Module) -> Callable[[], None]:
    """Put a loaded model's parameters on meta, to be filled again; buffers stay. What is tied stays tied.

    Returns:
        Puts them back, unless the model has been wrapped or sharded in the meantime.
    """
    before = [(owner, owner.tensor) for owner in owners_of(model).values() if not owner.is_buffer]
    emptied: dict[int, nn.Parameter] = {}
    for owner, tensor in before:
        if id(tensor) not in emptied:
            emptied[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            vars(emptied[id(tensor)]).update(vars(tensor))
        owner.slots[owner.name] = emptied[id(tensor)]
    rename(model, emptied)

    def restore() -> None:
        if all(owner.slots.get(owner.name) is emptied[id(tensor)] for owner, tensor in before):
            for owner, tensor in before:
                owner.slots[owner.name] = tensor
            rename(model, {id(emptied[id(tensor)]): tensor for _, tensor in before})

    return restore


def check_model(model: object, *, loaded: bool = False) -> None:
    """Refuse what cannot be loaded into; ``loaded``: the model's own values are the weights.

    Raises:
        ConfigError: It is no module, its parameters have values already, or are quantised, or have hooks, or it has
            trained prompts or replicated layers.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}", expected="a torch.nn.Module on meta", hint="pass the model itself"
        )
    parameters = list(model.named_parameters())
    check_tensors([*parameters, *model.named_buffers()])
    for name, parameter in parameters:
        kind = type(parameter).__name__
        if kind == "Int8Params" or (hasattr(parameter, "quant_state") and not is_four_bit(parameter)):
            raise ConfigError(
                f"{name!r} is quantised ({kind})",
                expected="parameters in their own dtype, or in 4 bits",
                hint="quantise the base to 4 bits, or load it with its own library, then shard it",
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name!r} has a hook for its gradient",
                expected="parameters without hooks, because loading replaces parameters",
                hint="register the hook on the model that load_sharded returns",
            )
    if parameters and not loaded and not any(parameter.is_meta for _, parameter in parameters):
        raise ConfigError(
            "the model already has its parameters",
            expected="a model on meta, or a loaded one that is neither sharded nor quantised, without weights",
            hint="build it under 'with torch.device(\"meta\"):' from its configuration; to shard a loaded model, leave "
            "the weights out",
        )
    adapters: Mapping[str, Any] = getattr(model, "peft_config", {})
    if not loaded and any(getattr(config, "is_prompt_learning", False) for config in adapters.values()):
        raise ConfigError(
            "the model has trained prompts of PEFT, on meta",
            expected="adapters in its modules, such as those of LoRA",
            hint="load the model itself, then add the prompts with get_peft_model",
        )
    if not loaded and any(getattr(config, "layer_replication", None) for config in adapters.values()):
        raise ConfigError(
            "the model has layer_replication of PEFT, on meta",
            expected="the layers of the checkpoint, once and in its order",
            hint="load the model itself, then replicate its layers with get_peft_model",
        )
    if any(type(m).__name__ == "DistributedDataParallel" for m in model.modules()):
        raise ConfigError(
            "the model is wrapped in DDP, on meta",
            expected="the model itself",
            hint="load it first, then wrap it: DDP needs materialized parameters",
        )


def check_attributes(model: nn.Module) -> None:
    """Refuse a tensor on meta that is a plain attribute: nothing can give it values, and a forward would fail.

    Those in lists, dicts, tuples and sets are often scratch memory, and are named after sharding.

    Raises:
        ConfigError: There is one.
    """
    for name, held in on_meta(model).items():
        if not held:
            raise ConfigError(
                f"{name!r} is on meta, and neither a parameter nor a buffer",
                expected="tensors that a checkpoint or an initializer gives their values",
                hint="build the model under accelerate.init_empty_weights(), which keeps such tensors off meta, or "
                "register it as a buffer",
            )


def check_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors that are made of others, such as quantised ones of torchao: they have no bytes of their own.

    Raises:
        ConfigError: One of these tensors, or of these shards, is such a tensor.
    """
    for name, tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if is_traceable_wrapper_subclass(local):
            raise ConfigError(
                f"{name!r} is a {type(local).__name__}, which is made of other tensors",
                expected="plain tensors",
                hint="convert the model after it is loaded, and save it before, or save it with its own library",
            )


def set_dtype(model: nn.Module, dtype: torch.dtype | None) -> Callable[[], None]:
    """Give a model's floating-point parameters on meta another dtype; what its library keeps in float32 is float32.

    Other buffers keep theirs: frequencies and running statistics are computed in the dtype they have.

    Args:
        model: On meta.
        dtype: The dtype; ``None``: parameters keep theirs.

    Returns:
        Gives them their dtypes again, where they are still on meta.

    Raises:
        ConfigError: It is no floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ConfigError(
            f"dtype is {dtype!r:.80}",
            expected="torch.bfloat16, torch.float16, torch.float32 or torch.float64",
            hint="leave it out to keep the model's dtype",
        )
    patterns, before = _kept(model, dtype), list[tuple[torch.Tensor, torch.Tensor]]()
    for name, owner in owners_of(model).items():
        tensor = owner.tensor
        if not (tensor.is_meta and tensor.is_floating_point() and tensor.dtype.itemsize > 1) or is_four_bit(tensor):
            continue
        kept = next((as_dtype for pattern, as_dtype in patterns if pattern.search(name)), None)
        wanted = kept or (None if owner.is_buffer else dtype)
        if wanted is not None and wanted != tensor.dtype:
            before.append((tensor, tensor.data))
            tensor.data = tensor.data.to(wanted)

    def restore() -> None:
        for tensor, data in reversed(before):
            if tensor.is_meta:
                tensor.data = data

    return restore


def _kept(model: Any, dtype: torch.dtype | None) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Return patterns of names whose dtype the model's library fixes."""
    host = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(host, "_get_dtype_plan"):
        dtype = dtype or next((p.dtype for p in host.parameters() if p.is_floating_point()), torch.float32)
        plan: dict[str, torch.dtype] = host._get_dtype_plan(dtype)
        return [(re.compile(glob.replace("*", ".*")), as_dtype) for glob, as_dtype in plan.items()]
    named: list[str] = list(getattr(host, "_keep_in_fp32_modules", None) or [])  # diffusers names parts of paths
    return [(re.compile(rf"(^|\.){re.escape(part)}(\.|$)"), torch.float32) for part in named if dtype is not None]
