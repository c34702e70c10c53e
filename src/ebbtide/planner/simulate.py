"""Simulate one step, event by event: compute, copy-outs, copy-ins, device memory.

[Note: the simulated schedule]
The schedule is the engine's (``ebbtide.engine.flow``). Offloaded storages are copied out in saved order, one at a time;
when more than the window is in flight, compute waits for the oldest. At the start of backward, copies that have not
begun are cancelled, because their bytes are still on the device. From a block's backward on, the next bytes are
prefetched in reading order, at most one window ahead of their reader; a reader whose bytes have not arrived waits.
Recipes are evaluated just before their result is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.base.actions import Action
from ebbtide.planner.profile import BlockProfile, Profile

LEAST_WINDOW_BYTES = 16 * 1024**2
"""As the engine's: a window that follows the model is never smaller."""

Assignment = Sequence[Sequence[Action]]
"""For each executed block, the action of each of its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The predicted cost of a step.

    Attributes:
        step_seconds: Its time.
        overhead_seconds: Time beyond the step that keeps everything.
        recompute_seconds: Time of its recomputes.
        stalls: Stall seconds of each block, forward and backward together.
        levels_bytes: Most saved bytes on the device: in each block's forward, at the start of backward, and in each
            block's backward, the last block's first.
        peak_bytes: Most device memory, base included.
        peak_at: Where: ``"forward"``, ``"head"`` or ``"backward"``, and the block.
        kept_bytes: Bytes that stay.
        offloaded_bytes: Bytes to offload, cancelled copies included.
        moved_bytes: Bytes across the link: fewer where they are stored in a narrower type.
        served_bytes: Offloaded bytes that are still on the device at the start of backward and are read there.
        recomputed_bytes: Bytes that are dropped and recomputed.
        handling_seconds: Compute time of offloading besides the copies.
    """

    step_seconds: float
    overhead_seconds: float
    recompute_seconds: float
    stalls: tuple[float, ...]
    levels_bytes: tuple[int, ...]
    peak_bytes: int
    peak_at: tuple[str, str]
    kept_bytes: int
    offloaded_bytes: int
    moved_bytes: int
    served_bytes: int
    recomputed_bytes: int
    handling_seconds: float

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for copies."""
        return sum(self.stalls)


@dataclass(slots=True)
class _Parked:
    """An offloaded unit and the state of its copy."""

    nbytes: int
    place: int
    number: int
    begins: float
    done: float
    resident: bool = True  # its source is on the device


class _Step:
    """The state of one simulated step."""

    def __init__(self, profile: Profile, assignment: Assignment) -> None:
        self.profile, self.assignment = profile, assignment
        self.now = profile.lead_seconds
        self.stalls = [0.0] * len(profile.blocks)
        self.levels: list[int] = []
        self.peak, self.peak_at = 0, ("forward", "")
        self.held = 0  # bytes kept, and offloaded bytes whose source is still there
        self.in_flight: deque[_Parked] = deque()
        self.flight_bytes = 0
        self.parked: dict[tuple[int, int], _Parked] = {}
        moved = [
            sum(u.moved_bytes for u, a in zip(block.units, actions, strict=True) if a is Action.OFFLOAD)
            for block, actions in zip(profile.blocks, assignment, strict=True)
        ]
        largest, fixed = max(moved, default=0), profile.window_bytes
        self.window_out = fixed or max(2 * largest, LEAST_WINDOW_BYTES)
        self.window_in = fixed or max(largest, LEAST_WINDOW_BYTES)
        self._out_free = 0.0
        self.served_bytes, self.handling_seconds = 0, 0.0

    def see(self, level_bytes: int, base_bytes: int, where: str, name: str) -> None:
        """Record the memory of one part of the step.

        Args:
            level_bytes: Most saved bytes on the device.
            base_bytes: All other memory.
            where: Forward, head or backward.
            name: The block.
        """
        self.levels.append(level_bytes)
        if level_bytes + base_bytes > self.peak:
            self.peak, self.peak_at = level_bytes + base_bytes, (where, name)

    def handle(self, nbytes: int) -> None:
        """Spend the compute time of offloading one storage."""
        rates = self.profile.rates
        seconds = rates.handling_seconds + nbytes * rates.handling_seconds_per_byte
        self.now += seconds
        self.handling_seconds += seconds

    # Forward

    def forward(self, place: int) -> None:
        block, actions = self.profile.blocks[place], self.assignment[place]
        slice_seconds = block.forward_seconds / max(len(block.units), 1)
        level = self.held
        for number, (unit, action) in enumerate(zip(block.units, actions, strict=True)):
            self.now += slice_seconds
            if action is Action.KEEP:
                self.held += unit.nbytes
            elif action is Action.OFFLOAD:
                self.handle(unit.moved_bytes)
                self.held += unit.moved_bytes
                self._park(place, number, unit.moved_bytes)
                self._retire(place)
            level = max(level, self.held)
        self.held += _more_inputs(block, actions)
        level = max(level, self.held)
        if not block.units:
            self.now += block.forward_seconds
        self._retire(place)
        self.see(level, block.forward_base_bytes, "forward", block.name)

    def _park(self, place: int, number: int, nbytes: int) -> None:
        begins = max(self.now, self._out_free)
        self._out_free = begins + nbytes / self.profile.rates.out_bytes_per_second
        parked = _Parked(nbytes, place, number, begins, self._out_free)
        self.parked[place, number] = parked
        self.in_flight.append(parked)
        self.flight_bytes += nbytes

    def _retire(self, place: int) -> None:
        while self.in_flight:
            oldest = self.in_flight[0]
            if oldest.done > self.now:
                if self.flight_bytes <= self.window_out:
                    return
                self.stalls[place] += oldest.done - self.now
                self.now = oldest.done
            oldest.resident = False
            self.in_flight.popleft()
            self.flight_bytes -= oldest.nbytes
            self.held -= oldest.nbytes

    # Backward

    def head(self) -> None:
        self.see(self.held, self.profile.head_base_bytes, "head", "")
        self.now += self.profile.head_seconds
        # Copies that have begun finish, others are cancelled. Either way the source still has the bytes.
        self.served_bytes = sum(self.profile.blocks[p.place].units[p.number].nbytes for p in self.in_flight)
        self.in_flight.clear()

    def backward(self) -> None:
        order = [
            (place, number)
            for place in reversed(range(len(self.profile.blocks)))
            for number in reversed(range(len(self.profile.blocks[place].units)))
        ]
        coming = _CopyIn(self, [key for key in order if (p := self.parked.get(key)) is not None and not p.resident])
        for place in reversed(range(len(self.profile.blocks))):
            self._block_backward(place, coming)

    def _block_backward(self, place: int, coming: _CopyIn) -> None:
        block, actions = self.profile.blocks[place], self.assignment[place]
        slice_seconds = block.backward_seconds / max(len(block.units), 1)
        back = 0  # recomputed or prefetched, and not yet released
        coming.advance()
        if Action.CHECKPOINT in actions:
            self.now += block.forward_seconds
            back = sum(u.nbytes for u, action in zip(block.units, actions, strict=True) if action is Action.CHECKPOINT)
        level = self.held + coming.ahead_bytes + back
        for number in reversed(range(len(block.units))):
            unit, action = block.units[number], actions[number]
            if action is Action.RECOMPUTE:
                self.now += unit.recompute_seconds or 0.0
                back += unit.nbytes
            elif (parked := self.parked.get((place, number))) is not None and not parked.resident:
                self.handle(unit.moved_bytes)
                ready = coming.arrival(place, number)
                if ready > self.now:
                    self.stalls[place] += ready - self.now
                    self.now = ready
                coming.read(place, number)
                back += unit.moved_bytes
            if action is Action.OFFLOAD and unit.narrow_bytes is not None:
                back += unit.nbytes  # cast up again
            level = max(level, self.held + coming.ahead_bytes + back)
            self.now += slice_seconds
        if not block.units:
            self.now += block.backward_seconds
        self.see(level, block.backward_base_bytes, "backward", block.name)
        # Its graph is gone, and so are the bytes kept for it.
        self.held -= _more_inputs(block, actions)
        for number, (unit, action) in enumerate(zip(block.units, actions, strict=True)):
            if action is Action.KEEP:
                self.held -= unit.nbytes
            elif action is Action.OFFLOAD and self.parked[place, number].resident:
                self.held -= unit.moved_bytes


def _more_inputs(block: BlockProfile, actions: Sequence[Action]) -> int:
    """Return the input bytes of a checkpointed block beyond those that it saves."""
    if Action.CHECKPOINT not in actions:
        return 0
    return max(block.input_bytes - sum(unit.nbytes for unit in block.units if unit.block_input), 0)


class _CopyIn:
    """Copy-ins, in the order in which backward reads."""

    def __init__(self, step: _Step, order: list[tuple[int, int]]) -> None:
        self._step, self._order = step, deque(order)
        self._free = 0.0
        self._arrivals: dict[tuple[int, int], float] = {}
        self.ahead_bytes = 0

    def advance(self) -> None:
        """Begin as many copies as the window allows."""
        while self._order:
            nbytes = self._step.parked[self._order[0]].nbytes
            if self.ahead_bytes and self.ahead_bytes + nbytes > self._step.window_in:
                return
            self._begin(self._order.popleft())

    def arrival(self, place: int, number: int) -> float:
        """Return when the bytes of a unit arrive; if its copy has not begun, begin it: it is the next in order."""
        if (place, number) not in self._arrivals:
            self._begin(self._order.popleft())
        return self._arrivals[place, number]

    def read(self, place: int, number: int) -> None:
        """Note that a unit was read: its bytes no longer count as ahead."""
        self.ahead_bytes -= self._step.parked[place, number].nbytes
        self.advance()

    def _begin(self, key: tuple[int, int]) -> None:
        parked = self._step.parked[key]
        begins = max(self._step.now, self._free, parked.done)
        self._free = begins + parked.nbytes / self._step.profile.rates.in_bytes_per_second
        self._arrivals[key] = self._free
        self.ahead_bytes += parked.nbytes


def simulate(profile: Profile, assignment: Assignment) -> Simulated:
    """Simulate one step. See [Note: the simulated schedule].

    Args:
        profile: The step.
        assignment: For each block of the profile, the action of each of its units.

    Returns:
        Its time, its stalls and its memory.
    """
    step = _Step(profile, assignment)
    for place in range(len(profile.blocks)):
        step.forward(place)
    step.head()
    step.backward()
    by_action = dict.fromkeys(Action, 0)
    recomputed, moved = 0.0, 0
    for place, number, unit in profile.units():
        action = assignment[place][number]
        by_action[action] += unit.nbytes
        moved += unit.moved_bytes if action is Action.OFFLOAD else 0
        recomputed += (unit.recompute_seconds or 0.0) if action is Action.RECOMPUTE else 0.0
    for block, actions in zip(profile.blocks, assignment, strict=True):
        recomputed += block.forward_seconds if Action.CHECKPOINT in actions else 0.0
    seconds = step.now + profile.tail_seconds
    return Simulated(
        step_seconds=seconds,
        overhead_seconds=seconds - profile.step_seconds,
        recompute_seconds=recomputed,
        stalls=tuple(step.stalls),
        levels_bytes=tuple(step.levels),
        peak_bytes=step.peak,
        peak_at=step.peak_at,
        kept_bytes=by_action[Action.KEEP],
        offloaded_bytes=by_action[Action.OFFLOAD],
        moved_bytes=moved,
        served_bytes=step.served_bytes,
        recomputed_bytes=by_action[Action.RECOMPUTE] + by_action[Action.CHECKPOINT],
        handling_seconds=step.handling_seconds,
    )
