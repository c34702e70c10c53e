"""Activation checkpointing: the cost of checkpointing every block, and plans that checkpoint some.

[Note: simulated checkpointing]
Every block keeps only its inputs; in backward it repeats its forward, saves everything, and runs its backward. So the
peak in a block's backward is the inputs of the blocks up to it, everything that this block saves, and the base; and the
step is longer by the blocks' forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ebbtide.base.actions import Action
from ebbtide.base.errors import ConfigError
from ebbtide.planner.profile import BlockProfile, Profile, Unit


def checkpointed_peak(profile: Profile, input_bytes: Sequence[int] | None = None) -> int:
    """Return the most bytes on the device in a step whose blocks are all checkpointed, base included.

    See [Note: simulated checkpointing]. The step is longer by ``profile.forward_seconds``.

    Args:
        profile: The step that keeps everything.
        input_bytes: For each executed block, bytes of its inputs; None: the saved part of them, which is more if a
            block saves its input in a wider type, and less if it does not save it.

    Raises:
        ConfigError: ``input_bytes`` is not for these blocks.
    """
    blocks = profile.blocks
    input_sizes = [_saved_input_bytes(block) for block in blocks] if input_bytes is None else list(input_bytes)
    if len(input_sizes) != len(blocks):
        raise ConfigError(
            f"input_bytes has {len(input_sizes)} numbers",
            expected=f"one for each of {len(blocks)} executed blocks",
            hint="leave it out to take what the blocks save of their inputs",
        )
    kept = list(accumulate(input_sizes))
    peaks = [held + block.forward_base_bytes for held, block in zip(kept, blocks, strict=True)]
    peaks.append(sum(input_sizes) + profile.head_base_bytes)
    for held, own, block in zip(kept, input_sizes, blocks, strict=True):
        own_saved = _saved_input_bytes(block)
        twice = own_saved if own_saved <= own else 0  # more than its inputs: a copy in a wider type
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


def _saved_input_bytes(block: BlockProfile) -> int:
    return sum(unit.nbytes for unit in block.units if unit.block_input)
