"""The time of ordinary training, from blocks that ran without hooks in a measured step.

[Note: the baseline]
``max_slowdown`` is relative to ordinary training, but steps measured under hooks include ebbtide's overhead. So in the
second measured step some blocks of each kind run without hooks (``ebbtide.engine.timing``, [Note: plain blocks]), at
most one in ``APART``, and the first ones: no copies of other blocks run during their forward, and none are left when
their backward runs. On a CPU copies take compute time from every block that runs meanwhile. The extra time of blocks of
the same kind with hooks in the same step, less recomputes, is the overhead: it is charged to moved and recomputed
storages (``ebbtide.planner.charges``), and all blocks of the kind get the times without hooks. Machines are noisy, so
the upper quartile with hooks is compared with the lower quartile without: a plan that keeps too much costs less than a
broken promise. If no block of the kind ran with hooks, a block is compared with itself in the step before. Blocks
without a backward, such as frozen first ones, save nothing and keep their times. Of blocks that saved other amounts,
forward and backward are scaled apart: if only their weights are frozen, their backward is shorter. Times of a step in
which the machine was slower are those of the faster one, in proportion to blocks that had hooks in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from ebbtide.base.actions import Action, keeps_all
from ebbtide.engine.timed import TimedBlock, TimedStep, TimedUnit, recompute_seconds
from ebbtide.planner.charges import Work, charged
from ebbtide.planner.profile import RECOMPUTE_HOOKS, BlockProfile, Profile

ROOM = 2
"""A block runs plain only if the free memory holds its saved bytes this many times."""

MOST = 4
"""Most blocks of a kind that run plain in a measured step."""

APART = 4
"""Of this many blocks of a kind at most one runs plain; the others show the cost of hooks."""

HOOKS_OF_PACKS = 1.75
"""Cost of the hooks of a block that keeps everything, relative to the time in its pack hook in a measured step, on a
CPU. The rest is around the block and its modules, and in backward. On a noisy machine the times of three or four blocks
of 50 ms, with and without hooks, differ by 1 to 12 ms where that cost is 2.1 ms; those in the pack hook by a quarter.
"""

EQUAL = 0.01
"""Relative difference of bytes up to which blocks, or steps, saved as much."""

Sized = TimedBlock | BlockProfile
"""A block whose saved bytes are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBlock:
    """Times of blocks of a kind without hooks, and of equal blocks with hooks.

    Attributes:
        units: The storages that the equal blocks saved, and their actions.
        forward_seconds: Lower quartile of forwards without hooks.
        backward_seconds: Lower quartile of backwards without hooks.
        hooked_forward_seconds: Upper quartile of forwards with hooks.
        hooked_backward_seconds: Upper quartile of backwards with hooks, recomputes included.
        hook_seconds: Cost of hooks on a block that keeps everything; 0 if not measured.
    """

    units: tuple[TimedUnit, ...]
    forward_seconds: float
    backward_seconds: float
    hooked_forward_seconds: float
    hooked_backward_seconds: float
    hook_seconds: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes that an equal block saved."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def own_hook_seconds(self) -> float:
        """Cost of the hooks of the equal blocks, in which perhaps something was recomputed."""
        recomputed = any(unit.action is Action.RECOMPUTE for unit in self.units)
        return self.hook_seconds * (RECOMPUTE_HOOKS if recomputed else 1.0)

    @property
    def extra_seconds(self) -> float:
        """Extra time with hooks, less recomputes; negative if recomputes were overestimated."""
        hooked = self.hooked_forward_seconds + self.hooked_backward_seconds - recompute_seconds(self.units)
        return hooked - self.forward_seconds - self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a plan is made from.

    Attributes:
        step: The step, as it ran with hooks.
        plain: Kind → times of its blocks without hooks.
        noise: Relative difference in time of the steps that were measured.
        known: Whether the time of ordinary training is known.
    """

    step: TimedStep
    plain: Mapping[str, PlainBlock]
    noise: float
    known: bool = True


def sample(blocks: Sequence[Sized], room_bytes: int | None, *, most: int = MOST) -> frozenset[str]:
    """Return the blocks to run without hooks in the next step. See [Note: the baseline].

    Args:
        blocks: The blocks of a measured step.
        room_bytes: Memory that a step may take beyond that one; None: not known, so none runs plain.
        most: Most blocks of a kind.
    """
    if room_bytes is None:
        return frozenset()
    wanted: list[tuple[int, int, str]] = []  # one block of each kind before a second of any, the smallest first
    for last in {block.kind: block for block in blocks}.values():
        equals = [b for b in blocks if b.kind == last.kind and _equal(b.saved_bytes, last.saved_bytes)]
        for round_, block in enumerate(equals[: min(most, max(len(equals) // APART, 1))]):
            executions = sum(other.name == block.name for other in blocks)
            wanted.append((round_, ROOM * executions * block.saved_bytes, block.name))
    chosen: dict[str, int] = {}
    for _, nbytes, name in sorted(wanted):
        if name not in chosen and sum(chosen.values()) + nbytes > room_bytes:
            break
        chosen[name] = nbytes
    return frozenset(chosen)


def plain_blocks(before: TimedStep, step: TimedStep) -> dict[str, PlainBlock]:
    """Return kind → times of the blocks that ran without hooks in a step; all had hooks in the equal one before."""
    drift = _drift(before, step)
    found: dict[str, PlainBlock] = {}
    for kind in dict.fromkeys(block.kind for block in step.blocks if block.plain):
        places = [place for place, block in enumerate(step.blocks) if block.plain and block.kind == kind]
        self_before = before.blocks[places[-1]]
        places = [place for place in places if _equal(before.blocks[place].saved_bytes, self_before.saved_bytes)]
        hooked = [
            block
            for block, first in zip(step.blocks, before.blocks, strict=True)
            if not block.plain and block.kind == kind and _equal(first.saved_bytes, self_before.saved_bytes)
        ]
        equals = [block for block in hooked if treated(block)] or hooked
        kept = [block for block in hooked if not treated(block)] if equals is not hooked else []
        forwards = [block.forward_seconds for block in equals] or [self_before.forward_seconds * drift]
        backwards = [block.backward_seconds for block in equals] or [self_before.backward_seconds * drift]
        # Removing hooks cannot make a block slower, so a slower time is a disturbance.
        forward = min(quartile([step.blocks[place].forward_seconds for place in places]), median(forwards))
        backward = min(quartile([step.blocks[place].backward_seconds for place in places]), median(backwards))
        hooks = HOOKS_OF_PACKS * median(block.pack_seconds for block in kept) if kept else 0.0
        if kept and not hooks:
            hooks = median(block.seconds for block in kept) - forward - backward
        found[kind] = PlainBlock(
            units=(equals[0] if equals else self_before).units,
            forward_seconds=forward,
            backward_seconds=backward,
            hooked_forward_seconds=quartile(forwards, upper=True),
            hooked_backward_seconds=quartile(backwards, upper=True),
            hook_seconds=max(hooks, 0.0),
        )
    return found


def has_backward(block: Sized) -> bool:
    """Whether a block has a backward; of others, such as frozen first ones, nothing is saved or restored."""
    return bool(block.units or block.backward_seconds)


def treated(block: TimedBlock) -> bool:
    """Whether anything of a block was offloaded or recomputed."""
    return not keeps_all(unit.action for unit in block.units)


def kept_sample(blocks: Sequence[Sized], plain: frozenset[str], room_bytes: int | None) -> frozenset[str]:
    """Return blocks that keep everything under hooks in the next step, to measure the cost of hooks alone.

    They are as many as those that run plain, and follow them, of kinds that have four times as many blocks, if there is
    room for both.
    """
    chosen: set[str] = set()
    for kind in {block.kind for block in blocks if block.name in plain}:
        names = [block.name for block in blocks if block.kind == kind]
        for place in [place for place, name in enumerate(names) if name in plain]:
            following = next((name for name in names[place:] if name not in plain | chosen), None)
            if following is not None and len(names) >= APART:
                chosen.add(following)
    needed = ROOM * sum(block.saved_bytes for block in blocks if block.name in plain | chosen)
    return frozenset(chosen) if room_bytes is not None and needed <= room_bytes else frozenset()


def quartile(values: Sequence[float], *, upper: bool = False) -> float:
    """Return the lower quartile of one value or more, or the upper one."""
    return values[0] if len(values) == 1 else quantiles(values, n=4, method="inclusive")[2 if upper else 0]


def against_plain(profile: Profile, plain: Mapping[str, PlainBlock]) -> Profile:
    """Return a profile with the times of blocks without hooks, by kind, and prices that include ebbtide's overhead."""
    profile = replace(profile, blocks=tuple(_plain(block, plain.get(block.kind)) for block in profile.blocks))
    units = [unit for block in plain.values() for unit in block.units]
    moved = [unit for unit in units if unit.action is Action.OFFLOAD]
    work = Work(
        recompute_seconds=recompute_seconds(units),
        moved_bytes=sum(unit.moved_bytes for unit in moved),
        crossings=2 * len(moved),
    )
    extra = sum(max(block.extra_seconds - block.own_hook_seconds, 0.0) for block in plain.values())
    host = median(unit.host_seconds for unit in moved) if moved else 0.0
    return charged(profile, work, extra, host_seconds=host) or profile


def alike(one: TimedStep, other: TimedStep) -> bool:
    """Whether two steps ran the same blocks. Their saved bytes may differ, with sequence lengths and routing."""
    return [(block.name, block.kind) for block in one.blocks] == [(block.name, block.kind) for block in other.blocks]


def baseline_of(steps: list[TimedStep]) -> Baseline:
    """Return what a plan is made from, of steps that ran the same blocks; the first had hooks on all."""
    first, last = steps[0], at_speed_of(steps[0], steps[-1])
    return Baseline(step=undisturbed([first, last]), plain=plain_blocks(first, last), noise=noise(first, steps[-1]))


def at_speed_of(before: TimedStep, step: TimedStep) -> TimedStep:
    """Return a step with the times that it would have had if the machine had not become slower since an equal one.

    Else the shortest recompute would be one of the faster machine, next to blocks without hooks of the slower one.
    """
    slower = _drift(before, step)
    if slower <= 1 or abs(_size(before, step) - 1) > EQUAL:
        return step

    def faster(unit: TimedUnit) -> TimedUnit:
        seconds = None if unit.recompute_seconds is None else unit.recompute_seconds / slower
        return replace(unit, recompute_seconds=seconds, host_seconds=unit.host_seconds / slower)

    blocks = (
        replace(
            block,
            units=tuple(map(faster, block.units)),
            forward_seconds=block.forward_seconds / slower,
            backward_seconds=block.backward_seconds / slower,
            pack_seconds=block.pack_seconds / slower,
        )
        for block in step.blocks
    )
    head_seconds, epilogue_seconds = step.head_seconds / slower, step.epilogue_seconds / slower
    return replace(step, blocks=tuple(blocks), head_seconds=head_seconds, epilogue_seconds=epilogue_seconds)


def undisturbed(steps: list[TimedStep]) -> TimedStep:
    """Return a step whose every part is the shortest of several, where it had hooks and saved as much in all of them.

    What follows its backward, such as an evaluation, hardly depends on what it saved, so all of them are compared.
    Memory is that of a step that begins with as much as the fullest.
    """
    hooked = [step for step in reversed(steps) if not any(block.plain for block in step.blocks)]
    base = max(hooked, key=lambda step: sum(block.saved_bytes for block in step.blocks))
    equal_steps = [step for step in steps if abs(_size(base, step) - 1) <= EQUAL]
    blocks: list[TimedBlock] = []
    for place, block in enumerate(base.blocks):
        blocks.append(shortest(block, [step.blocks[place] for step in equal_steps if not step.blocks[place].plain]))
    found = replace(
        base,
        blocks=tuple(blocks),
        head_seconds=min(step.head_seconds for step in equal_steps),
        epilogue_seconds=min(step.epilogue_seconds for step in steps),
    )
    return _begun_with(found, max(step.in_use_bytes or 0 for step in steps))


def _begun_with(step: TimedStep, in_use_bytes: int) -> TimedStep:
    """Return a step as if it had begun with more memory in use: the gradients of earlier micro-batches.

    Its own are added to those, so less of them is missing with each block's backward.
    """
    if step.in_use_bytes is None or in_use_bytes <= step.in_use_bytes:
        return step
    more, count = in_use_bytes - step.in_use_bytes, len(step.blocks)
    blocks = (
        replace(
            block,
            forward_peak_bytes=_plus(block.forward_peak_bytes, more),
            backward_peak_bytes=_plus(block.backward_peak_bytes, more * (place + 1) // count),
        )
        for place, block in enumerate(step.blocks)
    )
    head_peak_bytes = _plus(step.head_peak_bytes, more)
    return replace(step, blocks=tuple(blocks), head_peak_bytes=head_peak_bytes, in_use_bytes=in_use_bytes)


def _plus(peak_bytes: int | None, more: int) -> int | None:
    return None if peak_bytes is None else peak_bytes + more


def shortest(block: TimedBlock, others: Iterable[TimedBlock]) -> TimedBlock:
    """Return a block with the shortest times of its executions with hooks that saved as much in the same way."""
    equals = [other for other in others if _equal(other.saved_bytes, block.saved_bytes)]
    equals = [other for other in equals if treated(other) == treated(block)]
    recomputes = [{unit.site: unit.recompute_seconds for unit in other.units} for other in equals]
    units = tuple(
        replace(unit, recompute_seconds=_least(seconds.get(unit.site) for seconds in recomputes))
        for unit in block.units
    )
    return replace(
        block,
        units=units,
        forward_seconds=min(other.forward_seconds for other in equals),
        backward_seconds=min(other.backward_seconds for other in equals),
    )


def _least(seconds: Iterable[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return min(known) if known else None


def _plain(block: BlockProfile, plain: PlainBlock | None) -> BlockProfile:
    if plain is None or not has_backward(block):
        return block
    forward = backward = 1.0
    if not _equal(block.saved_bytes, plain.saved_bytes):
        hooked_backward = plain.hooked_backward_seconds - recompute_seconds(plain.units)
        forward = block.forward_seconds / plain.hooked_forward_seconds if plain.hooked_forward_seconds else 1.0
        backward = block.backward_seconds / hooked_backward if hooked_backward > 0 else forward
    return replace(
        block,
        forward_seconds=plain.forward_seconds * forward,
        backward_seconds=plain.backward_seconds * backward,
        hook_seconds=plain.hook_seconds,  # per tensor, of any size
    )


def noise(before: TimedStep, step: TimedStep) -> float:
    """Return the relative difference in time of two steps, in proportion to what they saved."""
    drift = _drift(before, step) / _size(before, step)
    return max(drift, 1 / drift) - 1 if drift else 0.0


def _drift(before: TimedStep, step: TimedStep) -> float:
    """Return by how many times blocks that had hooks in both took longer in the later step."""
    pairs = [(one, other) for one, other in zip(before.blocks, step.blocks, strict=True) if not other.plain]
    ratios = [other.seconds / one.seconds for one, other in pairs if one.seconds]
    return median(ratios) if ratios else 1.0


def _size(before: TimedStep, step: TimedStep) -> float:
    """Return by how many times blocks that had hooks in both saved more in the later step."""
    pairs = [(one, other) for one, other in zip(before.blocks, step.blocks, strict=True) if not other.plain]
    ratios = [other.saved_bytes / one.saved_bytes for one, other in pairs if one.saved_bytes and other.saved_bytes]
    return median(ratios) if ratios else 1.0


def _equal(one: int, other: int) -> bool:
    """Whether two blocks saved as much, but for what is saved by the first of several that use it."""
    return abs(one - other) <= EQUAL * max(one, other)
