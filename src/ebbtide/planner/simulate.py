"""Simulate one step, event by event: compute, copy-outs, copy-ins, device memory.

[Note: the simulated schedule]
The schedule is the engine's own, ``ebbtide.schedule``, carried out with seconds in place of slots: copies of one
direction run one after the other, at the rate of the link; a reader whose bytes have not arrived waits. The step is one
of many alike: the schedule knows the largest block, and how many bytes a forward offers. Recipes are evaluated just
before their result is read; hooks take their time in the forward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.base.actions import Action, Site
from ebbtide.planner.profile import BlockProfile, Profile
from ebbtide.schedule import CopyIn, CopyOut, Outcome, Window

Assignment = Sequence[Sequence[Action]]
"""For each executed block, the action of each of its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The predicted cost of a step.

    Attributes:
        step_seconds: Its time.
        overhead_seconds: Time beyond the step that keeps everything.
        recompute_seconds: Time of its recomputes.
        hook_seconds: Time of the hooks of blocks that do not keep everything.
        levels_bytes: Most saved bytes on the device: in each block's forward, at the start of backward, and in each
            block's backward, the last block's first.
        peak_bytes: Most device memory, base included.
        peak_at: Where: ``"forward"``, ``"head"`` or ``"backward"``, and the block.
        kept_bytes: Bytes that stay.
        offloaded_bytes: Bytes to offload, cancelled copies included.
        moved_bytes: Bytes across the link: fewer where they are stored in a narrower type.
        recomputed_bytes: Bytes that are dropped and recomputed.
    """

    step_seconds: float
    overhead_seconds: float
    recompute_seconds: float
    hook_seconds: float
    levels_bytes: tuple[int, ...]
    peak_bytes: int
    peak_at: tuple[str, str]
    kept_bytes: int
    offloaded_bytes: int
    moved_bytes: int
    recomputed_bytes: int


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Offloaded:
    """An offloaded unit, and when its copies are done."""

    site: Site
    nbytes: int
    begins: float = math.inf
    done: float = math.inf
    arrives: float | None = None  # None: its copy-in has not begun
    on_device: bool = True


class _Forward:
    """The forward of the step, as the schedule knows it."""

    def __init__(self) -> None:
        self.offered_bytes, self.offers_last = 0, True

    def stayed(self, storages: Sequence[tuple[Site, int]]) -> None:
        """Do nothing: storages that are held back are read on the device, and counted there."""


class _Step:
    """The state of one simulated step; carries out the schedule's copies with seconds."""

    def __init__(self, profile: Profile, assignment: Assignment) -> None:
        self.profile, self.assignment = profile, assignment
        self.now = profile.prologue_seconds
        self.levels: list[int] = []
        self.peak, self.peak_at = 0, ("forward", "")
        self.resident = 0  # bytes kept, and offloaded bytes whose source is still there
        self.offloaded: dict[tuple[int, int], _Offloaded] = {}
        self.forwards: list[tuple[float, float]] = []  # of each block, when it begins and ends
        self.backwards: dict[int, tuple[float, float]] = {}
        self.copies_in: list[tuple[float, float]] = []
        self._out_free = self._in_free = 0.0
        moved = [
            sum(u.moved_bytes for u, a in zip(block.units, actions, strict=True) if a is Action.OFFLOAD)
            for block, actions in zip(profile.blocks, assignment, strict=True)
        ]
        self._window = Window(profile.window_bytes)
        self._window.saw_block(max(moved, default=0), alone=len(moved) == 1)
        self._forward = _Forward()
        self._copy_out: CopyOut[_Offloaded] = CopyOut(self, self._window)
        self._copy_out.expect(sum(moved), to_its_end=bool(moved and moved[-1]))

    def see(self, level_bytes: int, base_bytes: int, phase: str, name: str) -> None:
        """Record the memory of a part of the step: its most saved bytes, all other memory, phase and block."""
        self.levels.append(level_bytes)
        if level_bytes + base_bytes > self.peak:
            self.peak, self.peak_at = level_bytes + base_bytes, (phase, name)

    def handle(self, nbytes: int) -> None:
        """Spend the compute time of offloading one storage."""
        rates = self.profile.rates
        self.now += rates.handling_seconds + nbytes * rates.handling_seconds_per_byte

    # Called by the schedule

    def copy_out(self, group: Sequence[_Offloaded], stream: object) -> list[Outcome]:
        for each in group:
            each.begins = max(self.now, self._out_free)
            each.done = self._out_free = each.begins + each.nbytes / self.profile.rates.out_bytes_per_second
        return [Outcome.BEGUN] * len(group)

    def release_sources(self, group: Sequence[_Offloaded], *, wait: bool) -> bool:
        done = max(saved.done for saved in group)
        if wait:
            self.now = max(self.now, done)
        if done > self.now:
            return False
        for saved in group:
            if saved.on_device:
                saved.on_device = False
                self.resident -= saved.nbytes
        return True

    def cancel_copy_out(self, saved: _Offloaded) -> bool:
        if saved.begins <= self.now:
            return False
        saved.begins = saved.done = math.inf
        return True

    def to_copy(self, saved: _Offloaded) -> int:
        return 0 if saved.on_device else saved.nbytes

    def copy_in(self, group: Sequence[_Offloaded]) -> int:
        begins = max(self.now, self._in_free, *(each.done for each in group))
        self._in_free = begins + sum(each.nbytes for each in group) / self.profile.rates.in_bytes_per_second
        self.copies_in.append((begins, self._in_free))
        for each in group:
            each.arrives = self._in_free
        return 0

    def discard(self, saved: _Offloaded) -> None:
        saved.arrives = None

    # Forward

    def forward(self, place: int) -> None:
        began = self.now
        block, actions = self.profile.blocks[place], self.assignment[place]
        slice_seconds = (block.forward_seconds + block.hooks_under(actions)) / max(len(block.units), 1)
        level = self.resident
        for number, (unit, action) in enumerate(zip(block.units, actions, strict=True)):
            self.now += slice_seconds
            if action is Action.KEEP:
                self.resident += unit.nbytes
            elif action is Action.OFFLOAD:
                self.handle(unit.moved_bytes)
                self.resident += unit.moved_bytes
                saved = self.offloaded[place, number] = _Offloaded(unit.site, unit.moved_bytes)
                self._copy_out.add(saved, self._forward)
            level = max(level, self.resident)
        self.resident += _more_inputs(block, actions)
        level = max(level, self.resident)
        if not block.units:
            self.now += block.forward_seconds
        self._copy_out.begin()
        self._copy_out.retire()
        self.forwards.append((began, self.now))
        self.see(level, block.forward_base_bytes, "forward", block.name)

    # Backward

    def head(self) -> None:
        self._copy_out.end_forward(self._forward)
        self.see(self.resident, self.profile.head_base_bytes, "head", "")
        self.now += self.profile.head_seconds
        self._copy_out.cancel(self._forward)

    def backward(self) -> None:
        upcoming = (([weakref.ref(saved)], place) for (place, _), saved in reversed(self.offloaded.items()))
        coming: CopyIn[_Offloaded] = CopyIn(upcoming, self._window, self)
        for place in reversed(range(len(self.profile.blocks))):
            self._block_backward(place, coming)

    def _block_backward(self, place: int, coming: CopyIn[_Offloaded]) -> None:
        began = self.now
        block, actions = self.profile.blocks[place], self.assignment[place]
        slice_seconds = block.backward_seconds / max(len(block.units), 1)
        back = 0  # recomputed or prefetched, and not yet released
        coming.reach(place)
        coming.advance()
        base = block.backward_base_bytes
        if Action.CHECKPOINT in actions:
            self.now += block.checkpoint_seconds
            base = max(base, block.checkpoint_base_bytes)
            back = sum(u.nbytes for u, action in zip(block.units, actions, strict=True) if action is Action.CHECKPOINT)
        level = self.resident + coming.ahead_bytes + back
        for number in reversed(range(len(block.units))):
            unit, action = block.units[number], actions[number]
            if action is Action.RECOMPUTE:
                self.now += unit.recompute_seconds or 0.0
                back += unit.nbytes
            elif action is Action.OFFLOAD:
                back += self._read(self.offloaded[place, number], coming)
            if action is Action.OFFLOAD and unit.narrow_bytes is not None:
                back += unit.nbytes  # cast up again
            level = max(level, self.resident + coming.ahead_bytes + back)
            self.now += slice_seconds
        if not block.units:
            self.now += block.backward_seconds
        self.backwards[place] = began, self.now
        self.see(level, base, "backward", block.name)
        # Its graph is freed, and so are the bytes kept for it.
        self.resident -= _more_inputs(block, actions)
        for number, (unit, action) in enumerate(zip(block.units, actions, strict=True)):
            if action is Action.KEEP:
                self.resident -= unit.nbytes
            elif action is Action.OFFLOAD and self.offloaded[place, number].on_device:
                self.resident -= unit.moved_bytes

    def _read(self, saved: _Offloaded, coming: CopyIn[_Offloaded]) -> int:
        """Wait for the bytes of a unit that is in the store; return how many came in for it."""
        if not saved.on_device:
            self.handle(saved.nbytes)
            if saved.arrives is None:
                self.copy_in([saved])
            self.now = max(self.now, saved.arrives or 0.0)
        coming.has_read(saved)
        return 0 if saved.on_device else saved.nbytes


def _more_inputs(block: BlockProfile, actions: Sequence[Action]) -> int:
    """Return the input bytes of a checkpointed block beyond those that it saves."""
    if Action.CHECKPOINT not in actions:
        return 0
    return max(block.input_bytes - block.saved_input_bytes, 0)


def simulate(profile: Profile, assignment: Assignment) -> Simulated:
    """Simulate one step. See [Note: the simulated schedule].

    Returns:
        Its time and its memory.
    """
    step = _run(profile, assignment)
    by_action = dict.fromkeys(Action, 0)
    recomputed, hooks, moved = 0.0, 0.0, 0
    for place, number, unit in profile.units():
        action = assignment[place][number]
        by_action[action] += unit.nbytes
        moved += unit.moved_bytes if action is Action.OFFLOAD else 0
        recomputed += (unit.recompute_seconds or 0.0) if action is Action.RECOMPUTE else 0.0
    for block, actions in zip(profile.blocks, assignment, strict=True):
        recomputed += block.checkpoint_seconds if Action.CHECKPOINT in actions else 0.0
        hooks += block.hooks_under(actions)
    seconds = step.now + profile.epilogue_seconds
    return Simulated(
        step_seconds=seconds,
        overhead_seconds=seconds - profile.step_seconds,
        recompute_seconds=recomputed,
        hook_seconds=hooks,
        levels_bytes=tuple(step.levels),
        peak_bytes=step.peak,
        peak_at=step.peak_at,
        kept_bytes=by_action[Action.KEEP],
        offloaded_bytes=by_action[Action.OFFLOAD],
        moved_bytes=moved,
        recomputed_bytes=by_action[Action.RECOMPUTE] + by_action[Action.CHECKPOINT],
    )


def _run(profile: Profile, assignment: Assignment) -> _Step:
    step = _Step(profile, assignment)
    for place in range(len(profile.blocks)):
        step.forward(place)
    step.head()
    step.backward()
    return step


def without_copies(profile: Profile, assignment: Assignment) -> tuple[frozenset[int], frozenset[int]]:
    """Return the places of the blocks during whose forward, and during whose backward, nothing is copied."""
    step = _run(profile, assignment)
    copies = [(saved.begins, saved.done) for saved in step.offloaded.values() if saved.done < math.inf]
    copies += step.copies_in

    def quiet(part: tuple[float, float]) -> bool:
        return not any(begins < part[1] and part[0] < ends for begins, ends in copies)

    forwards = frozenset(place for place, part in enumerate(step.forwards) if quiet(part))
    return forwards, frozenset(place for place, part in step.backwards.items() if quiet(part))
