"""Frozen weights in 4 bits: the products of bitsandbytes in a simulated step, and what they cost.

[Note: names of sites in 4 bits]
A saved plan finds a tensor by the node that made it, so the simulated step has the nodes of training: ``MatMul4Bit``
of bitsandbytes, which saves no tensor and has no recompute rule, and those of PEFT's forward around it, which adds
adapters in the type of its result (checked with bitsandbytes 0.50 and PEFT 0.21). Neither does this on meta.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ebbtide.planner.machines import Machine
from ebbtide.planner.profile import BlockProfile, Profile
from ebbtide.wrap import find_blocks

QUANTISED_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256
"""Of a weight in 4 bits: itself, its share of a scale of 8 bits for 64 weights, and of the scale of 256 scales.

Source: Dettmers et al., QLoRA (2023), double quantization.
"""


class MatMul4Bit(torch.autograd.Function):
    """A product of bitsandbytes, whose name its node has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient @ ctx.weight, None, None


class _Linear4Bit(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return MatMul4Bit.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]


class _Lora4Bit(LoraLinear):
    """As PEFT's ``Linear4bit``, with one adapter."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        (name,) = self.active_adapters
        result, inward = self.base_layer(x, *args, **kwargs).clone(), self.lora_A[name]
        added = self.lora_B[name](inward(self.lora_dropout[name](x.to(inward.weight.dtype)))) * self.scaling[name]
        return result + added.to(result.dtype)


def compute_in_4_bits(model: nn.Module) -> None:
    """Let a model compute as with 4 bits in its frozen linear weights, but the head's.

    Args:
        model: On meta, with adapters.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for part in model.modules():
        if isinstance(part, nn.Linear) and part is not head and not part.weight.requires_grad:
            part.__class__ = _Linear4Bit
    for part in model.modules():
        if isinstance(part, LoraLinear) and isinstance(part.get_base_layer(), _Linear4Bit):
            part.__class__ = _Lora4Bit


def quantised(profile: Profile, model: nn.Module, machine: Machine) -> Profile:
    """Return the step with the weights of such layers in 4 bits.

    Each is dequantised one at a time, whenever it is used in forward and backward.

    Args:
        profile: The step with weights in that type.
        model: As ``compute_in_4_bits`` changed it.
        machine: Its memory rate gives the time for that.
    """
    inside = {id(part): block.name for module, block in find_blocks(model, None) for part in module.modules()}
    linear = [part for part in model.modules() if isinstance(part, _Linear4Bit)]
    saved = int(sum(p.weight.numel() * (p.weight.itemsize - QUANTISED_BYTES) for p in linear))
    largest = max((p.weight.numel() * p.weight.itemsize for p in linear), default=0)
    seconds: dict[str, float] = {}
    for part in linear:
        moved = part.weight.numel() * (QUANTISED_BYTES + part.weight.itemsize)
        name = inside.get(id(part), "")
        seconds[name] = seconds.get(name, 0.0) + moved / machine.memory_bytes_per_second

    def smaller(nbytes: int) -> int:
        return max(nbytes - saved + largest, 0)

    def block(found: BlockProfile) -> BlockProfile:
        longer = seconds.get(found.name, 0.0)
        return replace(
            found,
            forward_seconds=found.forward_seconds + longer,
            backward_seconds=found.backward_seconds + longer,
            forward_base_bytes=smaller(found.forward_base_bytes),
            backward_base_bytes=smaller(found.backward_base_bytes),
            checkpoint_base_bytes=smaller(found.checkpoint_base_bytes),
        )

    blocks = tuple(map(block, profile.blocks))
    return replace(profile, blocks=blocks, head_base_bytes=smaller(profile.head_base_bytes))
