"""One step of many ranks that share links, switches, host memory and each other's pace.

[Note: what ranks share]
Each rank carries out the engine's schedule, ``ebbtide.schedule``, as ``ebbtide.planner.simulate`` does, with its own
times. The difference is that a copy's rate is not its own: devices behind a switch divide its rate, and all of a node
divide the rate of the host's memory, in equal parts among those that copy at that moment; an unused part is not given
to others. Rates change whenever a copy begins or ends, so the step is a simulation of events.

Ranks of a sharded job wait for each other: the weights of a block are gathered one block ahead, so no rank begins a
block before all have begun the one before. Collectives themselves take no time here: they take it without offloading
too.
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from ebbtide.base.actions import Action, Site
from ebbtide.planner.profile import Profile
from ebbtide.planner.simulate import Assignment
from ebbtide.schedule import CopyIn, CopyOut, Outcome, Window


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How devices are connected.

    Attributes:
        ranks: Devices of a node.
        host_bytes_per_second: Rate of each node's host memory.
        devices_a_switch: Devices that share a link to the host.
        switch_bytes_per_second: Rate of that link, in each direction; ``None``: there are no switches.
    """

    ranks: int
    host_bytes_per_second: tuple[float, ...]
    devices_a_switch: int = 1
    switch_bytes_per_second: float | None = None


@dataclass(eq=False, slots=True)
class _Copy:
    left: float
    rank: int
    out: bool
    rate: float = 0.0
    ends: float = 0.0
    done: bool = False
    wake: Callable[[], None] | None = None


_Wait = tuple[str, float | int | _Copy]


class _Cluster:
    """The clock, the running copies, and which ranks wait for which. See [Note: what ranks share]."""

    def __init__(self, profiles: Sequence[Profile], nodes: Nodes) -> None:
        self.profiles, self.nodes = profiles, nodes
        self.now = 0.0
        self.ranks = [_Rank(self, number) for number in range(len(profiles))]
        self.active: list[list[_Copy]] = [[] for _ in nodes.host_bytes_per_second]
        self._since = [0.0] * len(self.active)
        self._turn = [0] * len(self.active)  # number of a node's latest event
        self._changed: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._begun: dict[int, int] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, call))

    def run(self, programs: Sequence[Generator[_Wait, None, None]]) -> None:
        """Run the ranks to their ends."""
        for rank, program in enumerate(programs):
            self._step(rank, program)
        self._share()
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self._share()

    def _step(self, rank: int, program: Generator[_Wait, None, None]) -> None:
        """Run a rank until it waits."""
        wake = partial(self._step, rank, program)
        for what, value in program:
            if isinstance(value, _Copy):
                if value.done:
                    continue
                value.wake = wake
            elif what == "block":
                if self._may_begin(int(value)):
                    continue
                self._waiting.setdefault(int(value), []).append(wake)
            else:
                self.at(self.now + value, wake)
            return
        self.ranks[rank].ended = self.now

    def _may_begin(self, number: int) -> bool:
        """Count a rank that begins a block, if all have begun the one before; release those that wait for it."""
        if number and self._begun.get(number - 1, 0) < len(self.ranks):
            return False
        self._begun[number] = self._begun.get(number, 0) + 1
        if self._begun[number] == len(self.ranks):
            waiting = self._waiting.pop(number + 1, [])
            self._begun[number + 1] = len(waiting)
            for wake in waiting:
                self.at(self.now, wake)
        return True

    # Copies

    def next(self, rank: int, out: bool) -> None:
        """Begin the next copy of a rank in a direction, unless one runs."""
        mine = self.ranks[rank]
        if mine.busy[out] or not mine.queues[out]:
            return
        begins, node = mine.queues[out].popleft(), rank // self.nodes.ranks
        mine.busy[out] = True
        self._advance(node)
        self.active[node].append(begins)
        self._changed.add(node)

    def _advance(self, node: int) -> None:
        """Count what a node has copied until now."""
        seconds, self._since[node] = self.now - self._since[node], self.now
        for each in self.active[node]:
            each.left -= each.rate * seconds

    def _share(self) -> None:
        """Recompute the rate of every copy on the nodes where a copy began or ended, and find the next end."""
        for node in self._changed:
            self._advance(node)
            copies, nodes = self.active[node], self.nodes
            behind: dict[tuple[int, bool], int] = {}
            for each in copies:
                key = (each.rank // nodes.devices_a_switch, each.out)
                behind[key] = behind.get(key, 0) + 1
            for each in copies:
                rates = self.profiles[each.rank].rates
                link = rates.out_bytes_per_second if each.out else rates.in_bytes_per_second
                if nodes.switch_bytes_per_second is not None:
                    sharing = behind[each.rank // nodes.devices_a_switch, each.out]
                    link = min(link, nodes.switch_bytes_per_second / sharing)
                each.rate = min(link, nodes.host_bytes_per_second[node] / len(copies))
                each.ends = self.now + max(each.left, 0.0) / each.rate
            self._turn[node] += 1
            if copies:
                turn = self._turn[node]
                self.at(min(each.ends for each in copies), lambda node=node, turn=turn: self._ended(node, turn))
        self._changed.clear()

    def _ended(self, node: int, turn: int) -> None:
        if turn != self._turn[node]:
            return
        self._advance(node)
        ended = [each for each in self.active[node] if each.ends <= self.now]
        self.active[node] = [each for each in self.active[node] if each.ends > self.now]
        self._changed.add(node)
        for each in ended:
            each.done = True
            self.ranks[each.rank].busy[each.out] = False
            self.next(each.rank, each.out)
            if each.wake is not None:
                each.wake()


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Offloaded:
    """An offloaded unit: its copy-out, and the one whose end its reader waits for, once they are queued."""

    site: Site
    nbytes: int
    out: _Copy | None = None
    back: _Copy | None = None
    on_device: bool = True


class _Rank:
    """A rank's queues and waits; the mover and the forward of its schedule."""

    def __init__(self, cluster: _Cluster, number: int) -> None:
        self._cluster, self._number = cluster, number
        self.queues: dict[bool, deque[_Copy]] = {True: deque(), False: deque()}
        self.busy = {True: False, False: False}
        self.ended = 0.0
        self.offered_bytes, self.offers_last = 0, True
        self._awaited: _Copy | None = None

    def _copy(self, nbytes: int, *, out: bool) -> _Copy:
        """Queue a copy after the others of the same direction."""
        made = _Copy(nbytes, self._number, out)
        self.queues[out].append(made)
        self._cluster.next(self._number, out)
        return made

    def wait(self) -> Generator[_Wait, None, None]:
        """Yield the copy that the schedule waits for. Waiting is the last that it does in a call, so this is exact."""
        if self._awaited is not None:
            yield "copy", self._awaited
            self._awaited = None

    def read(self, saved: _Offloaded) -> Generator[_Wait, None, None]:
        """Wait for the bytes of a unit that is in the store."""
        if not saved.on_device:
            if saved.back is None:
                self.copy_in([saved])
            if saved.back is not None:
                yield "copy", saved.back

    # Called by the schedule

    def stayed(self, storages: Sequence[tuple[Site, int]]) -> None:
        """Do nothing."""

    def copy_out(self, group: Sequence[_Offloaded], stream: object) -> list[Outcome]:
        for saved in group:
            saved.out = self._copy(saved.nbytes, out=True)
        return [Outcome.BEGUN] * len(group)

    def release_sources(self, group: Sequence[_Offloaded], *, wait: bool) -> bool:
        last = group[-1].out
        if last is not None and not last.done:
            if not wait:
                return False
            self._awaited = last
        for saved in group:
            saved.on_device = False
        return True

    def cancel_copy_out(self, saved: _Offloaded) -> bool:
        if saved.out not in self.queues[True]:
            return False
        self.queues[True].remove(saved.out)
        return True

    def to_copy(self, saved: _Offloaded) -> int:
        return 0 if saved.on_device else saved.nbytes

    def copy_in(self, group: Sequence[_Offloaded]) -> int:
        copies = [self._copy(saved.nbytes, out=False) for saved in group]
        for saved in group:
            saved.back = copies[-1]
        return 0

    def discard(self, saved: _Offloaded) -> None:
        saved.back = None


def _program(cluster: _Cluster, number: int, assignment: Assignment) -> Generator[_Wait, None, None]:
    """Yield the waits of a rank, in the order of the simulated schedule."""
    profile, rank = cluster.profiles[number], cluster.ranks[number]
    blocks = list(zip(profile.blocks, assignment, strict=True))
    moved = [
        sum(u.moved_bytes for u, a in zip(b.units, acts, strict=True) if a is Action.OFFLOAD) for b, acts in blocks
    ]
    window = Window(profile.window_bytes)
    window.saw_block(max(moved), alone=len(moved) == 1)
    offloaded: dict[tuple[int, int], _Offloaded] = {}
    leaving: CopyOut[_Offloaded] = CopyOut(rank, window)
    leaving.expect(sum(moved), to_its_end=moved[-1] > 0)
    yield "compute", profile.prologue_seconds
    for place, (block, actions) in enumerate(blocks):
        yield "block", place
        for index, (unit, action) in enumerate(zip(block.units, actions, strict=True)):
            yield "compute", block.forward_seconds / len(block.units)
            if action is Action.OFFLOAD:
                saved = offloaded[place, index] = _Offloaded(unit.site, unit.moved_bytes)
                leaving.add(saved, rank)
                yield from rank.wait()
        leaving.begin()
        leaving.retire()
        yield from rank.wait()
    leaving.end_forward(rank)
    yield "compute", profile.head_seconds
    leaving.cancel(rank)
    upcoming = (([weakref.ref(saved)], place) for (place, _), saved in reversed(offloaded.items()))
    coming: CopyIn[_Offloaded] = CopyIn(upcoming, window, rank)
    for place in reversed(range(len(blocks))):
        block, actions = blocks[place]
        yield "block", 2 * len(blocks) - 1 - place
        coming.reach(place)
        coming.advance()
        for index in reversed(range(len(block.units))):
            if actions[index] is Action.RECOMPUTE:
                yield "compute", block.units[index].recompute_seconds or 0.0
            if (each := offloaded.get((place, index))) is not None:
                yield from rank.read(each)
                coming.has_read(each)
            yield "compute", block.backward_seconds / len(block.units)
    yield "compute", profile.epilogue_seconds


def simulate_ranks(profiles: Sequence[Profile], assignment: Assignment, nodes: Nodes) -> list[float]:
    """Simulate one step of a sharded job. See [Note: what ranks share].

    Args:
        profiles: One for each rank, with equally many blocks. Every block saves something, and moving costs no compute.
        assignment: For each block, the action of each of its units: keep, offload or recompute.
        nodes: What ranks share; rank 9 is on the second node of eight.

    Returns:
        The seconds of each rank's step.
    """
    cluster = _Cluster(profiles, nodes)
    cluster.run([_program(cluster, rank, assignment) for rank in range(len(profiles))])
    return [rank.ended for rank in cluster.ranks]
