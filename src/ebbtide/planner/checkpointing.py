"""Activation checkpointing: the cost of checkpointing every block, and plans that checkpoint some.

[Note: simulated checkpointing]
Every block keeps only its inputs; in backward it repeats its forward, saves everything, and runs its backward. So the
peak in a block's backward is the inputs of the blocks up to it, everything that this block saves, and the base; and the
step is longer by the blocks' forwards.
"""

from __future__ import annotations

from itertools import accumulate

from ebbtide.base.actions import Action
from ebbtide.planner.profile import BlockProfile, Profile, Unit


def checkpointed_peak(profile: Profile) -> int:
    """Return the most bytes on the device in a step whose blocks are all checkpointed, base included.

    See [Note: simulated checkpointing]. The step is longer by ``profile.forward_seconds``.

    Args:
        profile: The step that keeps everything.
    """
    blocks = profile.blocks
    input_sizes = [_held_input_bytes(block) for block in blocks]
    kept = list(accumulate(input_sizes))
    peaks = [held + block.forward_base_bytes for held, block in zip(kept, blocks, strict=True)]
    peaks.append(sum(input_sizes) + profile.head_base_bytes)
    for held, own, block in zip(kept, input_sizes, blocks, strict=True):
        saved = block.saved_input_bytes
        twice = saved if saved <= own else 0  # more than its inputs: a copy in a wider type
        peaks.append(held + block.saved_bytes - twice + max(block.backward_base_bytes, block.checkpoint_base_bytes))
    return max(peaks)


def checkpointed(profile: Profile, count: int, inputs: Action) -> tuple[tuple[Action, ...], ...]:
    """Return actions that checkpoint the first blocks, whose bytes stay longest, and keep what the others save.

    Args:
        profile: The step.
        count: How many blocks, of those that may be checkpointed.
        inputs: Action for their inputs: KEEP or OFFLOAD.
    """
    able = [place for place, block in enumerate(profile.blocks) if block.checkpointable]
    chosen = set(able[:count])

    def action(place: int, unit: Unit) -> Action:
        if place not in chosen:
            return Action.KEEP
        if not unit.block_input:
            return Action.CHECKPOINT
        return inputs if unit.movable else Action.KEEP

    return tuple(tuple(action(place, unit) for unit in block.units) for place, block in enumerate(profile.blocks))


def _held_input_bytes(block: BlockProfile) -> int:
    """Return the bytes of its inputs that a checkpointed block holds; if they are not known, what it saves of them."""
    return block.input_bytes or block.saved_input_bytes
