"""Attention of a simulated step is fused where a GPU fuses it.

[Note: a GPU's attention]
torch chooses how ``scaled_dot_product_attention`` is computed by the device of its tensors, and fake tensors are on the
CPU (decision 11). The CPU's one fused kernel takes no dropout, no values of another width than the keys' (MLA), and no
mask with gradients; without it the softmax of every head is saved, tokens x tokens in float32. GPUs have fused kernels
for these. The kernels differ in what they take, hardly in what they save: query, key, value, mask, result, and a
float32 number for each row of the result. So one operator represents all, and another where it lacks the gradient of a
mask.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` of pytorch/pytorch@001f694aef6f (after 2.13): what the
flash and the efficient kernel take on compute capability 8.0 and later. Grouped heads go to the first only, because
releases before that have no others for them.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ebbtide.profiling.faketensors import HALF, TENSOR_TYPES

_FLASH_WIDTH = 256
"""Width of the widest heads that the flash kernel takes; torch pads those that are not aligned."""

_ALIGNED_BYTES = 16
"""The efficient kernel takes heads whose width in bytes is a multiple of this."""


class FusedAttention(TorchFunctionMode):
    """Fuses attention that a GPU fuses and the CPU does not. See [Note: a GPU's attention]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = _attend
        elif func is F.multi_head_attention_forward:  # it calls the function above, which no mode sees
            names = {**func.__globals__, F.scaled_dot_product_attention.__name__: _attend}
            func = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
        return func(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention; the arguments are those of ``scaled_dot_product_attention``."""
    inputs = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    if isinstance(query, FakeTensor) and all(type(each) in TENSOR_TYPES for each in inputs):
        inputs = [_as_autocast(each) for each in inputs]
        gpu = _gpu_fuses(*inputs, causal=is_causal, gqa=enable_gqa)
        if gpu and not _cpu_fuses(*inputs, dropout_p=dropout_p):
            return _fused(*inputs, dropout_p=dropout_p, causal=is_causal, scale=scale)
    return F.scaled_dot_product_attention(
        *inputs, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type that autocast casts an argument of attention to."""
    if not torch.is_autocast_enabled("cpu") or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _cpu_fuses(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float
) -> bool:
    """Return whether the CPU fuses attention that a GPU fuses."""
    constant = mask is None or (mask.ndim in (2, 4) and not mask.requires_grad)
    return constant and not dropout_p and query.shape[-1] == value.shape[-1] and _allowed("flash")


def _gpu_fuses(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool,
    gqa: bool,
) -> bool:
    """Return whether a GPU's flash or efficient kernel takes these inputs, with or without dropout."""
    inputs = (query, key, value)
    if any(each.ndim != 4 or each.dtype != query.dtype or not each.numel() for each in inputs):
        return False
    batch, heads, queries, width = query.shape
    shared, keys, wide = key.shape[1], key.shape[2], value.shape[-1]
    if key.shape != (batch, shared, keys, width) or value.shape != (batch, shared, keys, wide):
        return False
    strides = [each.stride()[-1:] for each in (inputs if mask is None else (*inputs, mask))]
    if any(stride != (1,) for stride in strides) or (causal and mask is not None):
        return False
    half = query.dtype in HALF
    grouped = heads == shared or (gqa and heads % shared == 0)
    flash = half and mask is None and width == wide <= _FLASH_WIDTH and grouped and (queries == keys or not causal)
    if flash and _allowed("flash"):
        return True
    aligned = not any(each.shape[-1] * each.itemsize % _ALIGNED_BYTES for each in inputs)
    allowed = _allowed("mem_efficient") or (half and _allowed("cudnn"))
    return allowed and aligned and heads == shared and (half or query.dtype is torch.float32)


def _allowed(kernel: str) -> bool:
    """Return whether the model's code allows a kernel, for instance in ``torch.nn.attention.sdpa_kernel``."""
    return getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Call the operator on the inputs that torch passes to it."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    if mask is not None:
        if mask.requires_grad:
            operator = torch.ops.aten._scaled_dot_product_efficient_attention
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return operator(query, key, value, mask, True, dropout_p, causal, scale=scale)[0]
