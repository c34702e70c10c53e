"""Activation checkpointing: the cost of checkpointing every block, and plans that checkpoint some.

[Note: simulated checkpointing]
Every block keeps only its inputs; in backward it repeats its forward, saves everything, and runs its backward. So the
peak in a block's backward is the inputs of the blocks up to it, everything that this block saves, and the base; and the
step is longer by the blocks' forwards.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from ebbtide.base.actions import Action
from ebbtide.planner.profile import BlockProfile, Profile, Unit


def checkpointed_peak(profile: Profile) -> int:
    """Return the most bytes on the device in a step whose blocks are all checkpointed, base included.

    See [Note: simulated checkpointing].
    """
    blocks = profile.blocks
    input_sizes = [_held_input_bytes(block) for block in blocks]
    kept = list(accumulate(input_sizes))
    peaks = [held + block.forward_base_bytes for held, block in zip(kept, blocks, strict=True)]
    peaks.append(sum(input_sizes) + profile.head_base_bytes)
    for held, block in zip(kept, blocks, strict=True):
        peaks.append(held + _again_bytes(block) + max(block.backward_base_bytes, block.checkpoint_base_bytes))
    return max(peaks)


def checkpointed(profile: Profile, count: int, inputs: Action) -> tuple[tuple[Action, ...], ...]:
    """Return actions that checkpoint the first ``count`` blocks that may be, whose bytes stay longest.

    Their inputs are kept or offloaded, as ``inputs`` says; what the others save is kept.
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


def with_checkpoint_prices(profile: Profile) -> Profile:
    """Return the step in which what a checkpoint drops costs no more than its share of the second forward.

    A checkpointed block pays for all these shares, so the bound of that step is one of schedules with checkpoints, too.
    It does not matter which blocks the planner may checkpoint: users may checkpoint any.
    """
    return replace(profile, blocks=tuple(map(_with_checkpoint_prices, profile.blocks)))


def _with_checkpoint_prices(block: BlockProfile) -> BlockProfile:
    held, again_bytes = _saves_what_it_holds(block), _again_bytes(block)

    def priced(unit: Unit) -> Unit:
        if (unit.block_input and held) or not again_bytes:
            return unit
        share, own = block.checkpoint_seconds * unit.nbytes / again_bytes, unit.recompute_seconds
        return replace(unit, recompute_seconds=share if own is None else min(own, share))

    return replace(block, units=tuple(map(priced, block.units)))


def _again_bytes(block: BlockProfile) -> int:
    """Return the bytes that a checkpointed block saves again in backward, besides the inputs that it holds."""
    return block.saved_bytes - (block.saved_input_bytes if _saves_what_it_holds(block) else 0)


def _saves_what_it_holds(block: BlockProfile) -> bool:
    """Whether the inputs that a block saves are those that its checkpoint holds, and no copies in a wider type."""
    return block.saved_input_bytes <= _held_input_bytes(block)


def _held_input_bytes(block: BlockProfile) -> int:
    """Return the bytes of its inputs that a checkpointed block holds; if they are not known, what it saves of them."""
    return block.input_bytes or block.saved_input_bytes
