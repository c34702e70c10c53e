"""What a model must be before weights are loaded into it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConfigError


def check_model(model: object) -> None:
    """Refuse what cannot be loaded into.

    Raises:
        ConfigError: It is no module, its parameters are there already, or they are quantised.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}", expected="a torch.nn.Module on meta", hint="pass the model itself"
        )
    parameters = list(model.named_parameters())
    for name, parameter in parameters:
        kind = type(parameter).__name__
        if kind in ("Params4bit", "Int8Params") or hasattr(parameter, "quant_state"):
            raise ConfigError(
                f"{name!r} is quantised ({kind})",
                expected="parameters in their own dtype",
                hint="a quantised base is built tensor by tensor from whole weights: load it with its own library, "
                "then shard it",
            )
    if parameters and not any(parameter.is_meta for _, parameter in parameters):
        raise ConfigError(
            "the model has its parameters already",
            expected="a model on meta",
            hint="build it under 'with torch.device(\"meta\"):' from its configuration",
        )
    if any(type(m).__name__ == "DistributedDataParallel" for m in model.modules()):
        raise ConfigError(
            "the model is wrapped in DDP, on meta",
            expected="the model itself",
            hint="load it first, then wrap it: DDP needs parameters that are there",
        )


def set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model's floating-point parameters on meta another dtype; what its library keeps in float32 stays so.

    Buffers keep theirs: frequencies and running statistics are computed in the dtype they have.

    Raises:
        ConfigError: It is no floating-point dtype.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(
            f"dtype is {dtype!r:.80}",
            expected="torch.bfloat16, torch.float16, torch.float32 or torch.float64",
            hint="leave it out to keep the dtype that the model was built with",
        )
    host: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if hasattr(host, "_get_dtype_plan"):
        kept: dict[str, torch.dtype] = host._get_dtype_plan(dtype)
        patterns = [(re.compile(glob.replace("*", ".*")), as_dtype) for glob, as_dtype in kept.items()]
    else:  # diffusers names parts of paths
        named: list[str] = list(getattr(host, "_keep_in_fp32_modules", None) or [])
        patterns = [(re.compile(rf"(^|\.){re.escape(part)}(\.|$)"), torch.float32) for part in named]
    for name, parameter in model.named_parameters():
        if parameter.is_meta and parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1:
            chosen = next((as_dtype for pattern, as_dtype in patterns if pattern.search(name)), dtype)
            parameter.data = parameter.data.to(chosen)
