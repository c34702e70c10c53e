"""What a step costs without us: from blocks that ran without hooks in a measured step.

[Note: the baseline]
``max_slowdown`` is a part of plain training. Steps that are measured under hooks contain our own work, so plain
training is not among them. In the second one the last block of each kind runs plain (``ebbtide.engine.timing``, [Note:
plain blocks]): the last, because no copies run beside its backward. What its equals took beyond it in the same step,
less their recomputes, is our own work: it is charged to what is moved and recomputed (``ebbtide.planner.charges``), and
all blocks of the kind count with the plain one's times. Without an equal, the block is compared with itself one step
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from ebbtide.base.actions import Action
from ebbtide.engine.timed import TimedBlock, TimedStep, TimedUnit
from ebbtide.planner.charges import Work, charged
from ebbtide.planner.profile import BlockProfile, Profile

ROOM = 2
"""A block runs plain only where the memory that is left holds what it saves this many times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBlock:
    """A block without hooks, and its equals with them.

    Attributes:
        units: What its equals saved, and what was done with it.
        forward_seconds: Of its forward.
        backward_seconds: Of its backward.
        hooked_forward_seconds: Of its equals' forward.
        hooked_backward_seconds: Of their backward, recomputes included.
    """

    units: tuple[TimedUnit, ...]
    forward_seconds: float
    backward_seconds: float
    hooked_forward_seconds: float
    hooked_backward_seconds: float

    @property
    def saved_bytes(self) -> int:
        """Bytes of what its equals saved."""
        return _saved_bytes(self.units)

    @property
    def extra_seconds(self) -> float:
        """What its equals took longer, recomputes left out; below zero where these were taken to cost too much."""
        hooked = self.hooked_forward_seconds + self.hooked_backward_seconds - recompute_seconds(self.units)
        return hooked - self.forward_seconds - self.backward_seconds


def sample(step: TimedStep, room_bytes: int | None) -> frozenset[str]:
    """Return the blocks that are to run plain in the next step: the last of each kind, the smallest first.

    Args:
        step: A step that was measured.
        room_bytes: Memory that a step may take beyond that one; None: not known, so none runs plain.
    """
    last = {block.kind: block for block in step.blocks}
    chosen: set[str] = set()
    needed = 0
    for block in sorted(last.values(), key=lambda block: _saved_bytes(block.units)):
        needed += ROOM * sum(_saved_bytes(other.units) for other in step.blocks if other.name == block.name)
        if room_bytes is None or needed > room_bytes:
            break
        chosen.add(block.name)
    return frozenset(chosen)


def plain_blocks(before: TimedStep, step: TimedStep) -> dict[str, PlainBlock]:
    """Return, by kind, the blocks that ran plain in a step.

    Args:
        before: An equal step in which none did.
        step: The step.
    """
    drift = _drift(before, step)
    found: dict[str, PlainBlock] = {}
    for place, block in enumerate(step.blocks):
        if not block.plain:
            continue
        self_before = before.blocks[place]
        equals = [
            other
            for other in step.blocks
            if not other.plain
            and other.kind == block.kind
            and _saved_bytes(other.units) == _saved_bytes(self_before.units)
        ]
        if equals:
            forward = median(other.forward_seconds for other in equals)
            backward = median(other.backward_seconds for other in equals)
        else:
            forward, backward = self_before.forward_seconds * drift, self_before.backward_seconds * drift
        found[block.kind] = PlainBlock(
            units=(equals[0] if equals else self_before).units,
            # What disturbs a machine makes it slower, never faster: without hooks nothing takes longer.
            forward_seconds=min(block.forward_seconds, forward),
            backward_seconds=min(block.backward_seconds, backward),
            hooked_forward_seconds=forward,
            hooked_backward_seconds=backward,
        )
    return found


def against_plain(profile: Profile, plain: Mapping[str, PlainBlock]) -> Profile:
    """Return a profile whose blocks count with their plain times, and whose prices contain our own work.

    Args:
        profile: The step.
        plain: By kind, a block that ran plain.
    """
    profile = replace(profile, blocks=tuple(_plain(block, plain.get(block.kind)) for block in profile.blocks))
    units = [unit for block in plain.values() for unit in block.units]
    moved = [unit for unit in units if unit.action is Action.OFFLOAD]
    work = Work(
        recompute_seconds=recompute_seconds(units),
        moved_bytes=sum(unit.nbytes if unit.narrow_bytes is None else unit.narrow_bytes for unit in moved),
        crossings=2 * len(moved),
    )
    extra = sum(block.extra_seconds for block in plain.values())
    host = median(unit.host_seconds for unit in moved) if moved else 0.0
    return charged(profile, work, extra, host_seconds=host) or profile


def alike(one: TimedStep, other: TimedStep) -> bool:
    """Whether two steps ran the same blocks, and these saved the same, as far as they had hooks."""

    def same(a: TimedBlock, b: TimedBlock) -> bool:
        units = [[(unit.site, unit.nbytes) for unit in block.units] for block in (a, b)]
        return a.name == b.name and (a.plain or b.plain or units[0] == units[1])

    return len(one.blocks) == len(other.blocks) and all(map(same, one.blocks, other.blocks))


def fastest(steps: list[TimedStep]) -> TimedStep:
    """Return a step of which every stretch is the shortest of several that are alike: of all where it had hooks."""
    base = next(step for step in reversed(steps) if not any(block.plain for block in step.blocks))
    blocks: list[TimedBlock] = []
    for place, block in enumerate(base.blocks):
        equals = [step.blocks[place] for step in steps if not step.blocks[place].plain]
        units = tuple(
            replace(unit, recompute_seconds=_least(other.units[number].recompute_seconds for other in equals))
            for number, unit in enumerate(block.units)
        )
        blocks.append(
            replace(
                block,
                units=units,
                forward_seconds=min(other.forward_seconds for other in equals),
                backward_seconds=min(other.backward_seconds for other in equals),
            )
        )
    return replace(
        base,
        blocks=tuple(blocks),
        turn_seconds=min(step.turn_seconds for step in steps),
        tail_seconds=min(step.tail_seconds for step in steps),
    )


def _least(seconds: Iterable[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return min(known) if known else None


def recompute_seconds(units: Iterable[TimedUnit]) -> float:
    """Return the time of the recomputes that were done."""
    return sum(unit.recompute_seconds or 0.0 for unit in units if unit.action is Action.RECOMPUTE)


def _plain(block: BlockProfile, plain: PlainBlock | None) -> BlockProfile:
    if plain is None:
        return block
    size = 1.0
    if block.saved_bytes != plain.saved_bytes and plain.hooked_forward_seconds:
        size = block.forward_seconds / plain.hooked_forward_seconds
    return replace(block, forward_seconds=plain.forward_seconds * size, backward_seconds=plain.backward_seconds * size)


def noise(before: TimedStep, step: TimedStep) -> float:
    """Return by which part two steps that ran the same differ in what they took."""
    drift = _drift(before, step)
    return max(drift, 1 / drift) - 1 if drift else 0.0


def _drift(before: TimedStep, step: TimedStep) -> float:
    """Return how much longer blocks that had hooks in both steps took in the later one."""

    def seconds(block: TimedBlock) -> float:
        return block.forward_seconds + block.backward_seconds

    pairs = [(one, other) for one, other in zip(before.blocks, step.blocks, strict=True) if not other.plain]
    ratios = [seconds(other) / seconds(one) for one, other in pairs if seconds(one)]
    return median(ratios) if ratios else 1.0


def _saved_bytes(units: Iterable[TimedUnit]) -> int:
    return sum(unit.nbytes for unit in units)
