"""Additions to the simulated micro-batch: optimizer state, 4-bit weights, gradients of earlier micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from torch import nn

from ebbtide.engine.build import Rule
from ebbtide.engine.rules import rule_table
from ebbtide.planner.machines import Machine
from ebbtide.planner.profile import BlockProfile, Profile
from ebbtide.wrap import find_blocks

QUANTISED_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256
"""Of a weight in 4 bits: itself, its share of a scale of 8 bits for 64 weights, and of the scale of 256 scales.

Source: Dettmers et al., QLoRA (2023), double quantization.
"""

_BLOCKWISE = 1 + 4 / 256
"""Of a number of state in 8 bits: itself, and its share of a float32 scale for 256 numbers."""

_IN_TYPE: Mapping[str, float] = {"adamw": 2.0, "sgd": 0.0, "sgd_momentum": 1.0}
"""Numbers of state for each trained weight, of the weight's own type."""


def state_ratio(optim: str, model: nn.Module) -> float:
    """Return the bytes of an optimizer's state per byte of trained weights.

    Args:
        optim: As ``PlanConfig.optim`` names it.
        model: Its trained parameters decide; on meta or not.
    """
    if optim in _IN_TYPE:
        return _IN_TYPE[optim]
    trained = [p for p in model.parameters() if p.requires_grad]
    if optim == "adamw_8bit":
        state = sum(2 * _BLOCKWISE * p.numel() for p in trained)
    else:  # Adafactor without momentum: float32 means over the rows and the columns of a matrix
        state = sum(
            4.0 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.ndim > 1 else p.numel()) for p in trained
        )
    return state / max(sum(p.numel() * p.itemsize for p in trained), 1)


def recompute_rules(train_type: str) -> dict[str, Rule] | None:
    """Return the recompute rules for a step; None: the built-in ones.

    Products with weights in 4 bits, bitsandbytes' ``MatMul4Bit``, have none, so neither has what is made from them.

    Args:
        train_type: As ``PlanConfig.train_type`` names it.
    """
    if train_type != "qlora":
        return None
    # The products of adapters do have one, and are small.
    return {name: rule for name, rule in rule_table().items() if name not in ("AddmmBackward0", "MmBackward0")}


def quantised(profile: Profile, model: nn.Module, machine: Machine) -> Profile:
    """Return the step with the frozen linear weights in 4 bits.

    Each is dequantised one at a time, whenever it is used in forward and backward.

    Args:
        profile: The step with weights in that type.
        model: On meta, with adapters.
        machine: Its memory rate gives the time for that.
    """
    inside = {id(part): block.name for module, block in find_blocks(model, None) for part in module.modules()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [
        part for part in model.modules()
        if isinstance(part, nn.Linear) and part is not head and not part.weight.requires_grad
    ]  # fmt: skip
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


def accumulated(profile: Profile, model: nn.Module, steps: int, shards: int) -> Profile:
    """Return a later micro-batch of a step: gradients of earlier ones occupy memory from its beginning.

    Args:
        profile: A step of one micro-batch.
        model: On meta.
        steps: Micro-batches in a step; each has its share of the optimizer's time.
        shards: Ranks of FSDP. Each holds the gradients of all weights until the last micro-batch: transformers lets
            FSDP reduce them only then.
    """
    if steps == 1:
        return profile
    pairs = [(module, block.name) for module, block in find_blocks(model, None)]
    ran, parameters = {block.name for block in profile.blocks}, list(model.parameters())
    inside = {id(p): name for module, name in pairs for p in module.parameters()}
    first = next((place for place, p in enumerate(parameters) if inside.get(id(p)) in ran), 0)
    # What is before the first block has its gradients last, and stacks that the batch does not reach have none.
    head = sum(_gradient(p) for p in parameters[first:] if id(p) not in inside)
    total = sum(map(_gradient, parameters))
    own = {name: sum(map(_gradient, module.parameters())) for module, name in pairs}
    largest = {name: max(map(_gradient, module.parameters()), default=0) for module, name in pairs}
    # A block that runs several times has its gradient from its last execution on, the first in backward.
    made = [*accumulate(own.pop(block.name, 0) for block in reversed(profile.blocks))][::-1]
    # The profile has what this pass has made so far: shards of the blocks' gradients, and those of the head whole.
    more = [
        total - head - nbytes // shards + largest.get(block.name, 0)
        for block, nbytes in zip(profile.blocks, made, strict=True)
    ]
    blocks = tuple(
        replace(
            block,
            forward_base_bytes=block.forward_base_bytes + total,
            backward_base_bytes=block.backward_base_bytes + nbytes,
            checkpoint_base_bytes=block.checkpoint_base_bytes + nbytes,
        )
        for block, nbytes in zip(profile.blocks, more, strict=True)
    )
    return replace(
        profile, blocks=blocks, head_base_bytes=profile.head_base_bytes + total,
        epilogue_seconds=profile.epilogue_seconds / steps,
    )  # fmt: skip


def _gradient(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.itemsize if parameter.requires_grad else 0
